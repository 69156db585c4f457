//! Times of the core's own operations, measured inside Rust so that no call overhead is in them.

use std::hint::black_box;
use std::time::Duration;

use headrace_core as core;
use headrace_device::monotonic_ns;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::door::{Door, Home};

const PROMPT: usize = 64;

/// The page pool of the design's goals: `POOL_PAGES` raw pages of 36 layers, LOW pages of 2.
const POOL_PAGES: u32 = 65_536;
const POOL_LAYERS: u32 = 36;
const POOL_WIDTH: u32 = 2;
/// Pages of a call.
const CALLS: [(usize, &str, &str); 2] = [
    (1_000, "page_alloc_1000", "page_free_1000"),
    (32, "page_alloc_32", "page_free_32"),
];

/// Nanoseconds a call of each operation, of the page pool a page; the median of `repeat` runs.
#[pyfunction]
#[pyo3(signature = (*, rows=256, repeat=101))]
pub(crate) fn bench_core(py: Python<'_>, rows: u32, repeat: usize) -> PyResult<Bound<'_, PyDict>> {
    let times = py.enter(Home::here(), || run(rows, repeat.max(1)))?;
    let dict = PyDict::new(py);
    for (name, mut samples) in times {
        samples.sort_unstable();
        dict.set_item(name, samples[samples.len() / 2])?;
    }
    Ok(dict)
}

type Times = Vec<(&'static str, Vec<u64>)>;

fn run(rows: u32, repeat: usize) -> core::Result<Times> {
    let slots = core::SlotAllocator::new(rows)?;
    let mut slot_pair = Vec::new();
    for _ in 0..repeat {
        let pairs = 1000;
        slot_pair.push(timed(pairs, || {
            for id in 0..pairs {
                slots.allocate(core::RequestId(id))?;
                slots.free(core::RequestId(id), None)?;
            }
            Ok(())
        })?);
    }
    let config = core::SchedulerConfig {
        max_batch_tokens: PROMPT * rows as usize,
        max_waiting: rows as usize,
        max_results: 2 * rows as usize,
        max_context: 1 << 20,
        vocab_size: 1 << 16,
        policy: core::Policy::Fcfs,
        memory: core::MemoryConfig::default(),
    };
    let scheduler = core::Scheduler::new(config, &slots)?;
    let mut specs: Vec<core::RequestSpec> = (0..u64::from(rows))
        .map(|id| core::RequestSpec {
            id: Some(core::RequestId(id)),
            prompt: vec![1; PROMPT].into(),
            sampling: core::SamplingSpec {
                max_tokens: 1 << 19,
                ..Default::default()
            },
            ..Default::default()
        })
        .collect();
    let submit = timed(u64::from(rows), || {
        for spec in specs.drain(..) {
            scheduler.submit(spec, 0)?;
        }
        Ok(())
    })?;
    step(&scheduler, &mut Vec::new(), &mut Vec::new())?; // prefill
    let (mut plan, mut commit) = (Vec::new(), Vec::new());
    for _ in 0..repeat {
        step(&scheduler, &mut plan, &mut commit)?;
    }
    let mut times = vec![
        ("slot_allocate_free", slot_pair),
        ("submit", vec![submit]),
        ("plan", plan),
        ("commit", commit),
    ];
    pages(repeat, &mut times)?;
    times.extend(tree_times(repeat)?);
    Ok(times)
}

/// Alloc and free, a page, in a pool that is 90 % full after random frees.
fn pages(repeat: usize, times: &mut Times) -> core::Result<()> {
    let low = core::PriorityClass::Low;
    let pool = core::PageAllocator::new(core::PageConfig {
        num_pages: POOL_PAGES,
        num_layers: POOL_LAYERS,
        page_size: 64,
        slot_widths: POOL_WIDTH,
        addressing: core::Addressing::Flat,
        cap_high: None,
        cap_low: Some(POOL_PAGES),
    })?;
    let mut held = pool.alloc(pool.available(low), low, None)?;
    let mut random = Random(1);
    let tenth = random.take(&mut held, |all| all / 10);
    pool.free(&tenth, core::Owner::Request, core::Epoch(0))?;
    for (n, alloc_name, free_name) in CALLS {
        let (mut alloc, mut free) = (Vec::new(), Vec::new());
        for _ in 0..repeat {
            let start = random.below((POOL_LAYERS / POOL_WIDTH) as usize);
            let home = u32::try_from(start).ok().map(|start| start * POOL_WIDTH);
            let begin = monotonic_ns();
            let got = pool.alloc(n, low, home)?;
            alloc.push((monotonic_ns() - begin) / n as u64);
            held.extend(got);
            let gone = random.take(&mut held, |_| n);
            free.push(timed(n as u64, || {
                pool.free(&gone, core::Owner::Request, core::Epoch(0))
            })?);
        }
        times.push((alloc_name, alloc));
        times.push((free_name, free));
    }
    Ok(())
}

/// xorshift64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 8).unwrap_or(0) % n.max(1)
    }

    fn take<T>(&mut self, from: &mut Vec<T>, n: impl Fn(usize) -> usize) -> Vec<T> {
        let mut random = |len| self.below(len);
        let n = n(from.len());
        (0..n)
            .map(|_| from.swap_remove(random(from.len())))
            .collect()
    }
}

