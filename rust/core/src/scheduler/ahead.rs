//! The step after the one in flight, formed before the tokens of that one are known.
//!
//! Only in steady decode, where the next step follows from counts alone: every row of the step in
//! flight samples a token and, as far as lengths tell, goes on. Whatever needs a look at the queues,
//! a copy, or a page of somebody else is left to the ordinary plan. A row whose request turns out to
//! have ended runs for nothing; what it writes lies behind the fence of its own step.

use super::SchedulerConfig;
use super::planner::Row;
use super::state::{InFlight, Request, State};
use crate::error::{Error, Result};
use crate::ids::Epoch;
use crate::plan::{RowInput, SampleInput, StepPlan};
use crate::request::PriorityClass;
use crate::slots::SlotAllocator;

impl State {
    /// The step after `epoch`, which must be the only one in flight, if it is a steady decode step.
    pub(super) fn plan_ahead(
        &mut self,
        epoch: Epoch,
        config: &SchedulerConfig,
        slots: &SlotAllocator,
    ) -> Result<Option<StepPlan>> {
        self.start_held_back(config);
        let step = self.in_flight.front().filter(|step| step.epoch == epoch);
        let Some(step) = step.filter(|_| self.in_flight.len() == 1) else {
            return Err(Error::StalePlan { epoch });
        };
        let every = self.memory.config().preempt_every;
        let preempts = every > 0 && (epoch.0 + 1).is_multiple_of(every);
        if preempts || self.memory.has_step() || self.memory.has_stores() {
            return Ok(None);
        }
        let Some(rows) = self.rows_after(step, config, slots) else {
            return Ok(None);
        };
        for row in &rows {
            if let Some(request) = self.running.get_mut(&row.key) {
                let wanted = request.computed + 2;
                let room = self.memory.grow(&mut request.seq, wanted, 0);
                debug_assert_eq!(room, wanted, "its page was counted as free");
            }
        }
        Ok(self.launch(&rows, config))
    }

    /// Rows of the step after `step`; `None` if it is not certain what they are, or there are none.
    fn rows_after(
        &self,
        step: &InFlight,
        config: &SchedulerConfig,
        slots: &SlotAllocator,
    ) -> Option<Vec<Row>> {
        let mut rows = Vec::with_capacity(step.rows.len());
        let (mut live, mut missing) = (0, 0);
        for (source, row) in step.rows.iter().enumerate() {
            if !row.samples || row.staging.is_some() {
                return None;
            }
            let Some(request) = self.running.get(&row.key) else {
                continue; // aborted
            };
            live += 1;
            if !request.is_steady() {
                return None;
            }
            if request.ends_with_next(config.max_context) {
                continue;
            }
            // The token in flight, and the one after it.
            missing += self.memory.missing(&request.seq, request.computed + 2);
            rows.push(Row {
                key: row.key,
                tokens: 1,
                decode: true,
                staging: None,
                source: Some(source),
            });
        }
        // A slot that is free, or will be after this step, is for those who wait.
        let counts = slots.stats();
        let gives_slot = counts.in_use < counts.total || rows.len() < live;
        let admits = !self.waiting.is_empty() && gives_slot;
        let steady = live == self.running.len() && !admits && missing <= self.memory.free();
        (steady && !rows.is_empty()).then_some(rows)
    }
}

impl Request {
    /// Whether its next row depends on nothing but the number of its tokens.
    fn is_steady(&self) -> bool {
        self.class == PriorityClass::High
            && self.is_decoding()
            && self.broken.is_none()
            && self.seq.loads.is_empty()
            && !self.sampling.needs_history()
    }

    /// Whether the next token is its last, whatever it is.
    fn ends_with_next(&self, max_context: usize) -> bool {
        let generated = self.generated.len() + 1;
        self.sampling
            .is_full(self.prompt.len(), generated, max_context)
    }

    /// Its decode row behind the token that sampled row `source` of the step in flight gives it.
    pub(super) fn row_after(&self, source: usize, table_tokens: usize) -> Option<RowInput<'_>> {
        Some(RowInput {
            request: self.id,
            slot: self.slot?,
            start: self.computed + 1,
            tokens: &[0],
            source: Some(source),
            table: self.seq.table(),
            table_tokens,
            sample: Some(SampleInput {
                spec: &self.sampling,
                prompt: &self.prompt,
                generated: &self.generated,
                awaited: 1,
            }),
        })
    }
}
