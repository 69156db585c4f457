//! Turns the queues into the next step. Decides only; the runner executes.
//!
//! Every decoding request gets one row. Prefill then takes at most `max_batch_tokens` tokens, in
//! order of service. A chunk that does not reach the end of its prompt ends at a multiple of
//! [`CHUNK_ALIGN`] in absolute position, so where a prompt is cut cannot be seen in its bits
//! (`docs`: the delta rule works in blocks of 64, attention tiles queries by 64).
//!
//! With pages a row also needs room for its new tokens. HIGH rows are served first; on shortage
//! LOW windows go, then the newest running request of the lowest class is preempted, never one that
//! is older than the row that needs the page. LOW rows take what is left of pages, tokens and link.

use std::cmp::Reverse;

use super::SchedulerConfig;
use super::state::{InFlight, InFlightRow, Request, State};
use crate::ids::Epoch;
use crate::memory::{Admission, Admitted, Ask, Demand, Windows};
use crate::plan::{PlanBuilder, RowInput, SampleInput, StepPlan};
use crate::request::{FinishReason, Key, PriorityClass};
use crate::slots::SlotAllocator;

/// Prefill is cut at multiples of this in absolute position.
pub const CHUNK_ALIGN: usize = 64;

/// A row of the plan being formed.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub(super) key: Key,
    pub(super) tokens: usize,
    pub(super) decode: bool,
    pub(super) staging: Option<u32>,
    /// Sampled row of the step in flight whose token is the input.
    pub(super) source: Option<usize>,
}

/// What became of a row that asked for a page.
enum Room {
    /// There may be room now.
    Retry,
    /// Not in this step.
    Wait,
    /// Never: it is alone and the pool is full.
    Never,
}

impl State {
    /// The next step, or `None` when there is nothing to run or a step is in flight: the one after
    /// that is `plan_ahead`'s.
    pub(super) fn plan(
        &mut self,
        config: &SchedulerConfig,
        slots: &SlotAllocator,
        now_ns: u64,
    ) -> Option<StepPlan> {
        if !self.in_flight.is_empty() {
            return None;
        }
        self.reap(slots);
        if self.keys.is_empty() {
            self.start_held_back(config);
            // The end of a store may make another one due, also when no request is left.
            if !self.memory.has_stores() {
                return None;
            }
        }
        self.restart_broken(slots, now_ns);
        self.preempt_for_test(slots);
        let mut rows = self.choose(config, slots, now_ns, true);
        while rows.is_empty() && !self.memory.has_step() && self.break_tie(slots, now_ns) {
            // Whoever gave way must not come back before the others have got on.
            rows = self.choose(config, slots, now_ns, false);
        }
        self.start_held_back(config);
        // A step of copies alone brings back what a request needs before it has room to run, or has
        // stores started: they make room, and nobody asks for them without a step.
        // And the end of a request is told with a step, as there is no other way to tell it.
        let idle = rows.is_empty() && !self.memory.has_step() && !self.memory.has_stores();
        if idle && self.ended.is_empty() {
            return None;
        }
        self.counters.deferred_rows += (self.running.len() - rows.len()) as u64;
        self.launch(&rows, config)
    }

    /// Has stores started that waited for what is not owed any more. After admissions: whoever is
    /// admitted may need the pages.
    pub(super) fn start_held_back(&mut self, config: &SchedulerConfig) {
        if self.memory.holds_back() {
            let owed = self.memory.owed(&self.demands(config, 1.0));
            self.memory.promise(owed);
        }
    }

    /// Rows of the next step in row order. `may_admit`: whether waiting requests may start.
    fn choose(
        &mut self,
        config: &SchedulerConfig,
        slots: &SlotAllocator,
        now_ns: u64,
        may_admit: bool,
    ) -> Vec<Row> {
        let mut rows = Vec::with_capacity(self.running.len());
        for key in self.running_keys(|request| request.class == PriorityClass::High) {
            self.choose_decode(key, &mut rows, slots, now_ns);
        }
        let budget = self.choose_prefill(&mut rows, config, slots, now_ns, may_admit);
        self.choose_low(&mut rows, budget, config);
        rows.sort_by_key(|row| (Reverse(row.decode), row.key));
        rows
    }

