//! Scheduler: the life of every request from `submit` to its one terminal result.
//!
//! Owns: the waiting queue, the running set, the steps in flight, the stored results. One mutex
//! guards all of it; lock order is scheduler -> slots. Two condvars: `work` wakes the planner,
//! `done` wakes waiters. No user code runs under the lock, and no wait is without a time limit:
//! callers wait in slices and decide themselves when to give up.
//!
//! Order: under `Fcfs` strictly by arrival. A prompt that does not fit what is left of a step's
//! token budget, or finds no slot, blocks those behind it (head of line, by design). Admission is
//! strictly in order; only the fewer than 64 tokens of budget that a cut chunk leaves may still
//! compute the whole of a short prompt that is next in line. Under `Priority` the order is (class,
//! arrival). A waiting request preempts nobody; running ones do when pages run short (`planner`).
//!
//! Invariants (checked by [`Scheduler::check`]):
//! - a live id is in exactly one of waiting, running; a running request has a slot in use, a
//!   waiting one has none;
//! - every accepted id gets exactly one result; an id with a result is not live;
//! - at most two plans are in flight, the second one planned ahead (`ahead`): its requests are in the
//!   first one too. They end in order; a slot or page given back meanwhile is fenced by the newest;
//! - tokens in the cache are at most prompt + generated - 1; fewer only while a preempted request
//!   computes them again.

mod ahead;
mod check;
mod commit;
#[cfg(all(test, loom))]
mod loom_tests;
mod planner;
mod results;
mod state;
#[cfg(all(test, not(loom)))]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use crate::copy_job::CopyOutcome;
use crate::error::{Error, Result};
use crate::ids::{Epoch, RequestId};
use crate::memory::{Memory, MemoryConfig, MemoryStats, StoreCopy};
use crate::plan::StepPlan;
use crate::request::{FinishReason, PriorityClass, RequestSpec, RequestStatus};
use crate::slots::SlotAllocator;
use crate::sync::{Condvar, Mutex};
use state::State;

pub use commit::CommitReport;
pub use planner::CHUNK_ALIGN;
pub use state::SchedulerStats;

/// Order in which waiting requests are served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Strict order of arrival.
    #[default]
    Fcfs,
    /// HIGH before LOW, then arrival.
    Priority,
}

/// Limits of a scheduler. Checked once, by [`Scheduler::new`].
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Prefill tokens of one step: at least 64, a multiple of 64. Decode rows come on top.
    pub max_batch_tokens: usize,
    /// Requests that may wait; the next submit fails with `QueueFull`.
    pub max_waiting: usize,
    /// Results kept for `poll` and `wait`; the oldest goes first.
    pub max_results: usize,
    /// Prompt plus generated tokens of one request.
    pub max_context: usize,
    /// Token ids are below this.
    pub vocab_size: u32,
    /// Queue order.
    pub policy: Policy,
    /// Layout and tiers of the KV memory.
    pub memory: MemoryConfig,
}

/// Answer of [`Scheduler::next_plan`].
#[derive(Clone, Debug)]
pub enum NextPlan {
    /// A step to run; must be given back by `commit` or `fail`.
    Plan(Box<StepPlan>),
    /// Nothing to do within the time.
    TimedOut,
}

/// Thread-safe scheduler; share it by reference.
pub struct Scheduler {
    config: SchedulerConfig,
    slots: SlotAllocator,
    state: Mutex<State>,
    work: Condvar,
    done: Condvar,
}

impl Scheduler {
    /// A scheduler over the slots of a table, through a view of its own: other users of the table
    /// compete for free slots, no more. Fails with `Config`.
    pub fn new(config: SchedulerConfig, slots: &SlotAllocator) -> Result<Self> {
        config.validate(slots.stats().total)?;
        let memory = Memory::new(config.memory.clone())?;
        let slots = slots.share();
        Ok(Self {
            state: Mutex::new(State::new(config.max_results, memory)),
            config,
            slots,
            work: Condvar::default(),
            done: Condvar::default(),
        })
    }

    /// Queues a request and returns its id. Never blocks on the engine.
    ///
    /// Fails with `InvalidRequest`, `PromptTooLong`, `DuplicateRequest`, `QueueFull` or `Closed`;
    /// nothing is kept then. An id whose result is stored may be used again: the old result goes.
    pub fn submit(&self, spec: RequestSpec, now_ns: u64) -> Result<RequestId> {
        self.config.admit(&spec)?;
        let id = self.state.lock().submit(spec, &self.config, now_ns)?;
        self.work.notify_all();
        Ok(id)
    }

    /// The next step, waiting at most `timeout` (one wait: it may return early without a plan).
    /// While a plan is in flight there is no other. With nothing to do a part of the prefix tree is
    /// recounted; if it does not agree the scheduler closes. Fails with `Closed`.
    pub fn next_plan(&self, timeout: Duration, now_ns: impl Fn() -> u64) -> Result<NextPlan> {
        let mut state = self.state.lock();
        for last_try in [false, true] {
            state.check_open()?;
            if let Some(plan) = state.plan(&self.config, &self.slots, now_ns()) {
                return Ok(NextPlan::Plan(Box::new(plan)));
            }
            if !last_try {
                self.work.wait_for(&mut state, timeout);
            }
        }
        let broken = state.check_idle();
        drop(state);
        if let Some(what) = broken {
            self.close(&what, FinishReason::Error, now_ns());
        }
        Ok(NextPlan::TimedOut)
    }

