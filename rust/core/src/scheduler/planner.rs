//! Turns the queues into the next step. Decides only; the runner executes.
//!
//! Every decoding request gets one row. Prefill then takes at most `max_batch_tokens` tokens, in
//! order of service. A chunk that does not reach the end of its prompt ends at a multiple of
//! [`CHUNK_ALIGN`] in absolute position, so where a prompt is cut cannot be seen in its bits
//! (`docs`: the delta rule works in blocks of 64, attention tiles queries by 64).

use super::SchedulerConfig;
use super::state::{InFlight, InFlightRow, Key, Request, State};
use crate::ids::Epoch;
use crate::plan::{PlanBuilder, RowInput, SampleInput, StepPlan};
use crate::slots::SlotAllocator;

/// Prefill is cut at multiples of this in absolute position.
pub const CHUNK_ALIGN: usize = 64;

impl State {
    /// The next step, or `None` when there is nothing to run or a step is in flight.
    pub(super) fn plan(
        &mut self,
        config: &SchedulerConfig,
        slots: &SlotAllocator,
        now_ns: u64,
    ) -> Option<StepPlan> {
        if self.in_flight.is_some() || self.keys.is_empty() {
            return None;
        }
        let epoch = Epoch(self.last_epoch.0 + 1);
        let mut builder = PlanBuilder::new(epoch);
        let mut rows = Vec::with_capacity(self.running.len());
        for (&key, request) in &self.running {
            if request.is_decoding() {
                builder.push_decode(request.row(1)?);
                rows.push(InFlightRow {
                    key,
                    tokens: 1,
                    samples: true,
                });
            }
        }
        for (key, tokens) in self.prefill_chunks(config.max_batch_tokens, slots, now_ns) {
            let request = self.running.get(&key)?;
            builder.push_prefill(request.row(tokens)?);
            let samples = request.computed + tokens == request.prompt.len();
            rows.push(InFlightRow {
                key,
                tokens,
                samples,
            });
        }
        if rows.is_empty() {
            return None;
        }
        self.last_epoch = epoch;
        self.in_flight = Some(InFlight { epoch, rows });
        self.counters.steps += 1;
        Some(builder.finish())
    }

    /// Chunks of this step in order of service, admitting waiting requests on the way.
    fn prefill_chunks(
        &mut self,
        mut budget: usize,
        slots: &SlotAllocator,
        now_ns: u64,
    ) -> Vec<(Key, usize)> {
        let prefilling: Vec<Key> = self
            .running
            .iter()
            .filter(|(_, request)| !request.is_decoding())
            .map(|(&key, _)| key)
            .collect();
        let mut prefilling = prefilling.into_iter().peekable();
        let mut chunks = Vec::new();
        let mut may_admit = true;
        while budget > 0 {
            let head = self.waiting.first_key_value().map(|(&key, _)| key);
            let (key, waits) = match (prefilling.peek(), head.filter(|_| may_admit)) {
                (Some(&key), None) => (key, false),
                (Some(&key), Some(head)) if key < head => (key, false),
                (_, Some(head)) => (head, true),
                (None, None) => break,
            };
            let queue = if waits { &self.waiting } else { &self.running };
            let Some(tokens) = queue.get(&key).map(|request| request.chunk(budget)) else {
                break;
            };
            if tokens == 0 {
                break; // the head of the line waits for the next step's budget
            }
            if !waits {
                prefilling.next();
            } else if !self.admit(key, slots, now_ns) {
                may_admit = false; // no slot: nothing overtakes the head of the queue
                continue;
            }
            budget -= tokens;
            chunks.push((key, tokens));
        }
        chunks
    }

    fn admit(&mut self, key: Key, slots: &SlotAllocator, now_ns: u64) -> bool {
        let Some(mut request) = self.waiting.remove(&key) else {
            return false;
        };
        let Ok(grant) = slots.allocate(request.id) else {
            self.waiting.insert(key, request);
            return false;
        };
        request.slot = Some(grant.slot);
        request.stamps.first_planned_ns = Some(now_ns);
        self.running.insert(key, request);
        true
    }
}

impl Request {
    /// Prompt tokens to compute next with `budget` tokens left: to the end of the prompt, or to the
    /// last multiple of 64 that the budget reaches.
    fn chunk(&self, budget: usize) -> usize {
        let left = self.prompt.len() - self.computed;
        if left <= budget {
            return left;
        }
        let cut = (self.computed + budget) / CHUNK_ALIGN * CHUNK_ALIGN;
        cut.saturating_sub(self.computed)
    }

    fn row(&self, tokens: usize) -> Option<RowInput<'_>> {
        let decoding = self.is_decoding();
        let tokens = if decoding {
            self.generated.last_chunk::<1>()?.as_slice()
        } else {
            self.prompt.get(self.computed..self.computed + tokens)?
        };
        let samples = decoding || self.computed + tokens.len() == self.prompt.len();
        Some(RowInput {
            request: self.id,
            slot: self.slot?,
            start: self.computed,
            tokens,
            sample: samples.then_some(SampleInput {
                spec: &self.sampling,
                prompt: &self.prompt,
                generated: &self.generated,
            }),
        })
    }
}