    fn running_keys(&self, wanted: impl Fn(&Request) -> bool) -> Vec<Key> {
        let running = self.running.iter();
        running
            .filter(|(_, request)| wanted(request))
            .map(|(&key, _)| key)
            .collect()
    }

    /// Adds a HIGH row that decodes, if it has room for its token.
    fn choose_decode(&mut self, key: Key, rows: &mut Vec<Row>, slots: &SlotAllocator, now_ns: u64) {
        // It may have been preempted for an older one.
        while let Some(request) = self.running.get_mut(&key) {
            if !request.is_decoding() {
                return;
            }
            let wanted = request.computed + 1;
            if self.memory.grow(&mut request.seq, wanted, 0) == wanted {
                rows.push(Row {
                    key,
                    tokens: 1,
                    decode: true,
                    staging: None,
                    source: None,
                });
                return;
            }
            match self.make_room(key, rows, slots) {
                Room::Retry => {}
                Room::Wait => return,
                Room::Never => {
                    self.out_of_pages(key, slots, now_ns);
                    return;
                }
            }
        }
    }

    /// Takes pages from those that have to give way to the running request `key`.
    fn make_room(&mut self, key: Key, rows: &mut Vec<Row>, slots: &SlotAllocator) -> Room {
        if self.close_newest_windows(&[]) {
            return Room::Retry;
        }
        if self.memory.pages_coming() {
            return Room::Wait;
        }
        match self.newest() {
            Some(victim) if victim != key => {
                let memory = &mut self.memory;
                rows.retain(|row| {
                    if row.key == victim
                        && let Some(staging) = row.staging
                    {
                        memory.unstage(staging);
                    }
                    row.key != victim
                });
                self.preempt(victim, true, slots);
                Room::Retry
            }
            _ if self.running.len() > 1 || self.memory.copies_under_way() => Room::Wait,
            _ => Room::Never,
        }
    }

    /// The running request that has to go first: the newest of the lowest class.
    fn newest(&self) -> Option<Key> {
        let running = self.running.iter();
        running
            .max_by_key(|&(&key, request)| (request.class, key))
            .map(|(&key, _)| key)
    }

    /// Takes the windows of the newest LOW request that has any and is not in `rows`.
    fn close_newest_windows(&mut self, rows: &[Row]) -> bool {
        let memory = &mut self.memory;
        self.running
            .iter_mut()
            .rev()
            .filter(|(key, request)| {
                request.class == PriorityClass::Low && rows.iter().all(|row| row.key != **key)
            })
            .any(|(_, request)| memory.close_windows(&mut request.seq))
    }

    fn out_of_pages(&mut self, key: Key, slots: &SlotAllocator, now_ns: u64) {
        let message = format!(
            "OutOfPages: the request is alone and needs one more page, {} can be had; raise \
             num_pages or lower max_tokens",
            self.memory.available()
        );
        let ended = self.end(key, FinishReason::Error, Some(message), slots, now_ns);
        self.ended.extend(ended);
    }

    /// No row can run and no copy is under way: the newest gives way, or ends if it is alone.
    fn break_tie(&mut self, slots: &SlotAllocator, now_ns: u64) -> bool {
        if self.memory.copies_under_way() {
            return false;
        }
        let Some(victim) = self.newest() else {
            return false;
        };
        if self.running.len() == 1 {
            self.out_of_pages(victim, slots, now_ns);
        } else {
            self.preempt(victim, true, slots);
        }
        true
    }

