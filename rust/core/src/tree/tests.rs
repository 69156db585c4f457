#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails by panicking, as a test does"
)]

use super::*;
use crate::host::HostPages;
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
    assert!(tree.evict_snapshot(1).is_empty(), "locked by the hit");
    drop(hit);
    assert_eq!(tree.evict_snapshot(1), [7]);
    tree.check().unwrap();
}

/// PFX-01: 1,000 tokens cached, snapshots at 512 and 896.
#[test]
fn pfx_01_a_hybrid_hit_is_the_deepest_snapshot_at_or_before_the_kv() {
    let tree = hybrid();
    let pages: Vec<u32> = (1..=15).collect();
    let lease = publish(&tree, &pages, 0);
    for (slot, position) in [(0, 512), (1, 896)] {
        let job = tree.begin_snapshot(&lease, position, slot).unwrap();
        assert_eq!(tree.end_snapshot(job, true), None);
    }
    drop(lease);
    let mut tokens = prompt(&pages);
    tokens.resize(1_000, 9);
    let hit = tree.match_prefix(NS, &tokens, ALL, High);
    assert_eq!((hit.len(), hit.snapshot()), (896, Some((896, 1))));
    assert_eq!(tree.stats().lost_no_snapshot_tokens, 64);
    let shorter = tree.match_prefix(NS, &tokens[..896], ALL, High);
    assert_eq!(shorter.len(), 512, "one token is left to compute");
    let diverging = lookup(&tree, &[1, 2, 3, 4, 5, 6, 7, 8, 77, 78]);
    assert_eq!(diverging.snapshot(), Some((512, 0)));
    drop((hit, shorter, diverging));
    // KV that leads to no snapshot goes first, although it was used last.
    assert_eq!(tree.evict_device(2).device, device([14, 13]));
    tree.check().unwrap();
}

/// PFX-04: a page that is not full is never published.
#[test]
fn pfx_04_only_full_pages_are_published() {
    let tree = tree(WritePolicy::None);
    let mut lease = lookup(&tree, &[]);
    let tokens = &longer(&[1, 2, 3])[..191];
    let inserted = tree.insert(&mut lease, tokens, &device(0..3), High);
    assert_eq!((inserted.covered, lease.len()), (2, 128));
    assert_eq!(lookup(&tree, &[1, 2, 3, 4]).len(), 128);
    let none = tree.insert(&mut lease, &tokens[..63], &device([9]), High);
    assert_eq!(none, Inserted::default());
    tree.check().unwrap();
}

/// PFX-05: tokens decide, whatever the hash.
#[test]
fn pfx_05_similar_prompts_and_equal_hashes_never_share() {
    for hash in [page_hash, |_: &[u32]| 7] {
        let tree = PrefixTree::new(TreeConfig {
            hash,
            ..TreeConfig::default()
        })
        .unwrap();
        drop(publish(&tree, &[1, 2], 0));
        for difference in [1, 256, 65_536, 1 << 31] {
            for position in [0, 17, 63] {
                let mut tokens = longer(&[1, 2]);
                tokens[position] += difference;
                assert_eq!(tree.peek(NS, &tokens, ALL), (0, 0));
                tokens[position] -= difference;
                tokens[64 + position] += difference;
                assert_eq!(tree.peek(NS, &tokens, ALL), (64, 0));
            }
        }
        assert_eq!(tree.peek(Namespace(2), &longer(&[1, 2]), ALL), (0, 0));
        drop(publish(&tree, &[1 + 256, 2], 10));
        drop(publish(&tree, &[1 + 65_536, 2], 20));
        let first = |page| tree.pages(&lookup(&tree, &[page, 2]))[0].device;
        assert_eq!(first(1), Some(PageEntry(0)));
        assert_eq!(first(257), Some(PageEntry(10)));
        assert_eq!(first(65_537), Some(PageEntry(20)));
    }
}

/// PFX-05: the hash of a page never changes, in any process.
#[test]
fn pfx_05_the_hash_of_a_page_is_fixed() {
    let page: Vec<u32> = (0..64).collect();
    assert_eq!(page_hash(&page), 0x7633_C079_BBCB_2D27_5932_13B5_0BBA_8CAA);
    assert_ne!(page_hash(&[1, 2]), page_hash(&[2, 1]));
}

