//! The queues behind the scheduler's mutex, and every change of a request's state but the step's.

use std::collections::{BTreeMap, HashMap};

use super::results::ResultStore;
use super::{Policy, SchedulerConfig};
use crate::error::{Error, Result};
use crate::ids::{Epoch, RequestId, SlotId};
use crate::request::{
    FinishReason, Phase, PriorityClass, RequestResult, RequestSpec, RequestStatus, Stamps,
};
use crate::sampling::SamplingSpec;
use crate::slots::SlotAllocator;

/// Place in the order of service: class (HIGH only, under FCFS), then arrival. Never reused, so a
/// key also tells a request from a later one with the same id.
pub(super) type Key = (PriorityClass, u64);

/// A live request.
pub(super) struct Request {
    pub(super) id: RequestId,
    pub(super) prompt: Box<[u32]>,
    pub(super) generated: Vec<u32>,
    pub(super) sampling: SamplingSpec,
    /// Tokens in the slot: prompt first, then all generated tokens but the last.
    pub(super) computed: usize,
    pub(super) slot: Option<SlotId>,
    pub(super) stamps: Stamps,
}

impl Request {
    pub(super) fn is_decoding(&self) -> bool {
        self.computed >= self.prompt.len()
    }

    fn phase(&self) -> Phase {
        match self.slot {
            None => Phase::Waiting,
            Some(_) if self.is_decoding() => Phase::Decoding,
            Some(_) => Phase::Prefilling,
        }
    }
}

/// One row of the plan in flight.
pub(super) struct InFlightRow {
    pub(super) key: Key,
    pub(super) tokens: usize,
    pub(super) samples: bool,
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
    /// Prompt tokens computed.
    pub prompt_tokens: u64,
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
    pub(super) in_flight: Option<InFlight>,
    pub(super) last_epoch: Epoch,
    pub(super) results: ResultStore,
    pub(super) counters: SchedulerStats,
}

impl State {
    pub(super) fn new(max_results: usize) -> Self {
        Self {
            closed: None,
            next_arrival: 0,
            next_auto_id: 0,
            keys: HashMap::new(),
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            in_flight: None,
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
            && self.is_live(id)
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
        let request = Request {
            id,
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

    fn unused_id(&mut self) -> RequestId {
        loop {
            let id = RequestId(self.next_auto_id);
            self.next_auto_id = self.next_auto_id.wrapping_add(1);
            if !self.is_live(id) && self.results.get(id).is_none() {
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

    /// Moves a live request to the results and gives its slot back, behind the step in flight if
    /// that step may touch it. `None` if nothing lives at `key`.
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
        let request = found?;
        let id = request.id;
        self.keys.remove(&id);
        if request.slot.is_some() {
            let fence = self.in_flight.as_ref().map(|step| step.epoch);
            let freed = slots.free(id, fence);
            debug_assert!(freed.is_ok(), "a running request holds its slot");
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
            computed_prompt_tokens: request.computed.min(request.prompt.len()),
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

    pub(super) fn check(&self, slots: &SlotAllocator) -> std::result::Result<(), String> {
        slots.check()?;
        if self.keys.len() != self.waiting.len() + self.running.len() {
            return Err(format!(
                "{} live ids, {} waiting + {} running",
                self.keys.len(),
                self.waiting.len(),
                self.running.len()
            ));
        }
        for (key, request) in self.waiting.iter().chain(&self.running) {
            let id = request.id.0;
            if self.keys.get(&request.id) != Some(key) {
                return Err(format!("request {id} is not at its key"));
            }
            if self.results.get(request.id).is_some() {
                return Err(format!("request {id} is live and has a result"));
            }
            let running = self.running.contains_key(key);
            if running != request.slot.is_some()
                || (running && slots.slot_of(request.id) != request.slot)
            {
                return Err(format!(
                    "request {id}: running {running}, slot {:?}",
                    request.slot
                ));
            }
            let expected = match request.generated.len() {
                0 => request.computed.min(request.prompt.len() - 1),
                n => request.prompt.len() + n - 1,
            };
            if request.computed != expected {
                return Err(format!(
                    "request {id}: {} tokens in the slot",
                    request.computed
                ));
            }
        }
        Ok(())
    }
}