    /// Chunks of HIGH requests in order of service, admitting waiting requests on the way. Returns
    /// what is left of the token budget.
    fn choose_prefill(
        &mut self,
        rows: &mut Vec<Row>,
        config: &SchedulerConfig,
        slots: &SlotAllocator,
        now_ns: u64,
        mut may_admit: bool,
    ) -> usize {
        let prefills =
            |request: &Request| request.class == PriorityClass::High && !request.is_decoding();
        let mut prefilling = self.running_keys(prefills).into_iter().peekable();
        let mut budget = config.max_batch_tokens;
        while budget > 0 {
            let head = self.waiting.first_key_value().map(|(&key, _)| key);
            let (key, waits) = match (prefilling.peek(), head.filter(|_| may_admit)) {
                (Some(&key), None) => (key, false),
                (Some(&key), Some(head)) if key < head => (key, false),
                (_, Some(head)) => (head, true),
                (None, None) => break,
            };
            let queue = if waits { &self.waiting } else { &self.running };
            let chunk = queue.get(&key).map(|request| request.chunk(budget));
            if chunk == Some(0) {
                break; // the head of the line waits for the next step's budget
            }
            if !waits {
                prefilling.next();
            } else if !self.admit(key, config, slots, now_ns) {
                may_admit = false; // no room: nothing overtakes the head of the queue
                continue;
            }
            let Some(request) = self.running.get(&key) else {
                continue; // preempted for an older one
            };
            if request.class == PriorityClass::Low {
                continue;
            }
            if request.is_decoding() {
                self.choose_decode(key, rows, slots, now_ns);
                continue;
            }
            let Some(row) = self.chunk_row(key, budget, 0) else {
                // Only the oldest may take pages from others; the rest waits for theirs.
                if self.running.first_key_value().map(|(&oldest, _)| oldest) == Some(key)
                    && matches!(self.make_room(key, rows, slots), Room::Retry)
                    && let Some(row) = self.chunk_row(key, budget, 0)
                {
                    budget -= row.tokens;
                    rows.push(row);
                }
                continue;
            };
            budget -= row.tokens;
            rows.push(row);
        }
        budget
    }

    /// The next chunk of a running request, as far as budget and pages reach.
    fn chunk_row(&mut self, key: Key, budget: usize, headroom: usize) -> Option<Row> {
        let request = self.running.get_mut(&key)?;
        let (from, prompt) = (request.computed, request.prompt.len());
        let mut to = from + request.chunk(budget);
        let snapshot = self.memory.snapshot_cut(prompt, from, to);
        to = snapshot.unwrap_or(to);
        let room = self.memory.grow(&mut request.seq, to, headroom);
        if room < to {
            to = room / CHUNK_ALIGN * CHUNK_ALIGN;
        }
        if to <= from {
            return None;
        }
        let staging = if snapshot == Some(to) {
            self.memory.stage_snapshot(prompt, to)
        } else {
            None
        };
        Some(Row {
            key,
            tokens: to - from,
            decode: false,
            staging,
            source: None,
        })
    }

    fn admit(
        &mut self,
        key: Key,
        config: &SchedulerConfig,
        slots: &SlotAllocator,
        now_ns: u64,
    ) -> bool {
        let Some(mut request) = self.waiting.remove(&key) else {
            return false;
        };
        let Ok(grant) = slots.allocate(request.id) else {
            self.waiting.insert(key, request);
            return false;
        };
        let ratio = match self.memory.config().admission {
            Admission::Estimate { ratio } => ratio,
            Admission::Reserve => 1.0,
        };
        let running = self.demands(config, ratio);
        let ask = Ask {
            slot: grant.slot,
            prompt: &request.prompt,
            demand: request.demand(&self.memory, config.max_context, ratio),
            running: &running,
        };
        match self.memory.admit(&ask, &mut request.seq) {
            Admitted::No => {
                let freed = slots.free(request.id, None);
                debug_assert!(freed.is_ok(), "it has just been allocated");
                self.waiting.insert(key, request);
                return false;
            }
            Admitted::Yes { hit, computed } => {
                let known = request.account;
                request.account.found(hit);
                let cached = request.account.cached;
                self.counters.cached_device_tokens += (cached.device - known.cached.device) as u64;
                self.counters.cached_host_tokens += (cached.host - known.cached.host) as u64;
                self.counters.cached_streamed_tokens +=
                    (cached.streamed - known.cached.streamed) as u64;
                request.computed = computed;
            }
        }
        request.account.admitted_at = request.account.reached;
        request.slot = Some(grant.slot);
        request.stamps.first_planned_ns.get_or_insert(now_ns);
        self.running.insert(key, request);
        true
    }