/// PFX-07: answers are owned copies, and a stale node id answers "gone".
#[test]
fn pfx_07_answers_survive_and_stale_ids_name_nothing() {
    let tree = tree(WritePolicy::None);
    let lease = publish(&tree, &[1, 2, 3], 0);
    let (pages, node) = (tree.pages(&lease), tree.end_node(&lease).unwrap());
    drop(lookup(&tree, &[1, 2, 9]));
    assert_eq!(
        tree.end_node(&lease),
        Some(node),
        "a split keeps the id of the end"
    );
    drop(lease);
    assert_eq!(tree.evict_device(3).device.len(), 3);
    drop(publish(&tree, &[4, 5, 6], 0));
    assert_eq!(
        tree.node_state(node),
        None,
        "although its place has a new node"
    );
    assert!(pages.iter().all(|page| page.state == NodeState::Full));
    assert_eq!(
        tree.node_state(NodeId::from_parts(u64::MAX, u32::MAX)),
        None
    );
}

/// PFX-09: what a look-up promised is not shortened, and is evictable after the drop.
#[test]
fn pfx_09_eviction_between_match_and_use_spares_the_lease() {
    let tree = tree(WritePolicy::WriteThrough);
    drop(publish(&tree, &[1, 2, 3, 4], 0));
    store_all(&tree, 0);
    tree.evict_device(2);
    let lease = lookup(&tree, &[1, 2, 3, 4]);
    assert_eq!(
        (tree.evict_device(9), tree.evict_host(9)),
        Default::default()
    );
    assert_eq!((lease.device_len(), lease.host_len()), (128, 128));
    drop(lease);
    assert_eq!(tree.evict_host(9).host.len(), 4);
    assert_eq!(tree.evict_device(9).device.len(), 2);
    assert_eq!(tree.stats().nodes, 0);
}

/// PFX-12: the end of a request takes one lock, no page of others.
#[test]
fn pfx_12_a_finished_request_releases_its_lock_only() {
    let tree = tree(WritePolicy::None);
    let first = publish(&tree, &[1, 2], 0);
    let second = publish(&tree, &[1, 3], 10);
    assert_eq!(tree.evictable_device(), 0);
    drop(first);
    assert_eq!(tree.evictable_device(), 1);
    assert_eq!(tree.evict_device(9).device, device([1]));
    assert_eq!(second.device_len(), 128);
    drop(second);
    let stats = tree.stats();
    assert_eq!(
        (tree.evictable_device(), stats.full_pages, stats.leases),
        (2, 2, 0)
    );
    tree.check().unwrap();
}

/// PFX-13: class before age, exactly the shortfall, a parent with its own old tick.
#[test]
fn pfx_13_eviction_takes_the_least_valuable_tail() {
    let tree = tree(WritePolicy::None);
    let mut lease = lookup(&tree, &[]);
    tree.insert(&mut lease, &prompt(&[1, 2, 3]), &device(0..3), High);
    drop(lease);
    let mut lease = lookup(&tree, &[]);
    tree.insert(&mut lease, &prompt(&[5, 6]), &device(5..7), Low);
    drop(lease);
    assert_eq!(
        tree.evict_device(1).device,
        device([6]),
        "LOW, although newer"
    );
    drop(publish(&tree, &[1, 2, 3, 4], 0));
    drop(publish(&tree, &[8], 8));
    assert_eq!(
        tree.evict_device(3).device,
        device([5, 3, 2]),
        "then the oldest tail"
    );
    assert_eq!(tree.evict_device(0), Evicted::default());
    assert_eq!(tree.evict_device(9).device.len(), 3);
    assert_eq!(tree.evict_device(9), Evicted::default());
}

/// PFX-14: no snapshot slot is free or evictable: counted, nothing else.
#[test]
fn pfx_14_a_snapshot_without_a_slot_is_counted() {
    let tree = hybrid();
    let lease = publish(&tree, &[1, 2], 0);
    assert!(tree.evict_snapshot(1).is_empty());
    assert_eq!(tree.stats().snapshots_short, 1);
    let job = tree.begin_snapshot(&lease, 64, 3).unwrap();
    assert_eq!(
        tree.end_snapshot(job, false),
        Some(3),
        "a failed one gives its slot back"
    );
    assert_eq!(lookup(&tree, &[1, 2]).len(), 0);
    for bad in [0, 63, 192, usize::MAX] {
        assert!(tree.begin_snapshot(&lease, bad, 3).is_err(), "at {bad}");
    }
    tree.check().unwrap();
}

