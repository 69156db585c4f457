//! Every interleaving of a lease that is dropped, or taken, beside eviction.

use loom::thread;

use super::*;
use PriorityClass::High;

const NS: Namespace = Namespace(0);
const ALL: usize = usize::MAX;

/// Two pages on device, and a prompt that matches both.
fn cached() -> (PrefixTree, Vec<u32>) {
    let config = TreeConfig {
        policy: WritePolicy::None,
        ..TreeConfig::default()
    };
    let tree = PrefixTree::new(config).unwrap();
    let tokens: Vec<u32> = (0..129).collect();
    let mut lease = tree.match_prefix(NS, &tokens, ALL, High);
    let pages = [PageEntry(0), PageEntry(1)];
    assert_eq!(
        tree.insert(&mut lease, &tokens[..128], &pages, High)
            .covered,
        2
    );
    drop(lease);
    (tree, tokens)
}

/// Nothing is locked; `evicted` and what is left are the two pages.
fn check_end(tree: &PrefixTree, evicted: usize) {
    tree.check().unwrap();
    assert_eq!(tree.stats().leases, 0);
    assert_eq!(tree.evictable_device() + evicted, 2);
    assert_eq!(tree.evict_device(2).device.len() + evicted, 2);
}

#[test]
fn loom_lease_drop_beside_eviction_frees_each_page_once() {
    loom::model(|| {
        let (tree, tokens) = cached();
        let lease = tree.match_prefix(NS, &tokens, ALL, High);
        let holder = thread::spawn(move || {
            assert_eq!(lease.len(), 128, "the promise holds while the lease lives");
            drop(lease);
        });
        let evicted = tree.evict_device(1).device.len();
        holder.join().unwrap();
        check_end(&tree, evicted);
    });
}

#[test]
fn loom_match_beside_eviction_gets_what_is_left() {
    loom::model(|| {
        let (tree, tokens) = cached();
        let evictor = tree.clone();
        let evictor = thread::spawn(move || evictor.evict_device(1).device.len());
        let lease = tree.match_prefix(NS, &tokens, ALL, High);
        let (len, pages) = (lease.device_len(), tree.pages(&lease).len());
        assert_eq!(len, pages * 64, "no page of a lease goes");
        let evicted = evictor.join().unwrap();
        assert_eq!(
            evicted,
            2 - pages,
            "either the match came first or the eviction"
        );
        drop(lease);
        check_end(&tree, evicted);
    });
}

#[test]
fn loom_two_releases_and_an_eviction() {
    loom::model(|| {
        let (tree, tokens) = cached();
        let first = tree.match_prefix(NS, &tokens, ALL, High);
        let second = tree.match_prefix(NS, &tokens[..65], ALL, High);
        let one = thread::spawn(move || drop(first));
        let two = thread::spawn(move || drop(second));
        let evicted = tree.evict_device(2).device.len();
        one.join().unwrap();
        two.join().unwrap();
        check_end(&tree, evicted);
    });
}
