//! Cost of the prefix tree's calls, on one thread without contention.
#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::cell::RefCell;
use std::time::Duration;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use headrace_core::tree::{Namespace, WritePolicy};
use headrace_core::{HostPages, PageEntry, PrefixTree, PriorityClass::High, TreeConfig};

const PAGE: usize = 64;
const NAMESPACE: Namespace = Namespace(0);

fn tree(policy: WritePolicy) -> PrefixTree {
    PrefixTree::new(TreeConfig {
        policy,
        ..TreeConfig::default()
    })
    .unwrap()
}

fn tokens(len: usize, salt: u32) -> Vec<u32> {
    (salt..).take(len).collect()
}

/// Publishes whole pages of `tokens`, `step` pages a node.
fn publish(tree: &PrefixTree, tokens: &[u32], step: usize) {
    let mut lease = tree.match_prefix(NAMESPACE, tokens, 0, High);
    let mut page = 0;
    for chunk in tokens.chunks(step * PAGE) {
        let whole = chunk.len() / PAGE;
        let pages: Vec<PageEntry> = (page..).take(whole).map(PageEntry).collect();
        page += u32::try_from(whole).unwrap();
        tree.insert(&mut lease, &chunk[..whole * PAGE], &pages, High);
    }
}

/// A look-up, and the drop of its lease.
fn lookups(c: &mut Criterion) {
    for (len, step) in [(32_768, 1), (32_768, 8), (100_000, 8), (100_000, 1)] {
        let tree = tree(WritePolicy::None);
        let prompt = tokens(len + 1, 0);
        publish(&tree, &prompt, step);
        let name = format!("match, {len} tokens in nodes of {step} pages");
        c.bench_function(&name, |b| {
            let leases = RefCell::new(None);
            let drop_last = || drop(leases.take());
            let find = |()| {
                let lease = tree.match_prefix(NAMESPACE, &prompt, usize::MAX, High);
                leases.replace(Some(lease));
            };
            b.iter_batched(drop_last, find, BatchSize::PerIteration);
        });
        c.bench_function(&format!("{name}, with its release"), |b| {
            b.iter(|| tree.match_prefix(NAMESPACE, &prompt, usize::MAX, High));
        });
    }
}

/// One page a call below a growing path, which starts again after a thousand.
fn inserts(c: &mut Criterion) {
    let tree = tree(WritePolicy::WriteThrough);
    let root = || tree.match_prefix(NAMESPACE, &[], 0, High);
    let lease = RefCell::new(root());
    let mut next = 0;
    c.bench_function("insert, one page", |b| {
        let fresh = || {
            next += 1;
            if next % 1_000 == 0 {
                lease.replace(root());
                tree.clear();
            }
            tokens(PAGE, next)
        };
        let insert =
            |page: Vec<u32>| tree.insert(&mut lease.borrow_mut(), &page, &[PageEntry(0)], High);
        b.iter_batched(fresh, insert, BatchSize::PerIteration);
    });
}

fn evictions(c: &mut Criterion) {
    for leaves in [1_000, 100_000] {
        let tree = tree(WritePolicy::None);
        let mut next = 0;
        let mut leaf = || {
            next += 1;
            publish(&tree, &tokens(PAGE, next * 64), 1);
        };
        (0..leaves).for_each(|_| leaf());
        c.bench_function(&format!("evict one page of {leaves} leaves"), |b| {
            let evict = |()| tree.evict_device(1);
            b.iter_batched(&mut leaf, evict, BatchSize::PerIteration);
        });
    }
}

fn host_pages(c: &mut Criterion) {
    let pool = HostPages::new(65_536).unwrap();
    let mut taken = pool.alloc(65_536).unwrap();
    let (free, _) = taken.as_mut_slice().split_at(60_000);
    let holes: Vec<_> = free.iter().copied().step_by(2).collect();
    pool.free(&holes).unwrap();
    c.bench_function("host pages, alloc and free of 8 in 30,000 holes", |b| {
        b.iter(|| pool.free(&pool.alloc(8).unwrap()).unwrap());
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .sample_size(50);
    targets = lookups, inserts, evictions, host_pages
}
criterion_main!(benches);
