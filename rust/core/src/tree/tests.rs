#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails by panicking, as a test does"
)]

use super::*;
use PriorityClass::{High, Low};

mod machine;
mod model;

const NS: Namespace = Namespace(1);
const ALL: usize = usize::MAX;

fn config(policy: WritePolicy) -> TreeConfig {
    TreeConfig {
        policy,
        ..TreeConfig::default()
    }
}

fn tree(policy: WritePolicy) -> PrefixTree {
    PrefixTree::new(config(policy)).unwrap()
}

fn hybrid() -> PrefixTree {
    PrefixTree::new(TreeConfig {
        snapshots: true,
        ..config(WritePolicy::WriteThrough)
    })
    .unwrap()
}

/// Pages of 64 tokens, each page the repetition of one number.
fn prompt(pages: &[u32]) -> Vec<u32> {
    pages.iter().flat_map(|&page| [page; 64]).collect()
}

/// The prompt and one token more, so that all its pages can be matched.
fn longer(pages: &[u32]) -> Vec<u32> {
    let mut tokens = prompt(pages);
    tokens.push(0);
    tokens
}

fn device(ids: impl IntoIterator<Item = u32>) -> Vec<PageEntry> {
    ids.into_iter().map(PageEntry).collect()
}

fn low(ids: impl IntoIterator<Item = u32>) -> Vec<PageEntry> {
    ids.into_iter().map(|id| PageEntry(id | 1 << 31)).collect()
}

fn host(ids: impl IntoIterator<Item = u32>) -> Vec<HostPage> {
    ids.into_iter().map(HostPage).collect()
}

fn lookup(tree: &PrefixTree, pages: &[u32]) -> Lease {
    tree.match_prefix(NS, &longer(pages), ALL, High)
}

/// Publishes what the tree lacks of a prompt; page i gets the id `first` + i.
fn publish(tree: &PrefixTree, pages: &[u32], first: u32) -> Lease {
    let mut lease = lookup(tree, pages);
    let done = lease.len() / 64;
    let ids = (first..).take(pages.len()).skip(done);
    let tokens = prompt(&pages[done..]);
    let inserted = tree.insert(&mut lease, &tokens, &device(ids), High);
    assert_eq!(inserted.covered, pages.len() - done);
    tree.check().unwrap();
    lease
}

/// Stores everything that the tree wants stored, into host pages from `first` on.
fn store_all(tree: &PrefixTree, mut first: u32) {
    while let Some(want) = tree.next_store(ALL) {
        let count = u32::try_from(want.pages.len()).unwrap();
        let id = tree.begin_store(want, host(first..first + count));
        tree.check().unwrap();
        assert_eq!(tree.end_store(id, true), []);
        first += count;
        tree.check().unwrap();
    }
}

fn states(tree: &PrefixTree, lease: &Lease) -> Vec<NodeState> {
    tree.pages(lease).iter().map(|page| page.state).collect()
}

#[test]
fn what_was_published_is_matched_up_to_the_last_token() {
    let tree = tree(WritePolicy::None);
    drop(publish(&tree, &[1, 2, 3], 0));
    assert_eq!(lookup(&tree, &[1, 2, 3]).device_len(), 192);
    let exact = tree.match_prefix(NS, &prompt(&[1, 2, 3]), ALL, High);
    assert_eq!(exact.len(), 128, "one token is always computed");
    assert_eq!(
        tree.match_prefix(NS, &longer(&[1, 2, 3]), 191, High).len(),
        128
    );
    assert_eq!(lookup(&tree, &[1, 9, 3]).len(), 64);
    assert_eq!(tree.peek(NS, &longer(&[1, 2, 9]), ALL), (128, 0));
    assert_eq!(tree.peek(Namespace(2), &longer(&[1, 2, 9]), ALL), (0, 0));
    tree.check().unwrap();
}

