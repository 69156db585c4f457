//! Random calls to the tree and to the model side by side. After every call the whole tree, page
//! by page, equals the model, and every page that was handed out is in one place.

mod compare;
mod copies;

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

use super::model::{Given, Model, Path, steps};
use super::*;

const DEVICE: u32 = 20;
const HOST: u32 = 14;
const SLOTS: u32 = 3;
const LOW: u32 = 1 << 31;

/// A call by number, and numbers from which its arguments are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Op(pub(super) u8, pub(super) [u32; 3]);

#[derive(Clone, Debug)]
pub(super) struct Setup {
    policy: WritePolicy,
    page_size: u32,
    snapshots: bool,
    device_tier: bool,
    collide: bool,
}

/// Tree, model, and the pools that a caller would have.
pub(super) struct Pair {
    pub(super) tree: PrefixTree,
    model: Model,
    leases: BTreeMap<u64, Lease>,
    wants: BTreeMap<u64, StoreWant>,
    loads: BTreeSet<u64>,
    stores: BTreeSet<u64>,
    snapshot_jobs: BTreeSet<u64>,
    device: BTreeSet<u32>,
    low: BTreeSet<u32>,
    host: BTreeSet<u32>,
    slots: BTreeSet<u32>,
    page_size: usize,
}

fn constant_hash(_: &[u32]) -> u128 {
    7
}

impl Setup {
    pub(super) fn any(seed: u32) -> Self {
        let policies = [
            WritePolicy::WriteThrough,
            WritePolicy::Selective { hits: 2 },
            WritePolicy::WriteBack,
            WritePolicy::None,
        ];
        Self {
            policy: policies[seed as usize % 4],
            page_size: [64, 16, 128][seed as usize / 4 % 3],
            snapshots: seed / 12 % 2 == 1,
            device_tier: seed / 24 % 6 != 5,
            collide: seed / 144 % 3 == 2,
        }
    }

    pub(super) fn pair(&self) -> Pair {
        let config = TreeConfig {
            page_size: self.page_size,
            snapshots: self.snapshots,
            device_tier: self.device_tier,
            policy: self.policy,
            hash: if self.collide {
                constant_hash
            } else {
                page_hash
            },
        };
        Pair {
            tree: PrefixTree::new(config.clone()).unwrap(),
            model: Model::new(config),
            leases: BTreeMap::new(),
            wants: BTreeMap::new(),
            loads: BTreeSet::new(),
            stores: BTreeSet::new(),
            snapshot_jobs: BTreeSet::new(),
            device: (0..DEVICE).collect(),
            low: (LOW..LOW + DEVICE).collect(),
            host: (0..HOST).collect(),
            slots: (0..SLOTS).collect(),
            page_size: self.page_size as usize,
        }
    }
}

fn pick<T: Copy + Ord>(set: impl IntoIterator<Item = T>, by: u32) -> Option<T> {
    let all: Vec<T> = set.into_iter().collect();
    (!all.is_empty()).then(|| all[by as usize % all.len()])
}

fn class(by: u32) -> PriorityClass {
    if by.is_multiple_of(3) { Low } else { High }
}

/// Up to `n` members of a pool.
fn draw(pool: &BTreeSet<u32>, n: usize) -> Vec<u32> {
    pool.iter().copied().take(n).collect()
}

impl Pair {
    /// A prompt of up to 8 pages of three kinds, so that prefixes often meet.
    fn path(&self, by: u32) -> Path {
        let namespace = by % 5 / 4;
        let unit = u32::try_from(self.model.unit()).unwrap();
        let len = by / 5 % (4 * unit.min(2) + 1);
        let mut bits = by / 45;
        let mut path = vec![namespace];
        for _ in 0..len {
            path.push(bits % 3);
            bits = bits.rotate_right(3);
        }
        path
    }

    fn tokens(&self, pages: &[u32]) -> Vec<u32> {
        let page = |&page: &u32| std::iter::repeat_n(page, self.page_size);
        pages.iter().flat_map(page).collect()
    }

    fn lease(&self, by: u32) -> Option<u64> {
        pick(self.leases.keys().copied(), by)
    }

    /// Frees what came back; it must not have been free.
    fn free(&mut self, given: &Given) {
        for &page in &given.device {
            let pool = if page >= LOW {
                &mut self.low
            } else {
                &mut self.device
            };
            assert!(pool.insert(page), "device page {page} is free already");
        }
        for &page in &given.host {
            assert!(self.host.insert(page), "host page {page} is free already");
        }
        for &slot in &given.snapshots {
            assert!(self.slots.insert(slot), "slot {slot} is free already");
        }
    }