/// HST-05: host pages under a load are no candidates.
#[test]
fn hst_05_a_load_in_flight_keeps_its_sources() {
    let tree = tree(WritePolicy::WriteThrough);
    drop(publish(&tree, &[1, 2], 0));
    store_all(&tree, 0);
    tree.evict_device(2);
    let lease = lookup(&tree, &[1, 2]);
    let job = tree.begin_load(&lease, &device(5..7));
    drop(lease);
    assert_eq!(
        (tree.evict_host(9), tree.evict_device(9)),
        Default::default()
    );
    assert_eq!(tree.clear(), Evicted::default());
    assert_eq!(tree.end_load(job.id, false), device(5..7));
    assert_eq!(tree.evict_host(9).host, host(0..2));
}

#[test]
fn write_back_stores_what_is_evicted_and_then_demotes_it() {
    let tree = tree(WritePolicy::WriteBack);
    drop(publish(&tree, &[1, 2, 3], 0));
    assert_eq!(tree.next_store(ALL), None);
    let evicted = tree.evict_device(2);
    assert_eq!((evicted.device.len(), evicted.coming), (0, 2));
    assert_eq!(tree.evict_device(2).coming, 2, "the same pages");
    let want = tree.next_store(ALL).unwrap();
    let id = tree.begin_store(want, host(0..2));
    assert_eq!(tree.end_store(id, true), []);
    assert_eq!(tree.take_garbage().device, device([1, 2]));
    assert_eq!(tree.peek(NS, &longer(&[1, 2, 3]), ALL), (64, 128));
    tree.evict_device(1);
    let want = tree.next_store(ALL).unwrap();
    tree.drop_store(want);
    let gone = tree.take_garbage();
    assert_eq!(
        (gone.device.len(), gone.host.len()),
        (1, 2),
        "unreachable without it"
    );
    assert_eq!((tree.stats().nodes, tree.stats().host_full_tokens), (0, 64));
}

#[test]
fn a_selective_tree_stores_what_is_hit_twice() {
    let tree = tree(WritePolicy::Selective { hits: 2 });
    drop(publish(&tree, &[1, 2], 0));
    drop(lookup(&tree, &[1, 2]));
    assert_eq!(tree.next_store(ALL), None);
    drop(lookup(&tree, &[1]));
    assert_eq!(tree.next_store(ALL).unwrap().pages, device([0]));
}

#[test]
fn stores_go_parent_first_and_not_again_before_a_use() {
    let tree = tree(WritePolicy::WriteThrough);
    let lease = publish(&tree, &[1, 2, 3, 4], 0);
    let want = tree.next_store(3).unwrap();
    assert_eq!(want.pages, device(0..3));
    assert_eq!(tree.next_store(3), None, "the rest follows its parent");
    let id = tree.begin_store(want, host(0..2));
    assert_eq!(tree.end_store(id, true), []);
    let want = tree.next_store(9).unwrap();
    assert_eq!(want.pages, device([2]));
    tree.drop_store(want);
    assert_eq!(tree.next_store(9), None);
    drop(lookup(&tree, &[1, 2, 3, 4]));
    assert_eq!(tree.next_store(9).unwrap().pages, device([2]));
    assert_eq!(lease.len(), 256);
    tree.check().unwrap();
}

#[test]
fn fixed_slots_share_host_pages_only() {
    let tree = PrefixTree::new(TreeConfig {
        device_tier: false,
        ..TreeConfig::default()
    })
    .unwrap();
    let mut lease = lookup(&tree, &[1]);
    let refused = tree.insert(&mut lease, &prompt(&[1]), &device([0]), High);
    assert_eq!(refused, Inserted::default());
    assert_eq!(
        tree.insert_host(NS, &prompt(&[1, 2]), 0, &host(0..2), High),
        Ok(vec![])
    );
    let again = tree.insert_host(NS, &prompt(&[1, 2, 3]), 1, &host(5..7), High);
    assert_eq!(again, Ok(host([5])));
    let gone = tree.insert_host(NS, &prompt(&[9, 2, 3]), 1, &host(7..9), High);
    assert_eq!(gone, Ok(host(7..9)));
    let hit = lookup(&tree, &[1, 2, 3]);
    assert_eq!((hit.device_len(), hit.host_len()), (0, 192));
    tree.check().unwrap();
}