const PAGE: u32 = 64;
const MATCH_TOKENS: u32 = 32_768;
const LEAVES: u32 = 1_000;
const LEAVES_DEEP: u32 = 100_000;

/// The prefix tree: a prompt of 32,768 tokens in nodes of one page, which publishing it page by
/// page made, then evictions from few and from many leaves.
fn tree_times(repeat: usize) -> core::Result<Times> {
    let tree = tree()?;
    let prompt: Vec<u32> = (0..=MATCH_TOKENS).collect();
    let namespace = core::tree::Namespace(0);
    let find = |tokens: &[u32]| {
        let class = core::PriorityClass::High;
        tree.match_prefix(namespace, tokens, usize::MAX, class)
    };
    let pages = MATCH_TOKENS / PAGE;
    let (mut insert, mut lookup) = (Vec::new(), Vec::new());
    for _ in 0..repeat {
        let mut lease = find(&[]);
        insert.push(timed(u64::from(pages), || {
            for (page, tokens) in (0..pages).zip(prompt.chunks(PAGE as usize)) {
                let pages = [core::PageEntry(page)];
                tree.insert(&mut lease, tokens, &pages, core::PriorityClass::High);
            }
            Ok(())
        })?);
        drop(lease);
        let mut lease = None;
        lookup.push(timed(1, || {
            lease = Some(find(&prompt));
            Ok(())
        })?);
        drop(lease);
        tree.clear();
    }
    Ok(vec![
        ("tree_match_32k", lookup),
        ("tree_insert", insert),
        ("tree_evict_1k", evictions(LEAVES, repeat)?),
        ("tree_evict_100k", evictions(LEAVES_DEEP, repeat)?),
    ])
}

fn tree() -> core::Result<core::PrefixTree> {
    core::PrefixTree::new(core::TreeConfig {
        policy: core::tree::WritePolicy::None,
        ..Default::default()
    })
}

/// Evicts one page a call, in batches that leave nearly all leaves, and puts them back.
fn evictions(leaves: u32, repeat: usize) -> core::Result<Vec<u64>> {
    let tree = tree()?;
    let mut next = 0;
    let mut leaf = || {
        let tokens: Vec<u32> = (next..next + PAGE).collect();
        next = (next + PAGE) % (1 << 31);
        let class = core::PriorityClass::High;
        let mut lease = tree.match_prefix(core::tree::Namespace(0), &[], 0, class);
        tree.insert(&mut lease, &tokens, &[core::PageEntry(next / PAGE)], class);
    };
    (0..leaves).for_each(|_| leaf());
    let batch = leaves.min(100);
    let mut times = Vec::new();
    for _ in 0..repeat {
        times.push(timed(u64::from(batch), || {
            for _ in 0..batch {
                black_box(tree.evict_device(1));
            }
            Ok(())
        })?);
        (0..batch).for_each(|_| leaf());
    }
    Ok(times)
}

fn step(
    scheduler: &core::Scheduler,
    plan_ns: &mut Vec<u64>,
    commit_ns: &mut Vec<u64>,
) -> core::Result<()> {
    let start = monotonic_ns();
    let next = scheduler.next_plan(Duration::ZERO, || 0)?;
    plan_ns.push(monotonic_ns() - start);
    let core::NextPlan::Plan(plan) = black_box(next) else {
        return Ok(());
    };
    let tokens = vec![1; plan.sample_rows.len()];
    let start = monotonic_ns();
    black_box(scheduler.commit(plan.epoch, &tokens, &[], 0)?);
    commit_ns.push(monotonic_ns() - start);
    Ok(())
}

fn timed(calls: u64, f: impl FnOnce() -> core::Result<()>) -> core::Result<u64> {
    let start = monotonic_ns();
    f()?;
    Ok((monotonic_ns() - start) / calls.max(1))
}