    /// Demands of the running HIGH requests; not needed with fixed slots.
    fn demands(&self, config: &SchedulerConfig, ratio: f64) -> Vec<Demand> {
        if !self.memory.is_paged() {
            return Vec::new();
        }
        let running = self.running.values();
        running
            .filter(|request| request.class == PriorityClass::High)
            .map(|request| request.demand(&self.memory, config.max_context, ratio))
            .collect()
    }

    /// LOW rows: those that waited longest first, as far as pages, tokens and the link reach.
    fn choose_low(&mut self, rows: &mut Vec<Row>, mut budget: usize, config: &SchedulerConfig) {
        let mut keys = self.running_keys(|request| request.class == PriorityClass::Low);
        if keys.is_empty() {
            return;
        }
        for key in &keys {
            if let Some(request) = self.running.get_mut(key) {
                self.memory.demote_for(&request.seq);
            }
        }
        keys.sort_by_key(|key| {
            let waited = self
                .running
                .get(key)
                .map_or(0, |request| request.seq.waited);
            (Reverse(waited), *key)
        });
        let headroom = match self.memory.config().admission {
            Admission::Reserve => self.memory.owed(&self.demands(config, 1.0)),
            Admission::Estimate { .. } => 0,
        };
        let prefill = rows.iter().filter(|row| !row.decode).map(|row| row.tokens);
        let mut left = self.memory.stream_budget(rows.len(), prefill.sum());
        for key in keys {
            let Some(row) = self.low_row(key, budget, headroom) else {
                self.defer(key);
                continue;
            };
            while let Some(request) = self.running.get_mut(&key) {
                let opened = self.memory.open_windows(&mut request.seq, &mut left);
                match opened {
                    Windows::Open => {
                        if !row.decode {
                            budget -= row.tokens;
                        }
                        rows.push(row);
                        break;
                    }
                    Windows::OverBudget => {
                        self.give_up(row);
                        break;
                    }
                    Windows::NoPages => {
                        let mut busy = rows.clone();
                        busy.push(row);
                        if !self.close_newest_windows(&busy) {
                            self.give_up(row);
                            break;
                        }
                    }
                }
            }
        }
        self.plan_windows(rows);
    }

    fn low_row(&mut self, key: Key, budget: usize, headroom: usize) -> Option<Row> {
        let request = self.running.get_mut(&key)?;
        if !request.is_decoding() {
            return (budget > 0)
                .then(|| self.chunk_row(key, budget, headroom))
                .flatten();
        }
        let wanted = request.computed + 1;
        let room = self.memory.grow(&mut request.seq, wanted, headroom);
        (room == wanted).then_some(Row {
            key,
            tokens: 1,
            decode: true,
            staging: None,
            source: None,
        })
    }

    fn give_up(&mut self, row: Row) {
        if let Some(staging) = row.staging {
            self.memory.unstage(staging);
        }
        self.defer(row.key);
    }

    fn defer(&mut self, key: Key) {
        if let Some(request) = self.running.get_mut(&key) {
            request.seq.waited += 1;
        }
    }

    fn plan_windows(&mut self, rows: &[Row]) {
        let chosen = |key: &Key| rows.iter().any(|row| row.key == *key);
        let running = self.running.iter_mut();
        let mut low: Vec<_> = running
            .filter(|(key, request)| request.class == PriorityClass::Low && chosen(key))
            .map(|(_, request)| &mut request.seq)
            .collect();
        self.memory.plan_windows(&mut low);
    }

