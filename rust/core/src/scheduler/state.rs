//! The queues behind the scheduler's mutex, and every change of a request's state but the step's.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::results::ResultStore;
use super::{Policy, SchedulerConfig};
use crate::copy_job::CopyOutcome;
use crate::error::{Error, Result};
use crate::ids::{Epoch, RequestId, SlotId};
use crate::memory::{Demand, Event, Hit, Memory, Sequence};
use crate::request::{
    FinishReason, Key, Phase, PriorityClass, RequestResult, RequestSpec, RequestStatus, Stamps,
};
use crate::sampling::SamplingSpec;
use crate::slots::SlotAllocator;

/// A live request.
pub(super) struct Request {
    pub(super) id: RequestId,
    /// What it is to the KV memory; the class of its key is what it is to the queue.
    pub(super) class: PriorityClass,
    pub(super) prompt: Box<[u32]>,
    pub(super) generated: Vec<u32>,
    pub(super) sampling: SamplingSpec,
    /// Tokens in the KV memory: prompt first, then all generated tokens but the last. Fewer, while
    /// a preempted request computes them again.
    pub(super) computed: usize,
    pub(super) slot: Option<SlotId>,
    pub(super) seq: Sequence,
    /// Why KV or state it depends on did not arrive.
    pub(super) broken: Option<String>,
    pub(super) account: Account,
    pub(super) stamps: Stamps,
}

/// What became of the tokens of a request, each counted once.
#[derive(Clone, Copy, Default)]
pub(super) struct Account {
    /// Prompt tokens that were computed or found, counted from the first.
    pub(super) covered: usize,
    /// Tokens whose KV existed at some time.
    pub(super) reached: usize,
    pub(super) computed_prompt: usize,
    pub(super) cached: Hit,
    pub(super) recomputed: usize,
    pub(super) preemptions: u32,
    /// Copies it depended on that failed.
    pub(super) failures: u32,
    /// `reached` when it was last admitted: it may be preempted for a test only beyond that.
    pub(super) admitted_at: usize,
}

impl Account {
    /// The request starts with `hit` of its prompt in place.
    pub(super) fn found(&mut self, hit: Hit) {
        let total = hit.device + hit.host + hit.streamed;
        // Only what no earlier stay had covered; the nearest tier counts first.
        let mut known = self.covered;
        let sources = [
            (hit.device, &mut self.cached.device),
            (hit.host, &mut self.cached.host),
            (hit.streamed, &mut self.cached.streamed),
        ];
        for (tokens, counter) in sources {
            *counter += tokens.saturating_sub(known);
            known = known.saturating_sub(tokens);
        }
        self.covered = self.covered.max(total);
        self.reached = self.reached.max(total);
    }

    /// Tokens `from..to` were computed, those below `prompt` are the prompt's. Returns how many
    /// prompt tokens are new, and how many tokens were computed again.
    pub(super) fn computed(&mut self, from: usize, to: usize, prompt: usize) -> (usize, usize) {
        let end = to.min(prompt);
        let fresh = end.saturating_sub(from.max(self.covered));
        let again = self.reached.min(to).saturating_sub(from);
        self.computed_prompt += fresh;
        self.recomputed += again;
        self.covered = self.covered.max(end);
        self.reached = self.reached.max(to);
        (fresh, again)
    }
}

impl Request {
    pub(super) fn is_decoding(&self) -> bool {
        self.computed >= self.prompt.len()
    }

    /// Tokens whose KV it needs before the next token can be sampled.
    pub(super) fn known(&self) -> usize {
        self.prompt.len() + self.generated.len()
    }

    /// What it holds and may come to hold in pages. `ratio` of its tokens are expected.
    pub(super) fn demand(&self, memory: &Memory, max_context: usize, ratio: f64) -> Demand {
        let max_tokens = self.sampling.max_tokens as usize;
        let room = max_context - self.prompt.len();
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a prediction, below max_context"
        )]
        let expected = (max_tokens.min(room) as f64 * ratio).ceil() as usize;
        let tokens = self.known().max(self.computed);
        Demand {
            held: memory.held(&self.seq),
            worst: self.prompt.len() + max_tokens.min(room),
            predicted: (self.prompt.len() + expected)
                .max(tokens + 1)
                .min(max_context),
            tokens,
        }
    }

    fn phase(&self) -> Phase {
        match self.slot {
            None if self.account.preemptions > 0 => Phase::Preempted,
            None => Phase::Waiting,
            Some(_) if self.is_decoding() => Phase::Decoding,
            Some(_) => Phase::Prefilling,
        }
    }
}

