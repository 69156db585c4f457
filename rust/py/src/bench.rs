//! Times of the core's own operations, measured inside Rust so that no call overhead is in them.

use std::hint::black_box;
use std::time::Duration;

use headrace_core as core;
use headrace_device::monotonic_ns;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::door::{Door, Home};

const PROMPT: usize = 64;

/// Nanoseconds a call of each operation, the median of `repeat` runs.
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
    Ok(vec![
        ("slot_allocate_free", slot_pair),
        ("submit", vec![submit]),
        ("plan", plan),
        ("commit", commit),
    ])
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