    fn free_device(&mut self, pages: impl IntoIterator<Item = PageEntry>) {
        let device = pages.into_iter().map(|page| page.0).collect();
        self.free(&Given {
            device,
            ..Given::default()
        });
    }

    fn free_host(&mut self, pages: impl IntoIterator<Item = HostPage>) {
        let host = pages.into_iter().map(|page| page.0).collect();
        self.free(&Given {
            host,
            ..Given::default()
        });
    }

    pub(super) fn apply(&mut self, Op(kind, args): Op) {
        match kind % 24 {
            0..=2 => self.lookup(args),
            3 | 4 => self.release(args),
            5..=8 => self.insert(args),
            9 => self.evict_device(args),
            10 => self.evict_host(args),
            11 => self.evict_snapshot(args),
            12 => self.load(args),
            13 => self.end_load(args),
            14 => self.want(args),
            15 => self.store(args),
            16 => self.end_store(args),
            17 => self.low_reader(args),
            18 => self.insert_host(args),
            19 => self.extend_host(args),
            20 => self.shorten(args),
            21 => self.begin_snapshot(args),
            22 => self.end_snapshot(args),
            _ => self.rare(args),
        }
        let garbage = self.tree.take_garbage();
        std::mem::take(&mut self.model.garbage).assert_eq(&garbage);
        self.free(&Given::of(&garbage));
        self.compare();
    }

    fn lookup(&mut self, [by, limit, class_by]: [u32; 3]) {
        if self.leases.len() >= 6 {
            return self.release([by, 0, 0]);
        }
        let path = self.path(by);
        let mut tokens = self.tokens(&path[1..]);
        if class_by % 4 > 0 {
            tokens.push(9);
        }
        let namespace = Namespace(u64::from(path[0]));
        let limit = if limit % 4 == 0 {
            limit as usize % 600
        } else {
            ALL
        };
        let most = tokens.len().saturating_sub(1).min(limit) / self.page_size;
        let peeked = self.tree.peek(namespace, &tokens, limit);
        let lease = self
            .tree
            .match_prefix(namespace, &tokens, limit, class(class_by));
        let id = lease.id;
        self.model.lookup(id, &path, most, class(class_by));
        assert_eq!(peeked, (lease.device_len(), lease.host_len()));
        assert_eq!(lease.len() % 64, 0);
        assert!(tokens.is_empty() || lease.len() < tokens.len());
        self.leases.insert(id, lease);
    }

    fn release(&mut self, [by, ..]: [u32; 3]) {
        if let Some(id) = self.lease(by) {
            self.leases.remove(&id);
            self.model.release(id);
        }
    }

    fn insert(&mut self, [by, lease, class_by]: [u32; 3]) {
        let Some(id) = self.lease(lease) else {
            return self.lookup([by, 1, class_by]);
        };
        let suffix = self.path(by)[1..].to_vec();
        let count = (12usize.saturating_sub(self.model.holds[&id].path.len())).min(suffix.len());
        let pages = device(draw(&self.device, count));
        let tokens = self.tokens(&suffix[..pages.len()]);
        let expected = self.model.insert(id, &suffix, &pages, class(class_by));
        let lease = self.leases.get_mut(&id).unwrap();
        let inserted = self.tree.insert(lease, &tokens, &pages, class(class_by));
        assert_eq!(inserted, expected);
        for page in &pages[..inserted.covered] {
            self.device.remove(&page.0);
        }
        self.free_device(inserted.duplicates.iter().map(|&(_, own, _)| own));
    }

    fn evict_device(&mut self, [n, ..]: [u32; 3]) {
        let expected = self.model.evict_device(n as usize % 6);
        let evicted = self.tree.evict_device(n as usize % 6);
        expected.assert_eq(&evicted);
        self.free(&expected);
    }

    fn evict_host(&mut self, [n, ..]: [u32; 3]) {
        let evicted = self.tree.evict_host(n as usize % 6);
        let expected = self.model.evict_host(n as usize % 6, &evicted);
        expected.assert_eq(&evicted);
        self.free(&expected);
    }

    fn evict_snapshot(&mut self, [n, ..]: [u32; 3]) {
        let expected = self.model.evict_snapshot(n as usize % 3);
        assert_eq!(self.tree.evict_snapshot(n as usize % 3), expected);
        self.free(&Given {
            snapshots: expected.into_iter().collect(),
            ..Given::default()
        });
    }