/// One row of a plan in flight.
pub(super) struct InFlightRow {
    pub(super) key: Key,
    pub(super) id: RequestId,
    pub(super) slot: SlotId,
    /// Page its last token is written to; `None` with fixed slots.
    pub(super) page: Option<u32>,
    pub(super) tokens: usize,
    pub(super) samples: bool,
    /// Buffer that holds the request's state after the step.
    pub(super) staging: Option<u32>,
}

pub(super) struct InFlight {
    pub(super) epoch: Epoch,
    pub(super) rows: Vec<InFlightRow>,
}

/// Counters since construction, and gauges; all true at one instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Requests in the queue.
    pub waiting: usize,
    /// Requests with a slot.
    pub running: usize,
    /// Results kept.
    pub results: usize,
    /// Results that made room for newer ones.
    pub results_dropped: u64,
    /// Requests accepted.
    pub submitted: u64,
    /// Requests that ended with `stop`.
    pub finished_stop: u64,
    /// Requests that ended with `length`.
    pub finished_length: u64,
    /// Requests that ended with `abort`.
    pub finished_abort: u64,
    /// Requests that ended with `error`.
    pub finished_error: u64,
    /// Plans handed out.
    pub steps: u64,
    /// Prompt tokens computed; each counts once.
    pub prompt_tokens: u64,
    /// Prompt tokens found on the device.
    pub cached_device_tokens: u64,
    /// Prompt tokens loaded back from the host.
    pub cached_host_tokens: u64,
    /// Prompt tokens streamed from the host.
    pub cached_streamed_tokens: u64,
    /// Tokens computed again after a preemption or a failed copy.
    pub recomputed_tokens: u64,
    /// Requests that had to leave a step's rows and come back.
    pub preemptions: u64,
    /// Rows that ran for nothing because a copy failed.
    pub failed_copy_rows: u64,
    /// Running requests that had no row in a step.
    pub deferred_rows: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
}

pub(super) struct State {
    closed: Option<String>,
    next_arrival: u64,
    next_auto_id: u64,
    pub(super) keys: HashMap<RequestId, Key>,
    pub(super) waiting: BTreeMap<Key, Request>,
    pub(super) running: BTreeMap<Key, Request>,
    /// Oldest first: a step, and perhaps the one planned ahead of its tokens.
    pub(super) in_flight: VecDeque<InFlight>,
    pub(super) last_epoch: Epoch,
    pub(super) memory: Memory,
    /// Requests that ended while a plan was formed; the end of its step tells.
    pub(super) ended: Vec<(RequestId, FinishReason)>,
    /// Outcomes of copies that nobody has looked at yet.
    pub(super) inbox: Vec<(u64, CopyOutcome)>,
    /// Requests that are gone but whose slot a copy still reads.
    pub(super) held_slots: BTreeMap<Key, RequestId>,
    pub(super) results: ResultStore,
    pub(super) counters: SchedulerStats,
}

impl State {
    pub(super) fn new(max_results: usize, memory: Memory) -> Self {
        Self {
            memory,
            inbox: Vec::new(),
            ended: Vec::new(),
            held_slots: BTreeMap::new(),
            closed: None,
            next_arrival: 0,
            next_auto_id: 0,
            keys: HashMap::new(),
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            in_flight: VecDeque::new(),
            last_epoch: Epoch(0),
            results: ResultStore::new(max_results),
            counters: SchedulerStats::default(),
        }
    }

    pub(super) fn check_open(&self) -> Result<()> {
        match &self.closed {
            None => Ok(()),
            Some(reason) => Err(Error::Closed {
                reason: reason.clone(),
            }),
        }
    }