    /// The step after `epoch`, the only one in flight, on the assumption that each of its rows goes
    /// on: the inputs of its rows are tokens that `epoch` has yet to give (`token_sources`). `None`
    /// if that is no steady decode step: a row that does not decode, streams or needs its history, a
    /// copy, a page that is not free, or a request that could start or is not in the step. Rows that
    /// end with `epoch` for their length have no row here; no row means `None`. Nothing changes then.
    ///
    /// The plan is what `next_plan` would give after the commit of `epoch`, but for the tokens and
    /// for rows that the commit ends: these run for nothing and are not accepted.
    /// Fails with `StalePlan` if `epoch` is not in flight, or not alone.
    pub fn plan_ahead(&self, epoch: Epoch) -> Result<Option<StepPlan>> {
        let mut state = self.state.lock();
        state.plan_ahead(epoch, &self.config, &self.slots)
    }

    /// Records the tokens of a step, one per sampled row in row order, and releases what it no
    /// longer needs. `stops[i]` says that row i's text met a stop string; empty means none did. A
    /// token outside the vocabulary (-1: the logits were not finite) ends its row with `error`.
    /// Rows that ended meanwhile are skipped.
    ///
    /// Fails with `StalePlan` if `epoch` is not the oldest step in flight, `InvalidRequest` if a length is wrong;
    /// nothing changes then.
    pub fn commit(
        &self,
        epoch: Epoch,
        tokens: &[i32],
        stops: &[bool],
        now_ns: u64,
    ) -> Result<CommitReport> {
        let mut state = self.state.lock();
        let report = state.commit(epoch, tokens, stops, &self.config, &self.slots, now_ns)?;
        drop(state);
        self.after_step();
        Ok(report)
    }

    /// The forward of step `epoch` failed: its rows end with `error` and `message`, all others go
    /// on. A step planned ahead of its tokens stays in flight. Fails with `StalePlan` as `commit`.
    pub fn fail(&self, epoch: Epoch, message: &str, now_ns: u64) -> Result<Vec<RequestId>> {
        let failed = self
            .state
            .lock()
            .fail(epoch, message, &self.slots, now_ns)?;
        self.after_step();
        Ok(failed)
    }

    /// Ends a live request with `abort`, in whatever state it is. False for an id that is not live.
    pub fn abort(&self, id: RequestId, now_ns: u64) -> bool {
        let aborted = self.state.lock().abort(id, &self.slots, now_ns);
        if aborted {
            self.after_step();
        }
        aborted
    }

    /// Hands in how a copy ended; it takes effect with the next plan or commit. Callable from any
    /// thread. An outcome of an unknown job, or a second one, changes nothing.
    pub fn complete(&self, job: u64, outcome: CopyOutcome) {
        self.state.lock().inbox.push((job, outcome));
        self.work.notify_all();
    }

    /// Numbers streamed layers from `k` on: a copy queue that served another scheduler before has
    /// used those below.
    pub fn stream_from(&self, k: u64) {
        self.state.lock().memory.stream_from(k);
    }

    /// Copies to the host that have become due; they may start once the step in flight has ended, or
    /// beside one that was planned ahead, which touches nothing that they read. To be asked for after
    /// every plan and every commit; each is given out once. There is a plan, perhaps without rows, as
    /// long as some are due.
    pub fn take_stores(&self) -> Vec<StoreCopy> {
        self.state.lock().memory.take_stores()
    }

    /// Counts of the KV memory that were all true at one instant.
    pub fn memory_stats(&self) -> MemoryStats {
        self.state.lock().memory.stats()
    }

    /// Where a request stands. Fails with `UnknownRequest`.
    pub fn poll(&self, id: RequestId) -> Result<RequestStatus> {
        self.state.lock().status(id)
    }

    /// As `poll`, but first waits, at most `timeout`, for the request to end. May return early.
    pub fn wait(&self, id: RequestId, timeout: Duration) -> Result<RequestStatus> {
        let mut state = self.state.lock();
        if !state.is_live(id) {
            return state.status(id);
        }
        self.done.wait_for(&mut state, timeout);
        state.status(id)
    }

    /// Takes the stored result of a finished request. Fails with `UnknownRequest`.
    pub fn take_result(&self, id: RequestId) -> Result<Arc<crate::RequestResult>> {
        let taken = self.state.lock().results.take(id);
        taken.ok_or(Error::UnknownRequest { id })
    }

    /// Ends every live request (`Abort`, or `Error` after a fatal error) and refuses new ones with
    /// `reason`. Waiters and the planner wake at once. Idempotent: the first reason stays.
    pub fn close(&self, reason: &str, finish: FinishReason, now_ns: u64) {
        self.state.lock().close(reason, finish, &self.slots, now_ns);
        self.after_step();
    }

