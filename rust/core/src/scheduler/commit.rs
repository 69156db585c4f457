//! What the end of a step changes: tokens arrive, requests finish, fenced slots become free.

use super::SchedulerConfig;
use super::state::{InFlight, InFlightRow, State};
use crate::error::{Error, Result};
use crate::ids::{Epoch, RequestId};
use crate::request::FinishReason;
use crate::slots::SlotAllocator;

/// What a commit did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommitReport {
    /// Requests that ended, in row order.
    pub finished: Vec<(RequestId, FinishReason)>,
    /// Whether the token of each sampled row became part of its request; false for a row that was
    /// aborted during the step or whose token was bad.
    pub accepted: Vec<bool>,
}

/// What became of a row.
enum Outcome {
    /// Its request ended during the step.
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
        let mut report = CommitReport::default();
        let mut samples = tokens.iter().enumerate();
        for row in &rows {
            let sample = if row.samples { samples.next() } else { None };
            let sample = sample.map(|(i, &token)| (token, stops.get(i) == Some(&true)));
            let outcome = self.advance(row, sample, config, now_ns);
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
        now_ns: u64,
    ) -> Outcome {
        let Some(request) = self.running.get_mut(&row.key) else {
            return Outcome::Gone;
        };
        if !request.is_decoding() {
            self.counters.prompt_tokens += row.tokens as u64;
        }
        request.computed += row.tokens;
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

    pub(super) fn fail(
        &mut self,
        epoch: Epoch,
        message: &str,
        slots: &SlotAllocator,
        now_ns: u64,
    ) -> Result<Vec<RequestId>> {
        self.in_flight_at(epoch)?;
        let rows = self.retire(epoch, slots);
        let ended = rows.iter().filter_map(|row| {
            let message = Some(message.to_owned());
            self.end(row.key, FinishReason::Error, message, slots, now_ns)
        });
        Ok(ended.map(|(id, _)| id).collect())
    }

    fn in_flight_at(&self, epoch: Epoch) -> Result<&InFlight> {
        let step = self.in_flight.as_ref().filter(|step| step.epoch == epoch);
        step.ok_or(Error::StalePlan { epoch })
    }

    /// The step is over: slots fenced by it are free from now on.
    fn retire(&mut self, epoch: Epoch, slots: &SlotAllocator) -> Vec<InFlightRow> {
        slots.retire(epoch);
        self.in_flight
            .take()
            .map(|step| step.rows)
            .unwrap_or_default()
    }
}