    pub(super) fn submit(
        &mut self,
        spec: RequestSpec,
        config: &SchedulerConfig,
        now_ns: u64,
    ) -> Result<RequestId> {
        self.check_open()?;
        if let Some(id) = spec.id
            && (self.is_live(id) || self.holds_slot(id))
        {
            return Err(Error::DuplicateRequest { id });
        }
        if self.waiting.len() >= config.max_waiting {
            return Err(Error::QueueFull {
                waiting: self.waiting.len(),
                max_waiting: config.max_waiting,
            });
        }
        let id = spec.id.unwrap_or_else(|| self.unused_id());
        let class = match config.policy {
            Policy::Fcfs => PriorityClass::High,
            Policy::Priority => spec.class,
        };
        let key = (class, self.next_arrival);
        self.next_arrival += 1;
        self.results.take(id);
        self.keys.insert(id, key);
        self.counters.submitted += 1;
        let memory_class = self.memory.class_of(spec.class);
        let request = Request {
            id,
            class: memory_class,
            seq: Sequence::new(memory_class),
            broken: None,
            account: Account::default(),
            prompt: spec.prompt,
            generated: Vec::new(),
            sampling: spec.sampling,
            computed: 0,
            slot: None,
            stamps: Stamps {
                submitted_ns: now_ns,
                ..Stamps::default()
            },
        };
        self.waiting.insert(key, request);
        Ok(id)
    }

    /// Whether a copy still reads the slot of a request of this id that is gone.
    fn holds_slot(&self, id: RequestId) -> bool {
        self.held_slots.values().any(|&held| held == id)
    }

    fn unused_id(&mut self) -> RequestId {
        loop {
            let id = RequestId(self.next_auto_id);
            self.next_auto_id = self.next_auto_id.wrapping_add(1);
            if !self.is_live(id) && !self.holds_slot(id) && self.results.get(id).is_none() {
                return id;
            }
        }
    }

    pub(super) fn abort(&mut self, id: RequestId, slots: &SlotAllocator, now_ns: u64) -> bool {
        let Some(&key) = self.keys.get(&id) else {
            return false;
        };
        self.end(key, FinishReason::Abort, None, slots, now_ns)
            .is_some()
    }

    pub(super) fn close(
        &mut self,
        reason: &str,
        finish: FinishReason,
        slots: &SlotAllocator,
        now_ns: u64,
    ) {
        if self.closed.is_some() {
            return;
        }
        self.closed = Some(reason.to_owned());
        // Waiting ones first: if the results do not all fit, those with tokens are kept.
        let live: Vec<Key> = self
            .waiting
            .keys()
            .chain(self.running.keys())
            .copied()
            .collect();
        for key in live {
            self.end(key, finish, Some(reason.to_owned()), slots, now_ns);
        }
    }

    /// Moves a live request to the results and gives its slot back, behind the newest step in flight:
    /// that one may touch it. `None` if nothing lives at `key`.
    pub(super) fn end(
        &mut self,
        key: Key,
        reason: FinishReason,
        message: Option<String>,
        slots: &SlotAllocator,
        now_ns: u64,
    ) -> Option<(RequestId, FinishReason)> {
        let found = self
            .running
            .remove(&key)
            .or_else(|| self.waiting.remove(&key));
        let mut request = found?;
        let id = request.id;
        self.keys.remove(&id);
        self.memory.drop_sequence(&mut request.seq);
        if request.slot.is_some() {
            self.free_slot(key, id, slots);
        }
        let counter = match reason {
            FinishReason::Stop => &mut self.counters.finished_stop,
            FinishReason::Length => &mut self.counters.finished_length,
            FinishReason::Abort => &mut self.counters.finished_abort,
            FinishReason::Error => &mut self.counters.finished_error,
        };
        *counter += 1;
        self.results.put(RequestResult {
            id,
            prompt_len: request.prompt.len(),
            computed_prompt_tokens: request.account.computed_prompt,
            cached: request.account.cached,
            recomputed_tokens: request.account.recomputed,
            preemptions: request.account.preemptions,
            tokens: request.generated,
            reason,
            message,
            stamps: Stamps {
                finished_ns: Some(now_ns),
                ..request.stamps
            },
        });
        Some((id, reason))
    }