    /// Builds the plan of the chosen rows and puts it in flight.
    pub(super) fn launch(&mut self, rows: &[Row], config: &SchedulerConfig) -> Option<StepPlan> {
        let epoch = Epoch(self.last_epoch.0 + 1);
        let table_tokens = self.memory.table_tokens(config.max_context);
        let mut builder = PlanBuilder::new(epoch);
        let mut in_flight = Vec::with_capacity(rows.len());
        let mut snapshots = Vec::new();
        for row in rows {
            let request = self.running.get_mut(&row.key)?;
            let slot = request.slot?;
            self.memory.set_table(&mut request.seq, slot);
            let input = match row.source {
                Some(source) => request.row_after(source, table_tokens)?,
                None => request.row(row.tokens, table_tokens)?,
            };
            let samples = input.sample.is_some();
            let last = (input.start + row.tokens - 1) / table_tokens;
            let page = input.table.get(last).copied();
            if row.decode {
                builder.push_decode(input);
            } else {
                builder.push_prefill(input);
            }
            snapshots.extend(row.staging.map(|staging| (slot.index(), staging)));
            in_flight.push(InFlightRow {
                key: row.key,
                id: request.id,
                slot,
                page: page.filter(|_| self.memory.is_paged()),
                tokens: row.tokens,
                samples,
                staging: row.staging,
            });
        }
        let k0 = self.memory.step_k0();
        builder.set_copies(self.memory.take_step(), k0, snapshots);
        self.memory.launched(epoch);
        self.last_epoch = epoch;
        self.in_flight.push_back(InFlight {
            epoch,
            rows: in_flight,
        });
        self.counters.steps += 1;
        Some(builder.finish())
    }

    /// Requests that wait for a row while KV they depend on is lost begin again.
    fn restart_broken(&mut self, slots: &SlotAllocator, now_ns: u64) {
        for key in self.running_keys(|request| request.broken.is_some()) {
            if let Some(why) = self.restart(key, slots) {
                let ended = self.end(key, FinishReason::Error, Some(why), slots, now_ns);
                self.ended.extend(ended);
            }
        }
    }

    /// The test switch: every so many steps the newest request that got somewhere since it was
    /// admitted has to start again.
    fn preempt_for_test(&mut self, slots: &SlotAllocator) {
        let every = self.memory.config().preempt_every;
        if every == 0 || !(self.last_epoch.0 + 1).is_multiple_of(every) {
            return;
        }
        let victim = self.running.iter().rev().find(|(_, request)| {
            let account = &request.account;
            // Inside its prompt once only: without a cache it would begin from nothing each time.
            let decoding = request.generated.len() > 1;
            account.reached > account.admitted_at && (decoding || account.preemptions == 0)
        });
        if let Some((&key, _)) = victim {
            self.preempt(key, true, slots);
        }
    }
}

impl Request {
    /// Prompt tokens to compute next with `budget` tokens left: to the end of the prompt, or to the
    /// last multiple of 64 that the budget reaches.
    fn chunk(&self, budget: usize) -> usize {
        let left = self.prompt.len().saturating_sub(self.computed);
        if left <= budget {
            return left;
        }
        let cut = (self.computed + budget) / CHUNK_ALIGN * CHUNK_ALIGN;
        cut.saturating_sub(self.computed)
    }

    fn row(&self, tokens: usize, table_tokens: usize) -> Option<RowInput<'_>> {
        let tokens = if self.is_decoding() {
            // Behind a preemption the token is one that is known already.
            let at = self.computed - self.prompt.len();
            self.generated.get(at..=at)?
        } else {
            self.prompt.get(self.computed..self.computed + tokens)?
        };
        let samples = self.computed + tokens.len() == self.known();
        Some(RowInput {
            request: self.id,
            slot: self.slot?,
            start: self.computed,
            tokens,
            source: None,
            table: self.seq.table(),
            table_tokens,
            sample: samples.then_some(SampleInput {
                spec: &self.sampling,
                prompt: &self.prompt,
                generated: &self.generated,
                awaited: 0,
            }),
        })
    }
}