#[test]
fn a_lease_that_computes_its_host_part_is_shortened_first() {
    let tree = tree(WritePolicy::WriteThrough);
    drop(publish(&tree, &[1, 2, 3], 0));
    store_all(&tree, 0);
    tree.evict_device(2);
    let mut lease = lookup(&tree, &[1, 2, 3]);
    let below_host = tree.insert(&mut lease, &prompt(&[4]), &device([9]), High);
    assert_eq!(below_host.covered, 0, "device pages have no holes");
    let device_len = lease.device_len();
    tree.shorten(&mut lease, device_len);
    assert_eq!(lease.len(), 64);
    let inserted = tree.insert(&mut lease, &prompt(&[2, 3, 4]), &device(11..14), High);
    assert_eq!((inserted.covered, inserted.duplicates.len()), (3, 0));
    assert_eq!(lease.device_len(), 256);
    tree.check().unwrap();
}

#[test]
fn a_lease_of_another_tree_does_nothing() {
    let (one, other) = (tree(WritePolicy::None), tree(WritePolicy::None));
    drop(publish(&one, &[1], 0));
    let mut lease = lookup(&one, &[1]);
    assert!(!other.owns(&lease));
    let inserted = other.insert(&mut lease, &prompt(&[2]), &device([5]), High);
    assert_eq!(inserted, Inserted::default());
    assert_eq!(
        (other.pages(&lease), other.demote(&lease)),
        (vec![], vec![])
    );
    assert_eq!(other.digest(), tree(WritePolicy::None).digest());
}

#[test]
fn bad_settings_and_dumps_are_refused() {
    let build = |page_size, policy| {
        PrefixTree::new(TreeConfig {
            page_size,
            policy,
            ..TreeConfig::default()
        })
    };
    for page_size in [0, 3, 1 << 25] {
        assert!(build(page_size, WritePolicy::None).is_err());
    }
    assert!(build(64, WritePolicy::Selective { hits: 0 }).is_err());
    let tree = tree(WritePolicy::WriteThrough);
    let lease = publish(&tree, &[1, 2], 0);
    let restore = |dump: &TreeDump| PrefixTree::restore(config(WritePolicy::WriteThrough), dump);
    assert!(restore(&tree.dump()).is_err(), "locked");
    drop(lease);
    let dump = tree.dump();
    assert_eq!(restore(&dump).unwrap().dump(), dump);
    let damage: [fn(&mut NodeDump); 6] = [
        |node| node.start = 64,
        |node| node.tokens.truncate(100),
        |node| node.tokens.clear(),
        |node| node.state = NodeState::Host,
        |node| node.device[1] = node.device[0],
        |node| node.host.push(HostPage(0)),
    ];
    for damage in damage {
        let mut bad = dump.clone();
        damage(&mut bad.nodes[0]);
        assert!(restore(&bad).is_err(), "{bad:?}");
    }
}

/// An 8-page host tier under 10^5 random requests: no error, nothing grows.
#[test]
fn a_tiny_host_tier_serves_many_requests() {
    let tree = tree(WritePolicy::WriteThrough);
    let pool = HostPages::new(8).unwrap();
    let mut free: Vec<u32> = (0..16).collect();
    let mut numbers = machine::Numbers(1);
    for _ in 0..100_000 {
        let pages = [numbers.next() % 6, numbers.next() % 6, numbers.next() % 6];
        let mut lease = lookup(&tree, &pages);
        let missing = 3 - lease.device_len() / 64;
        let device_len = lease.device_len();
        tree.shorten(&mut lease, device_len);
        if free.len() < missing {
            let evicted = tree.evict_device(missing - free.len());
            free.extend(evicted.device.iter().map(|page| page.0));
            pool.free(&evicted.host).unwrap();
        }
        let given = device(free.drain(free.len() - missing..));
        let tokens = prompt(&pages[3 - missing..]);
        let inserted = tree.insert(&mut lease, &tokens, &given, High);
        assert_eq!((inserted.covered, inserted.duplicates.len()), (missing, 0));
        while let Some(want) = tree.next_store(4) {
            let short = want.pages.len().saturating_sub(pool.free_count());
            let evicted = tree.evict_host(short);
            pool.free(&evicted.host).unwrap();
            match pool.alloc(want.pages.len()) {
                None => tree.drop_store(want),
                Some(host) => {
                    let id = tree.begin_store(want, host);
                    assert_eq!(tree.end_store(id, true), []);
                }
            }
        }
    }
    let stats = tree.stats();
    assert!(
        stats.nodes <= 24 && stats.leases == 0 && stats.host_pages <= 8,
        "{stats:?}"
    );
    assert_eq!(stats.full_pages + free.len(), 16);
    assert_eq!(stats.host_pages + pool.free_count(), 8);
    tree.check().unwrap();
}