    /// Newest step in flight: what is given back now may be touched until it has ended.
    fn fence(&self) -> Option<Epoch> {
        self.in_flight.back().map(|step| step.epoch)
    }

    /// Frees the slot of a request that leaves, behind the newest step in flight, or once the copies
    /// that read it are over.
    fn free_slot(&mut self, key: Key, id: RequestId, slots: &SlotAllocator) {
        if self.memory.reads_slot(key) {
            self.held_slots.insert(key, id);
            return;
        }
        let freed = slots.free(id, self.fence());
        debug_assert!(freed.is_ok(), "a running request holds its slot");
    }

    /// Takes a running request out of the running set; it waits with the tokens it has, at its old
    /// place in the order. `keep` tries to keep its KV in the host tier.
    pub(super) fn preempt(&mut self, key: Key, keep: bool, slots: &SlotAllocator) {
        let Some(mut request) = self.running.remove(&key) else {
            return;
        };
        if let Some(slot) = request.slot.take() {
            if keep {
                self.memory
                    .preempt(key, slot, &mut request.seq, request.computed);
            } else {
                self.memory.drop_sequence(&mut request.seq);
            }
            self.free_slot(key, request.id, slots);
        }
        request.computed = 0;
        request.broken = None;
        request.account.preemptions += 1;
        self.counters.preemptions += 1;
        self.waiting.insert(key, request);
    }

    /// Applies the outcomes of copies that have arrived.
    pub(super) fn reap(&mut self, slots: &SlotAllocator) {
        for (job, outcome) in std::mem::take(&mut self.inbox) {
            let why = match &outcome {
                CopyOutcome::Done => None,
                CopyOutcome::Failed(failure) => Some(failure.to_string()),
                CopyOutcome::Cancelled => Some(format!("copy job {job} was cancelled")),
            };
            if let Some(why) = why {
                let depends = |request: &&mut Request| request.seq.loads.contains(&job);
                for request in self.running.values_mut().filter(depends) {
                    request.broken.get_or_insert_with(|| why.clone());
                }
            }
            let Some(event) = self.memory.settle(job, &outcome) else {
                continue;
            };
            let key = match event {
                Event::Sealed {
                    key,
                    index,
                    page,
                    host,
                    ok,
                } => {
                    let request = self.running.get_mut(&key);
                    let seq = request.map(|request| &mut request.seq);
                    self.memory.sealed(seq, index, page, host, ok);
                    key
                }
                Event::Parked { key, job, ok } => {
                    if let Some(request) = self.waiting.get_mut(&key) {
                        self.memory.parked(&mut request.seq, job, ok);
                    }
                    key
                }
                Event::SlotRead { key } => key,
            };
            if !self.memory.reads_slot(key)
                && let Some(id) = self.held_slots.remove(&key)
            {
                let freed = slots.free(id, self.fence());
                debug_assert!(freed.is_ok(), "a held slot is in use");
            }
        }
    }

    pub(super) fn is_live(&self, id: RequestId) -> bool {
        self.keys.contains_key(&id)
    }

    pub(super) fn status(&self, id: RequestId) -> Result<RequestStatus> {
        if let Some(result) = self.results.get(id) {
            return Ok(RequestStatus::Finished(result.clone()));
        }
        let key = self.keys.get(&id).ok_or(Error::UnknownRequest { id })?;
        let request = self.running.get(key).or_else(|| self.waiting.get(key));
        let request = request.ok_or(Error::UnknownRequest { id })?;
        Ok(RequestStatus::Live {
            phase: request.phase(),
            computed: request.computed,
            tokens: request.generated.clone(),
        })
    }

    pub(super) fn stats(&self) -> SchedulerStats {
        SchedulerStats {
            waiting: self.waiting.len(),
            running: self.running.len(),
            results: self.results.len(),
            results_dropped: self.results.dropped,
            ..self.counters
        }
    }
}