    /// Whether `close` was called.
    pub fn is_closed(&self) -> bool {
        self.state.lock().check_open().is_err()
    }

    /// Counts that were all true at one instant.
    pub fn stats(&self) -> SchedulerStats {
        self.state.lock().stats()
    }

    /// Its view of the slot table.
    pub fn slots(&self) -> &SlotAllocator {
        &self.slots
    }

    /// Recounts the invariants above. The error says what does not agree.
    pub fn check(&self) -> std::result::Result<(), String> {
        self.state.lock().check(&self.slots)
    }

    #[cfg(all(test, not(loom)))]
    fn describe(&self) -> String {
        let state = self.state.lock();
        let request = |(key, request): (&_, &state::Request)| {
            format!(
                "{key:?} id {} {:?} prompt {} generated {} computed {} loads {:?} held {}\n",
                request.id.0,
                request.class,
                request.prompt.len(),
                request.generated.len(),
                request.computed,
                request.seq.loads,
                state.memory.held(&request.seq),
            )
        };
        let waiting: String = state.waiting.iter().map(request).collect();
        let running: String = state.running.iter().map(request).collect();
        let memory = state.memory.stats();
        format!("waiting\n{waiting}running\n{running}{memory:?}")
    }

    #[cfg(all(test, not(loom)))]
    fn check_idle(&self) -> std::result::Result<(), String> {
        let mut state = self.state.lock();
        state.reap(&self.slots);
        state.memory.check_idle()
    }

    /// Something ended: a slot may be free for the planner, a result there for a waiter.
    fn after_step(&self) {
        self.work.notify_all();
        self.done.notify_all();
    }
}

/// The table outlives its users: what this one holds goes back, also behind a step that nobody will
/// commit any more.
impl Drop for Scheduler {
    fn drop(&mut self) {
        self.close("the scheduler was dropped", FinishReason::Abort, 0);
        self.slots.retire(Epoch(u64::MAX));
    }
}

impl SchedulerConfig {
    fn validate(&self, slots: u32) -> Result<()> {
        if self.max_batch_tokens == 0 || !self.max_batch_tokens.is_multiple_of(CHUNK_ALIGN) {
            let expected = format!("a multiple of {CHUNK_ALIGN}, at least {CHUNK_ALIGN}");
            return Err(Error::config(
                "max_batch_tokens",
                self.max_batch_tokens,
                expected,
            ));
        }
        let positive = [
            ("max_waiting", self.max_waiting),
            ("vocab_size", self.vocab_size as usize),
        ];
        for (field, value) in positive {
            if value == 0 {
                return Err(Error::config(field, value, "at least 1"));
            }
        }
        // All requests may end at once, by `close`, and each must find its result.
        let live = self.max_waiting.saturating_add(slots as usize);
        if self.max_results < live {
            let expected = format!("at least max_waiting plus the slots, which is {live}");
            return Err(Error::config("max_results", self.max_results, expected));
        }
        if self.max_context < 2 || self.max_context > i32::MAX as usize {
            let expected = format!("between 2 and {} tokens", i32::MAX);
            return Err(Error::config("max_context", self.max_context, expected));
        }
        Ok(())
    }

    /// Everything about a request that can be judged without the queue.
    fn admit(&self, spec: &RequestSpec) -> Result<()> {
        if spec.prompt.is_empty() {
            return Err(Error::request("prompt", "[]", "at least one token"));
        }
        if spec.prompt.len() >= self.max_context {
            return Err(Error::PromptTooLong {
                prompt_tokens: spec.prompt.len(),
                max_context: self.max_context,
            });
        }
        let vocab = self.vocab_size;
        if let Some(at) = spec.prompt.iter().position(|&token| token >= vocab) {
            let value = format!("{} at position {at}", spec.prompt[at]);
            let expected = format!("token ids below the vocabulary size {vocab}");
            return Err(Error::request("prompt", value, expected));
        }
        spec.sampling.validate(vocab)?;
        self.fits_pool(spec)
    }

    /// A request whose worst case is more than the whole pool could never be sure to end.
    fn fits_pool(&self, spec: &RequestSpec) -> Result<()> {
        let Some(pages) = &self.memory.pages else {
            return Ok(());
        };
        let worst = spec.prompt.len() + spec.sampling.max_tokens as usize;
        let needed = worst
            .min(self.max_context)
            .div_ceil(self.memory.page_size as usize);
        let streams = spec.class == PriorityClass::Low && self.memory.host_pages > 0;
        let total = if streams {
            let windows = pages.cap_low.unwrap_or(pages.num_pages / 2) as usize
                * (pages.num_layers / pages.slot_widths.max(1)) as usize;
            windows.min(self.memory.host_pages as usize)
        } else {
            pages.cap_high.unwrap_or(pages.num_pages) as usize
        };
        if needed <= total {
            return Ok(());
        }
        Err(Error::OutOfPages {
            needed,
            free: total,
            evictable: 0,
            item: None,
        })
    }
}