#[test]
fn pages_of_the_tree_win_over_duplicates() {
    let tree = tree(WritePolicy::None);
    let mut other = lookup(&tree, &[1, 2, 3]);
    let first = publish(&tree, &[1, 2], 0);
    let inserted = tree.insert(&mut other, &prompt(&[1, 2, 3]), &device(10..13), High);
    assert_eq!(inserted.covered, 3);
    let pair = |i, given, own| (i, PageEntry(given), PageEntry(own));
    assert_eq!(inserted.duplicates, [pair(0, 10, 0), pair(1, 11, 1)]);
    assert_eq!((first.len(), other.device_len()), (128, 192));
    tree.check().unwrap();
}

#[test]
fn demoted_pages_are_loaded_back() {
    let tree = tree(WritePolicy::WriteThrough);
    drop(publish(&tree, &[1, 2, 3, 4], 0));
    store_all(&tree, 100);
    let evicted = tree.evict_device(3);
    assert_eq!(evicted.device, device(1..4));
    let lease = lookup(&tree, &[1, 2, 3, 4]);
    assert_eq!((lease.device_len(), lease.host_len()), (64, 192));
    assert_eq!(tree.loadable(&lease), 3);
    let job = tree.begin_load(&lease, &device(20..22));
    let copies = [
        (HostPage(101), PageEntry(20)),
        (HostPage(102), PageEntry(21)),
    ];
    assert_eq!(job.copies, copies);
    assert_eq!((tree.loadable(&lease), tree.joined(&lease)), (0, 2));
    tree.check().unwrap();
    assert_eq!(tree.end_load(job.id, true), []);
    assert_eq!((lease.device_len(), lease.host_len()), (192, 64));
    let job = tree.begin_load(&lease, &device(30..32));
    assert_eq!((job.copies.len(), &job.unused[..]), (1, &device([31])[..]));
    assert_eq!(tree.end_load(job.id, false), device([30]));
    assert_eq!(tree.end_load(job.id, false), [], "a job ends once");
    assert_eq!(states(&tree, &lease)[3], NodeState::Host);
    tree.check().unwrap();
}

#[test]
fn a_low_reader_streams_through_pages_that_go_with_it() {
    let tree = tree(WritePolicy::None);
    drop(publish(&tree, &[1, 2, 3], 0));
    let lease = tree.match_prefix(NS, &longer(&[1, 2, 3]), ALL, Low);
    tree.request_store(&lease);
    store_all(&tree, 100);
    assert_eq!(tree.demote(&lease), device(0..3));
    assert_eq!(tree.window_missing(&lease), 3);
    assert_eq!(tree.give_window(&lease, &low(0..2)), []);
    assert_eq!(tree.window_missing(&lease), 1);
    let other = tree.match_prefix(NS, &longer(&[1, 2, 3]), ALL, Low);
    assert!(tree.window_hold(&other));
    drop(lease);
    assert_eq!(tree.take_garbage(), Evicted::default());
    assert_eq!(
        states(&tree, &other),
        [NodeState::Low, NodeState::Low, NodeState::Host]
    );
    tree.window_release(&other);
    assert_eq!(tree.take_garbage().device, low(0..2));
    tree.check().unwrap();
}

#[test]
fn a_hybrid_hit_ends_at_a_snapshot() {
    let tree = hybrid();
    let lease = publish(&tree, &[1, 2, 3], 0);
    let job = tree.begin_snapshot(&lease, 128, 7).unwrap();
    assert!(tree.begin_snapshot(&lease, 128, 8).is_err());
    assert_eq!(lookup(&tree, &[1, 2, 3]).len(), 0, "not published yet");
    assert_eq!(tree.end_snapshot(job, true), None);
    let hit = lookup(&tree, &[1, 2, 3]);
    assert_eq!((hit.len(), hit.snapshot()), (128, Some((128, 7))));
    assert_eq!(tree.evict_snapshot(1), [], "locked by the hit");
    drop(hit);
    assert_eq!(tree.evict_snapshot(1), [7]);
    tree.check().unwrap();
}
