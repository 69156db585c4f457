//! Cost of the scheduler's calls, on one thread without contention.
#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::cell::RefCell;
use std::time::Duration;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use headrace_core::{
    NextPlan, Policy, RequestId, RequestSpec, SamplingSpec, Scheduler, SchedulerConfig,
    SlotAllocator, StepPlan,
};

const WAITING: u64 = 10_000;

fn scheduler(slots: u32) -> Scheduler {
    let config = SchedulerConfig {
        max_batch_tokens: 512,
        max_waiting: 1 << 20,
        max_results: 1 << 21,
        max_context: 1 << 30,
        vocab_size: 151_936,
        policy: Policy::Fcfs,
        memory: headrace_core::MemoryConfig::default(),
    };
    Scheduler::new(config, &SlotAllocator::new(slots).unwrap()).unwrap()
}

fn spec(id: u64, prompt: usize) -> RequestSpec {
    RequestSpec {
        id: Some(RequestId(id)),
        prompt: vec![1; prompt].into(),
        sampling: SamplingSpec {
            max_tokens: 1 << 30,
            ..SamplingSpec::default()
        },
        ..RequestSpec::default()
    }
}

fn plan(scheduler: &Scheduler) -> StepPlan {
    match scheduler.next_plan(Duration::ZERO, || 0).unwrap() {
        NextPlan::Plan(plan) => *plan,
        NextPlan::TimedOut => unreachable!("there is work"),
    }
}

fn commit(scheduler: &Scheduler, plan: &StepPlan, tokens: &[i32]) {
    scheduler.commit(plan.epoch, tokens, &[], 0).unwrap();
}

fn slots(c: &mut Criterion) {
    let slots = SlotAllocator::new(256).unwrap();
    for id in 0..255 {
        slots.allocate(RequestId(id)).unwrap();
    }
    c.bench_function("slot allocate + free", |b| {
        b.iter(|| {
            slots.allocate(RequestId(255)).unwrap();
            slots.free(RequestId(255), None).unwrap()
        });
    });
}

/// Submit and abort of one request while `WAITING` others wait.
fn queue(c: &mut Criterion) {
    let scheduler = scheduler(1);
    for id in 0..WAITING {
        scheduler.submit(spec(id, 1), 0).unwrap();
    }
    let id = RequestId(WAITING);
    c.bench_function("submit, 64-token prompt", |b| {
        let fresh = || {
            scheduler.abort(id, 0);
            spec(WAITING, 64)
        };
        let submit = |spec| scheduler.submit(spec, 0);
        b.iter_batched(fresh, submit, BatchSize::PerIteration);
    });
    scheduler.abort(id, 0);
    c.bench_function("abort of one of 10,000 waiting", |b| {
        let fresh = || scheduler.submit(spec(WAITING, 64), 0).unwrap();
        let abort = |id| scheduler.abort(id, 0);
        b.iter_batched(fresh, abort, BatchSize::PerIteration);
    });
}

fn decode(c: &mut Criterion) {
    for rows in [1, 8, 256] {
        let scheduler = scheduler(rows);
        for id in 0..u64::from(rows) {
            scheduler.submit(spec(id, 1), 0).unwrap();
        }
        let tokens = vec![1; rows as usize];
        commit(&scheduler, &plan(&scheduler), &tokens);

        let in_flight = RefCell::new(None);
        let end_step = || {
            if let Some(epoch) = in_flight.take() {
                scheduler.commit(epoch, &tokens, &[], 0).unwrap();
            }
        };
        c.bench_function(&format!("next_plan, {rows} decode rows"), |b| {
            let next = |()| {
                let plan = plan(&scheduler);
                in_flight.replace(Some(plan.epoch));
                plan
            };
            b.iter_batched(end_step, next, BatchSize::PerIteration);
        });
        end_step();
        c.bench_function(&format!("commit, {rows} decode rows"), |b| {
            let next = || plan(&scheduler);
            let end = |plan| commit(&scheduler, &plan, &tokens);
            b.iter_batched(next, end, BatchSize::PerIteration);
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    targets = slots, queue, decode
}
criterion_main!(benches);
