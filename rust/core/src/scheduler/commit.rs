//! What the end of a step changes: tokens arrive, requests finish, fenced slots become free.
//!
//! Steps end in the order in which they were planned. With the next one in flight already, a request
//! that ends here has a row in it that runs for nothing: that row is gone when its own step ends.

use super::SchedulerConfig;
use super::state::{InFlight, InFlightRow, State};
use crate::error::{Error, Result};
use crate::ids::{Epoch, RequestId};
use crate::request::{FinishReason, Key};
use crate::slots::SlotAllocator;

/// How often a request starts again because a copy it needs failed; then it ends.
const MAX_COPY_FAILURES: u32 = 2;

/// What a commit did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommitReport {
    /// Requests that ended: first those that could not go on when the step was formed, then the
    /// others in row order.
    pub finished: Vec<(RequestId, FinishReason)>,
    /// Whether the token of each sampled row became part of its request; false for a row that was
    /// aborted during the step or whose token was bad.
    pub accepted: Vec<bool>,
}

/// What became of a row.
enum Outcome {
    /// Its request ended before the step did, or has to start again.
    Gone,
    /// It goes on.
    Runs,
    /// It reached its end.
    Ended(FinishReason),
    /// Its token was bad.
    Failed(String),
}

impl State {
    pub(super) fn commit(
        &mut self,
        epoch: Epoch,
        tokens: &[i32],
        stops: &[bool],
        config: &SchedulerConfig,
        slots: &SlotAllocator,
        now_ns: u64,
    ) -> Result<CommitReport> {
        let wanted = self
            .in_flight_at(epoch)?
            .rows
            .iter()
            .filter(|row| row.samples)
            .count();
        if tokens.len() != wanted {
            let expected = format!("{wanted} tokens, one per sampled row");
            return Err(Error::request("tokens", tokens.len(), expected));
        }
        if !stops.is_empty() && stops.len() != wanted {
            let expected = format!("{wanted} flags, one per sampled row, or none");
            return Err(Error::request("stops", stops.len(), expected));
        }
        let rows = self.retire(epoch, slots);
        self.reap(slots);
        let mut report = CommitReport {
            finished: std::mem::take(&mut self.ended),
            accepted: Vec::with_capacity(wanted),
        };
        let mut samples = tokens.iter().enumerate();
        for row in &rows {
            let sample = if row.samples { samples.next() } else { None };
            let sample = sample.map(|(i, &token)| (token, stops.get(i) == Some(&true)));
            let outcome = self.advance(row, sample, config, slots, now_ns);
            if row.samples {
                let accepted = !matches!(outcome, Outcome::Gone | Outcome::Failed(_));
                report.accepted.push(accepted);
            }
            let (reason, message) = match outcome {
                Outcome::Gone | Outcome::Runs => continue,
                Outcome::Ended(reason) => (reason, None),
                Outcome::Failed(message) => (FinishReason::Error, Some(message)),
            };
            report
                .finished
                .extend(self.end(row.key, reason, message, slots, now_ns));
        }
        Ok(report)
    }

    /// Moves one request past the step; `sample` is its new token and whether a stop string ended
    /// with it.
    fn advance(
        &mut self,
        row: &InFlightRow,
        sample: Option<(i32, bool)>,
        config: &SchedulerConfig,
        slots: &SlotAllocator,
        now_ns: u64,
    ) -> Outcome {
        if let Some(outcome) = self.missed(row, slots) {
            if let Some(staging) = row.staging {
                self.memory.unstage(staging);
            }
            return outcome;
        }
        let Some((request, slot)) = self
            .running
            .get_mut(&row.key)
            .and_then(|request| request.slot.map(|slot| (request, slot)))
        else {
            return Outcome::Gone;
        };
        let from = request.computed;
        request.computed += row.tokens;
        let prompt = request.prompt.len();
        let (fresh, again) = request.account.computed(from, request.computed, prompt);
        self.counters.prompt_tokens += fresh as u64;
        self.counters.recomputed_tokens += again as u64;
        self.memory.computed(
            row.key,
            slot,
            &mut request.seq,
            &request.prompt,
            request.computed,
            row.staging,
        );
        let Some((token, stop)) = sample else {
            return Outcome::Runs;
        };
        let Some(token) = u32::try_from(token).ok().filter(|&t| t < config.vocab_size) else {
            return Outcome::Failed(format!("sampled token {token}: the logits were not finite"));
        };
        request.generated.push(token);
        request.stamps.first_token_ns.get_or_insert(now_ns);
        self.counters.generated_tokens += 1;
        let prompt_len = request.prompt.len();
        let generated = &request.generated;
        match request
            .sampling
            .finish_reason(prompt_len, generated, stop, config.max_context)
        {
            Some(reason) => Outcome::Ended(reason),
            None => Outcome::Runs,
        }
    }

    /// What is to be done about a row whose request is gone, or whose KV did not arrive. `None` if
    /// all is well.
    fn missed(&mut self, row: &InFlightRow, slots: &SlotAllocator) -> Option<Outcome> {
        let Some(request) = self.running.get_mut(&row.key) else {
            return Some(Outcome::Gone);
        };
        // A copy that has not ended although its step has is as good as failed.
        let live = request
            .seq
            .loads
            .iter()
            .find(|&&job| self.memory.is_live(job));
        if let Some(job) = live {
            let why = format!("copy job {job} did not end with its step");
            request.broken.get_or_insert(why);
        }
        request.broken.as_ref()?;
        let failed = self.restart(row.key, slots);
        Some(failed.map_or(Outcome::Gone, Outcome::Failed))
    }

    /// Sends a request whose KV did not arrive back to the queue. Returns why, if that happened too
    /// often: then it has to end.
    pub(super) fn restart(&mut self, key: Key, slots: &SlotAllocator) -> Option<String> {
        let request = self.running.get_mut(&key)?;
        let why = request.broken.take()?;
        request.account.failures += 1;
        self.counters.failed_copy_rows += 1;
        if request.account.failures > MAX_COPY_FAILURES {
            return Some(format!("CopyError: {why}"));
        }
        self.preempt(key, false, slots);
        None
    }

    pub(super) fn fail(
        &mut self,
        epoch: Epoch,
        message: &str,
        slots: &SlotAllocator,
        now_ns: u64,
    ) -> Result<Vec<RequestId>> {
        self.in_flight_at(epoch)?;
        let rows = self.retire(epoch, slots);
        self.reap(slots);
        let before = std::mem::take(&mut self.ended);
        let mut ended: Vec<RequestId> = before.into_iter().map(|(id, _)| id).collect();
        for row in &rows {
            if let Some(staging) = row.staging {
                self.memory.unstage(staging);
            }
            let message = Some(message.to_owned());
            let gone = self.end(row.key, FinishReason::Error, message, slots, now_ns);
            ended.extend(gone.map(|(id, _)| id));
        }
        Ok(ended)
    }

    /// The oldest step in flight, which must be `epoch`.
    fn in_flight_at(&self, epoch: Epoch) -> Result<&InFlight> {
        let step = self.in_flight.front().filter(|step| step.epoch == epoch);
        step.ok_or(Error::StalePlan { epoch })
    }

    /// The oldest step is over: slots and pages fenced by it are free from now on.
    fn retire(&mut self, epoch: Epoch, slots: &SlotAllocator) -> Vec<InFlightRow> {
        slots.retire(epoch);
        self.memory.retired(epoch);
        self.in_flight
            .pop_front()
            .map(|step| step.rows)
            .unwrap_or_default()
    }
}