    fn low_reader(&mut self, [lease, what, n]: [u32; 3]) {
        let Some(id) = self.lease(lease) else {
            return;
        };
        let lease = &self.leases[&id];
        let tier = self.model.config.device_tier;
        let low = self.model.holds[&id].reader == Low && tier;
        let mut missing = self.model.on_path(id, NodeState::Host);
        missing.retain(|_| tier);
        assert_eq!(self.tree.window_missing(lease), missing.len());
        match what % 6 {
            0 => {
                let expected = self.model.demote(id);
                let mut freed = self.tree.demote(lease);
                freed.sort_unstable_by_key(|page| page.0);
                assert_eq!(
                    freed,
                    BTreeSet::from_iter(expected)
                        .into_iter()
                        .collect::<Vec<_>>()
                );
                self.free_device(freed);
            }
            1 | 2 => {
                let pages = device(draw(&self.low, n as usize % 6));
                let left = self.tree.give_window(lease, &pages);
                let used = if low {
                    missing.len().min(pages.len())
                } else {
                    0
                };
                assert_eq!(left, pages[used..]);
                for (path, &page) in missing.iter().zip(&pages[..used]) {
                    let found = self.model.pages.get_mut(path).unwrap();
                    found.state = NodeState::Low;
                    found.device = Some(page);
                    self.low.remove(&page.0);
                }
                self.model.holds.get_mut(&id).unwrap().windows |= low;
            }
            3 => {
                assert_eq!(self.tree.window_hold(lease), low);
                self.model.holds.get_mut(&id).unwrap().windows |= low;
            }
            4 => {
                self.tree.window_release(lease);
                self.model.holds.get_mut(&id).unwrap().windows = false;
                self.model.drop_windows();
            }
            _ => {
                self.tree.request_store(lease);
                for path in steps(&self.model.holds[&id].path.clone()) {
                    self.model.pages.get_mut(path).unwrap().forced = true;
                }
            }
        }
    }

    fn insert_host(&mut self, [by, first, class_by]: [u32; 3]) {
        let path = self.path(by);
        let first = first as usize % path.len();
        let pages = host(draw(&self.host, path.len() - 1 - first));
        let path = &path[..=first + pages.len()];
        let tokens = self.tokens(&path[1..]);
        let namespace = Namespace(u64::from(path[0]));
        let class = class(class_by);
        let unused = self
            .tree
            .insert_host(namespace, &tokens, first, &pages, class);
        let mut at = path[..=first].to_vec();
        let expected = if first == 0 || self.model.pages.contains_key(&at) {
            self.model
                .publish_host(&mut at, &path[first + 1..], &pages, class, false)
                .1
        } else {
            pages.clone()
        };
        assert_eq!(unused, Ok(expected.clone()));
        for page in pages {
            self.host.remove(&page.0);
        }
        self.free_host(expected);
        let wrong = self
            .tree
            .insert_host(namespace, &tokens, path.len(), &[], class);
        assert!(wrong.is_err(), "a page is missing");
    }

    fn extend_host(&mut self, [by, lease, class_by]: [u32; 3]) {
        let Some(id) = self.lease(lease) else {
            return;
        };
        let mut path = self.model.holds[&id].path.clone();
        let suffix = self.path(by)[1..].to_vec();
        let count = (12usize.saturating_sub(path.len())).min(suffix.len());
        let pages = host(draw(&self.host, count));
        let class = class(class_by);
        let suffix = &suffix[..pages.len()];
        let expected = self
            .model
            .publish_host(&mut path, suffix, &pages, class, true);
        self.model.holds.get_mut(&id).unwrap().path = path;
        let tokens = self.tokens(suffix);
        let lease = self.leases.get_mut(&id).unwrap();
        let published = self.tree.extend_host(lease, &tokens, &pages, class);
        assert_eq!(published, expected);
        for page in pages {
            self.host.remove(&page.0);
        }
        self.free_host(expected.1);
    }

    fn shorten(&mut self, [lease, len, _]: [u32; 3]) {
        if let Some(id) = self.lease(lease) {
            let len = len as usize % 600;
            self.model.shorten(id, len);
            self.tree.shorten(self.leases.get_mut(&id).unwrap(), len);
        }
    }

    fn rare(&mut self, [what, ..]: [u32; 3]) {
        match what % 40 {
            0 => {
                let expected = self.model.clear();
                expected.assert_eq(&self.tree.clear());
                self.free(&expected);
            }
            1..10 => self.restore(),
            10 => self.drain(),
            _ => {}
        }
    }

    /// Goes on with a tree made from the dump, where there is no lease and no job.
    fn restore(&mut self) {
        if self.leases.is_empty() && self.model.jobs.is_empty() {
            let dump = self.tree.dump();
            let tree = PrefixTree::restore(self.model.config.clone(), &dump).unwrap();
            assert_eq!((tree.dump(), tree.digest()), (dump, self.tree.digest()));
            self.tree = tree;
        }
    }

