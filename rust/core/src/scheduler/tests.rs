#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails by panicking, as a test does"
)]

mod ahead;
mod lifecycle;
mod machine;
mod memory;
mod model;
mod planning;
mod threads;

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::request::{Phase, PriorityClass, RequestResult, Stamps};
use crate::sampling::SamplingSpec;

const NOW: Duration = Duration::ZERO;

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_batch_tokens: 128,
        max_waiting: 100,
        max_results: 10_000,
        max_context: 1000,
        vocab_size: 100,
        policy: Policy::Fcfs,
        memory: MemoryConfig::default(),
    }
}

fn scheduler(slots: u32, config: SchedulerConfig) -> Scheduler {
    Scheduler::new(config, &SlotAllocator::new(slots).unwrap()).unwrap()
}

/// A request for `max_tokens` tokens after a prompt of `prompt` tokens.
fn spec(id: u64, prompt: usize, max_tokens: u32) -> RequestSpec {
    RequestSpec {
        id: Some(RequestId(id)),
        prompt: (0..prompt).map(|at| u32::from(at % 2 == 1)).collect(),
        sampling: SamplingSpec {
            max_tokens,
            ..SamplingSpec::default()
        },
        class: PriorityClass::High,
    }
}

/// One row of a plan, put together from the flat arrays.
#[derive(Clone, Debug, PartialEq)]
struct Row {
    id: u64,
    slot: u32,
    start: usize,
    tokens: Vec<u32>,
    /// Position in the request's random stream, if a token is sampled.
    sample: Option<usize>,
    decode: bool,
    /// Sampled row of the step before whose token is the input.
    source: Option<usize>,
}

impl Scheduler {
    fn put(&self, spec: RequestSpec) -> RequestId {
        self.submit(spec, 0).unwrap()
    }

    fn try_plan(&self) -> Option<StepPlan> {
        match self.next_plan(NOW, || 0).unwrap() {
            NextPlan::Plan(plan) => Some(*plan),
            NextPlan::TimedOut => None,
        }
    }

    /// The step after `plan`, which is alone in flight.
    fn ahead(&self, plan: &StepPlan) -> Option<StepPlan> {
        let ahead = self.plan_ahead(plan.epoch).unwrap();
        self.check().unwrap();
        ahead
    }

    fn plan(&self) -> StepPlan {
        let plan = self.try_plan().unwrap();
        self.check().unwrap();
        plan
    }

    /// Commits `token` for every sampled row.
    fn commit_all(&self, plan: &StepPlan, token: i32) -> CommitReport {
        let tokens = vec![token; plan.sample_rows.len()];
        let report = self.commit(plan.epoch, &tokens, &[], 0).unwrap();
        self.check().unwrap();
        report
    }

    /// Plans and commits one step; returns the plan.
    fn step(&self, token: i32) -> StepPlan {
        let plan = self.plan();
        self.commit_all(&plan, token);
        plan
    }

    fn result_or_phase(&self, id: u64) -> std::result::Result<RequestResult, Phase> {
        match self.poll(RequestId(id)).unwrap() {
            RequestStatus::Finished(result) => Ok((*result).clone()),
            RequestStatus::Live { phase, .. } => Err(phase),
        }
    }

    fn result(&self, id: u64) -> RequestResult {
        self.result_or_phase(id).unwrap()
    }

    /// Aborts all, ends the step in flight, and expects that nothing is left.
    fn drain(&self, in_flight: Option<Epoch>, ids: impl Iterator<Item = u64>) {
        for id in ids {
            self.abort(RequestId(id), 0);
        }
        if let Some(epoch) = in_flight {
            assert_eq!(self.fail(epoch, "drain", 0), Ok(vec![]));
        }
        self.check().unwrap();
        let stats = self.stats();
        let slots = self.slots().stats();
        assert_eq!((stats.waiting, stats.running), (0, 0));
        assert_eq!(slots.free, slots.total);
        let ended = stats.finished_stop
            + stats.finished_length
            + stats.finished_abort
            + stats.finished_error;
        assert_eq!(ended, stats.submitted);
    }
}

/// The rows of `plan`; its flat arrays must agree with one another.
fn rows(plan: &StepPlan) -> Vec<Row> {
    let int = |value: i64| usize::try_from(value).unwrap();
    let count = plan.request_ids.len();
    assert_eq!(plan.token_offsets.len(), count + 1);
    assert_eq!((plan.slots.len(), plan.starts.len()), (count, count));
    assert_eq!(plan.sample_rows.len(), plan.sampling.temperature.len());
    let row = |at: usize| {
        let range = int(plan.token_offsets[at])..int(plan.token_offsets[at + 1]);
        let positions = plan.positions[range.clone()].iter();
        assert!(positions.copied().eq((plan.starts[at]..).take(range.len())));
        let source = plan.token_sources[range.start];
        let sources = &plan.token_sources[range.clone()];
        assert!(source == -1 || (sources.len() == 1 && plan.token_ids[range.start] == 0));
        assert!(sources.iter().all(|&other| other == source));
        let token_slots = &plan.token_slots[range.clone()];
        assert!(token_slots.iter().all(|&slot| slot == plan.slots[at]));
        let sample = plan.sample_rows.iter().position(|&row| int(row) == at);
        let sample = sample.map(|sample| {
            assert_eq!(int(plan.sample_index[sample]), range.end - 1);
            let draw = plan.sampling.uniform[sample];
            let is_this = |&index: &u64| crate::uniform(0, index).to_bits() == draw.to_bits();
            usize::try_from((0..=1 << 20).find(is_this).unwrap()).unwrap()
        });
        Row {
            id: plan.request_ids[at],
            slot: u32::try_from(plan.slots[at]).unwrap(),
            start: int(plan.starts[at]),
            tokens: plan.token_ids[range]
                .iter()
                .map(|&token| u32::try_from(token).unwrap())
                .collect(),
            sample,
            decode: at < plan.num_decode,
            source: usize::try_from(source).ok(),
        }
    };
    (0..count).map(row).collect()
}

/// (id, first position, tokens) of each row.
fn spans(plan: &StepPlan) -> Vec<(u64, usize, usize)> {
    let span = |row: Row| (row.id, row.start, row.tokens.len());
    rows(plan).into_iter().map(span).collect()
}

/// A small generator with a seed: the same numbers on every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        let draw = crate::uniform(self.0, 0).to_bits() ^ crate::uniform(self.0, 1).to_bits();
        (draw >> 3) % limit
    }
}