    /// Ends everything; then all is evictable, and nothing is left once it is evicted (LEK-07).
    pub(super) fn drain(&mut self) {
        self.leases.clear();
        for id in std::mem::take(&mut self.model.holds).into_keys() {
            self.model.release(id);
        }
        self.model.drop_windows();
        for want in std::mem::take(&mut self.wants).into_values() {
            self.model.drop_store(want.job);
            self.tree.drop_store(want);
        }
        while let Some(&id) = self.loads.first() {
            self.end_load([0, u32::try_from(id % 7).unwrap(), 0]);
        }
        while let Some(&id) = self.stores.first() {
            self.end_store([0, u32::try_from(id % 7).unwrap(), 0]);
        }
        while let Some(&id) = self.snapshot_jobs.first() {
            self.end_snapshot([0, u32::try_from(id % 7).unwrap(), 0]);
        }
        let garbage = self.tree.take_garbage();
        std::mem::take(&mut self.model.garbage).assert_eq(&garbage);
        self.free(&Given::of(&garbage));
        self.compare();
        let stats = self.tree.stats();
        assert_eq!((stats.leases, stats.jobs), (0, 0));
        assert_eq!(
            stats.evictable_device, stats.full_pages,
            "all locks are gone"
        );
        assert_eq!(stats.evictable_host, stats.host_pages);
        assert_eq!(stats.evictable_snapshots, stats.snapshots);
        let cleared = self.tree.clear();
        self.model.clear().assert_eq(&cleared);
        self.free(&Given::of(&cleared));
        let free = [&self.device, &self.low, &self.host, &self.slots].map(BTreeSet::len);
        let total = [DEVICE, DEVICE, HOST, SLOTS].map(|n| n as usize);
        assert_eq!(free, total, "free + cached = total");
        assert_eq!(self.tree.stats().nodes, 0);
    }
}

pub(super) struct Plan;

impl ReferenceStateMachine for Plan {
    type State = Setup;
    type Transition = Op;

    fn init_state() -> BoxedStrategy<Setup> {
        (0..432u32).prop_map(Setup::any).boxed()
    }

    fn transitions(_: &Setup) -> BoxedStrategy<Op> {
        (any::<u8>(), any::<[u32; 3]>())
            .prop_map(|(kind, args)| Op(kind, args))
            .boxed()
    }

    fn apply(state: Setup, _: &Op) -> Setup {
        state
    }
}

struct Machine;

impl StateMachineTest for Machine {
    type SystemUnderTest = Pair;
    type Reference = Plan;

    fn init_test(setup: &Setup) -> Pair {
        setup.pair()
    }

    fn apply(mut pair: Pair, _: &Setup, op: Op) -> Pair {
        pair.apply(op);
        pair
    }

    fn teardown(mut pair: Pair, _: Setup) {
        pair.drain();
    }
}

prop_state_machine! {
    /// PFX-01, PFX-09, PFX-12, PFX-13, HST-05, LEK-07 and T1 to T12 on random traces.
    #[test]
    fn behaves_like_the_naive_map(sequential 1..150 => Machine);
}

/// A fixed sequence of random numbers.
pub(super) struct Numbers(pub(super) u64);

impl Numbers {
    pub(super) fn next(&mut self) -> u32 {
        // xorshift64*, Vigna 2016.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let mixed = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D);
        u32::try_from(mixed >> 32).unwrap()
    }

    pub(super) fn op(&mut self) -> Op {
        let kind = self.next().to_le_bytes()[0];
        Op(kind, [self.next(), self.next(), self.next()])
    }
}

#[test]
fn one_trace_on_two_trees_gives_equal_digests() {
    for seed in 1..=12 {
        let run = |seed: u32| {
            let mut numbers = Numbers(u64::from(seed));
            let mut pair = Setup::any(seed * 7).pair();
            let digest = |_| {
                pair.apply(numbers.op());
                pair.tree.digest()
            };
            (0..60).map(digest).collect::<Vec<u64>>()
        };
        assert_eq!(run(seed), run(seed));
    }
}

/// At least 10^6 operations; the seed of every thousand is their number. Every counter must have
/// moved: what no trace reaches is not tested.
#[test]
#[ignore = "minutes of operations"]
#[expect(clippy::print_stdout, reason = "a long run says what it did")]
fn a_million_operations_agree_with_the_naive_map() {
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    let mut total = 0;
    for seed in 1..=1_000u32 {
        let mut numbers = Numbers(u64::from(seed) << 20 | 1);
        let mut pair = Setup::any(seed - 1).pair();
        for _ in 0..1_000 {
            pair.apply(numbers.op());
            total += 1;
        }
        for (name, count) in pair.tree.stats().rows() {
            *counts.entry(name).or_default() += count;
        }
        pair.drain();
    }
    println!("seeds 1 to 1000: {total} operations agree; {counts:?}");
    assert!(counts.values().all(|&count| count > 0), "{counts:?}");
}
