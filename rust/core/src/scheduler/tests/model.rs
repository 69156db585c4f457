//! The scheduler as its documentation tells it: lists, linear scans, no indices.

use std::collections::VecDeque;

use super::*;

#[derive(Clone, Debug)]
struct Live {
    id: RequestId,
    arrival: usize,
    spec: RequestSpec,
    generated: Vec<u32>,
    /// Tokens in the slot.
    computed: usize,
    slot: Option<usize>,
    stamps: Stamps,
}

#[derive(Clone, Debug)]
struct PlannedRow {
    arrival: usize,
    tokens: usize,
    samples: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Slot {
    Free,
    Used,
    /// Given back while the steps up to this one may still touch it.
    Fenced(u64),
}

#[derive(Clone, Debug)]
pub(super) struct Model {
    pub(super) config: SchedulerConfig,
    slots: Vec<Slot>,
    /// In order of arrival.
    live: Vec<Live>,
    /// With their numbers, oldest first.
    in_flight: VecDeque<(u64, Vec<PlannedRow>)>,
    /// Number of the latest step.
    pub(super) epoch: u64,
    /// Oldest first.
    results: Vec<RequestResult>,
    next_auto_id: u64,
    closed: Option<String>,
    pub(super) stats: SchedulerStats,
    /// Time of the latest operation.
    pub(super) now: u64,
}

impl Model {
    pub(super) fn new(config: SchedulerConfig, slots: usize) -> Self {
        Self {
            config,
            slots: vec![Slot::Free; slots],
            live: Vec::new(),
            in_flight: VecDeque::new(),
            epoch: 0,
            results: Vec::new(),
            next_auto_id: 0,
            closed: None,
            stats: SchedulerStats::default(),
            now: 0,
        }
    }

    /// `flaw` is the error that a look at the spec alone gives.
    pub(super) fn submit(
        &mut self,
        mut spec: RequestSpec,
        flaw: Option<Error>,
    ) -> Result<RequestId> {
        flaw.map_or(Ok(()), Err)?;
        self.check_open()?;
        if let Some(id) = spec.id
            && self.is_live(id)
        {
            return Err(Error::DuplicateRequest { id });
        }
        let (waiting, max_waiting) = (self.waiting(), self.config.max_waiting);
        if waiting >= max_waiting {
            return Err(Error::QueueFull {
                waiting,
                max_waiting,
            });
        }
        while spec.id.is_none() {
            let id = RequestId(self.next_auto_id);
            self.next_auto_id += 1;
            if !self.is_live(id) && self.results.iter().all(|result| result.id != id) {
                spec.id = Some(id);
            }
        }
        let id = spec.id.unwrap();
        self.results.retain(|result| result.id != id);
        let arrival = usize::try_from(self.stats.submitted).unwrap();
        self.stats.submitted += 1;
        self.live.push(Live {
            id,
            arrival,
            spec,
            generated: Vec::new(),
            computed: 0,
            slot: None,
            stamps: Stamps {
                submitted_ns: self.now,
                ..Stamps::default()
            },
        });
        Ok(id)
    }

    pub(super) fn plan(&mut self) -> Result<Option<Vec<Row>>> {
        self.check_open()?;
        if !self.in_flight.is_empty() {
            return Ok(None);
        }
        let mut order: Vec<usize> = (0..self.live.len()).collect();
        if self.config.policy == Policy::Priority {
            order.sort_by_key(|&at| self.live[at].spec.class); // stable: arrival decides in a class
        }
        let (decoding, rest): (Vec<usize>, Vec<usize>) =
            order.into_iter().partition(|&at| self.live[at].decodes());
        let mut planned: Vec<(usize, usize)> = decoding.into_iter().map(|at| (at, 1)).collect();
        let mut budget = self.config.max_batch_tokens;
        let mut slots_left = true;
        for at in rest {
            let request = &mut self.live[at];
            if request.slot.is_none() && !slots_left {
                continue;
            }
            let end = request.spec.prompt.len().min(request.computed + budget);
            let whole = end == request.spec.prompt.len();
            let end = if whole { end } else { end / 64 * 64 };
            if budget == 0 || end <= request.computed {
                break;
            }
            if request.slot.is_none() {
                let free = self.slots.iter().position(|&slot| slot == Slot::Free);
                let Some(free) = free else {
                    slots_left = false;
                    continue;
                };
                self.slots[free] = Slot::Used;
                request.slot = Some(free);
                request.stamps.first_planned_ns = Some(self.now);
            }
            planned.push((at, end - request.computed));
            budget -= end - request.computed;
        }
        if planned.is_empty() {
            return Ok(None);
        }
        self.epoch += 1;
        self.stats.steps += 1;
        let running = self.live.iter().filter(|request| request.slot.is_some());
        self.stats.deferred_rows += (running.count() - planned.len()) as u64;
        let rows: Vec<Row> = planned
            .iter()
            .map(|&(at, n)| self.live[at].row(n))
            .collect();
        let in_flight = planned.iter().zip(&rows).map(|(&(at, tokens), row)| {
            let samples = row.sample.is_some();
            PlannedRow {
                arrival: self.live[at].arrival,
                tokens,
                samples,
            }
        });
        self.in_flight.push_back((self.epoch, in_flight.collect()));
        Ok(Some(rows))
    }

    pub(super) fn plan_ahead(&mut self, epoch: Epoch) -> Result<Option<Vec<Row>>> {
        let alone = self.in_flight.len() == 1;
        self.check_epoch(epoch)?;
        if !alone {
            return Err(Error::StalePlan { epoch });
        }
        let before = &self.in_flight[0].1;
        let running: Vec<&Live> = self.live.iter().filter(|r| r.slot.is_some()).collect();
        let in_step = |live: &&Live| before.iter().any(|row| row.arrival == live.arrival);
        let steady = before.iter().all(|row| row.samples)
            && running.iter().all(|live| live.decodes())
            && running.iter().all(in_step);
        let (mut rows, mut planned) = (Vec::new(), Vec::new());
        for (source, row) in before.iter().enumerate() {
            let Some(live) = running.iter().find(|live| live.arrival == row.arrival) else {
                continue;
            };
            if live.generated.len() + 1 == self.most(live) {
                continue;
            }
            rows.push(Row {
                id: live.id.0,
                slot: u32::try_from(live.slot.unwrap()).unwrap(),
                start: live.computed + 1,
                tokens: vec![0],
                sample: Some(live.generated.len() + 1),
                decode: true,
                source: Some(source),
            });
            planned.push(row.clone());
        }
        let slot_comes = self.slots.iter().any(|&slot| slot != Slot::Used);
        let somebody_starts = self.waiting() > 0 && (slot_comes || rows.len() < running.len());
        if !steady || somebody_starts || rows.is_empty() {
            return Ok(None);
        }
        self.epoch += 1;
        self.stats.steps += 1;
        self.in_flight.push_back((self.epoch, planned));
        Ok(Some(rows))
    }

    /// Tokens a request can generate.
    fn most(&self, live: &Live) -> usize {
        let context_left = self.config.max_context - live.spec.prompt.len();
        context_left.min(live.spec.sampling.max_tokens as usize)
    }

    /// Number of the step to end next, the latest if none is in flight.
    pub(super) fn oldest(&self) -> Epoch {
        Epoch(self.in_flight.front().map_or(self.epoch, |step| step.0))
    }

    /// Rows to sample in the oldest step in flight.
    pub(super) fn samples(&self) -> usize {
        let rows = self.in_flight.iter().take(1).flat_map(|step| &step.1);
        rows.filter(|row| row.samples).count()
    }

    pub(super) fn commit(
        &mut self,
        epoch: Epoch,
        tokens: &[i32],
        stops: &[bool],
    ) -> Result<CommitReport> {
        self.check_epoch(epoch)?;
        for (field, len) in [("tokens", Some(tokens.len())), ("stops", nonzero(stops))] {
            if len.is_some_and(|len| len != self.samples()) {
                return Err(invalid(field));
            }
        }
        let mut report = CommitReport::default();
        let mut sample = 0;
        for row in self.retire() {
            let found = self
                .live
                .iter()
                .position(|live| live.arrival == row.arrival);
            if let Some(at) = found {
                if !self.live[at].decodes() {
                    self.stats.prompt_tokens += row.tokens as u64;
                }
                self.live[at].computed += row.tokens;
            }
            if !row.samples {
                continue;
            }
            let (token, stop) = (tokens[sample], stops.get(sample) == Some(&true));
            sample += 1;
            let good = (0..i64::from(self.config.vocab_size)).contains(&i64::from(token));
            report.accepted.push(found.is_some() && good);
            let Some(at) = found else { continue };
            let ended = if good {
                self.append(at, token.unsigned_abs(), stop)
            } else {
                let message = format!("sampled token {token}: the logits were not finite");
                Some((FinishReason::Error, Some(message)))
            };
            if let Some((reason, message)) = ended {
                report.finished.push((self.live[at].id, reason));
                self.end(at, reason, message);
            }
        }
        Ok(report)
    }

    fn append(
        &mut self,
        at: usize,
        token: u32,
        stop: bool,
    ) -> Option<(FinishReason, Option<String>)> {
        let most = self.most(&self.live[at]);
        let request = &mut self.live[at];
        let sampling = &request.spec.sampling;
        let may_stop = request.generated.len() >= sampling.min_tokens as usize;
        request.generated.push(token);
        request.stamps.first_token_ns.get_or_insert(self.now);
        self.stats.generated_tokens += 1;
        let generated = request.generated.len();
        if stop || (may_stop && sampling.stop_token_ids.contains(&token)) {
            Some((FinishReason::Stop, None))
        } else if generated == most {
            Some((FinishReason::Length, None))
        } else {
            None
        }
    }

    pub(super) fn fail(&mut self, epoch: Epoch, message: &str) -> Result<Vec<RequestId>> {
        self.check_epoch(epoch)?;
        let mut failed = Vec::new();
        for row in self.retire() {
            let found = self
                .live
                .iter()
                .position(|live| live.arrival == row.arrival);
            if let Some(at) = found {
                failed.push(self.live[at].id);
                self.end(at, FinishReason::Error, Some(message.to_owned()));
            }
        }
        Ok(failed)
    }

    pub(super) fn abort(&mut self, id: RequestId) -> bool {
        let found = self.live.iter().position(|live| live.id == id);
        if let Some(at) = found {
            self.end(at, FinishReason::Abort, None);
        }
        found.is_some()
    }

    pub(super) fn close(&mut self, reason: &str, finish: FinishReason) {
        if self.closed.is_some() {
            return;
        }
        self.closed = Some(reason.to_owned());
        let running: Vec<Live> = self
            .live
            .iter()
            .filter(|r| r.slot.is_some())
            .cloned()
            .collect();
        let waiting: Vec<Live> = self
            .live
            .iter()
            .filter(|r| r.slot.is_none())
            .cloned()
            .collect();
        for mut group in [waiting, running] {
            if self.config.policy == Policy::Priority {
                group.sort_by_key(|request| request.spec.class);
            }
            for request in group {
                let at = self.live.iter().position(|r| r.arrival == request.arrival);
                self.end(at.unwrap(), finish, Some(reason.to_owned()));
            }
        }
    }

    pub(super) fn take(&mut self, id: RequestId) -> Result<RequestResult> {
        let found = self.results.iter().position(|result| result.id == id);
        let at = found.ok_or(Error::UnknownRequest { id })?;
        Ok(self.results.remove(at))
    }

    pub(super) fn status(&self, id: RequestId) -> Result<RequestStatus> {
        if let Some(result) = self.results.iter().find(|result| result.id == id) {
            return Ok(RequestStatus::Finished(Arc::new(result.clone())));
        }
        let found = self.live.iter().find(|live| live.id == id);
        let request = found.ok_or(Error::UnknownRequest { id })?;
        Ok(RequestStatus::Live {
            phase: match request.slot {
                None => Phase::Waiting,
                Some(_) if request.decodes() => Phase::Decoding,
                Some(_) => Phase::Prefilling,
            },
            computed: request.computed,
            tokens: request.generated.clone(),
        })
    }

    pub(super) fn stats(&self) -> SchedulerStats {
        SchedulerStats {
            waiting: self.waiting(),
            running: self.live.len() - self.waiting(),
            results: self.results.len(),
            ..self.stats
        }
    }

    /// Free, in use, finishing.
    pub(super) fn slot_counts(&self) -> [usize; 3] {
        let count = |is: fn(&Slot) -> bool| self.slots.iter().filter(|slot| is(slot)).count();
        [
            count(|slot| *slot == Slot::Free),
            count(|slot| *slot == Slot::Used),
            count(|slot| matches!(slot, Slot::Fenced(_))),
        ]
    }

    fn end(&mut self, at: usize, reason: FinishReason, message: Option<String>) {
        let request = self.live.remove(at);
        if let Some(slot) = request.slot {
            let newest = self.in_flight.back();
            self.slots[slot] = newest.map_or(Slot::Free, |step| Slot::Fenced(step.0));
        }
        match reason {
            FinishReason::Stop => self.stats.finished_stop += 1,
            FinishReason::Length => self.stats.finished_length += 1,
            FinishReason::Abort => self.stats.finished_abort += 1,
            FinishReason::Error => self.stats.finished_error += 1,
        }
        if self.results.len() == self.config.max_results {
            self.results.remove(0);
            self.stats.results_dropped += 1;
        }
        self.results.push(RequestResult {
            id: request.id,
            tokens: request.generated,
            reason,
            message,
            prompt_len: request.spec.prompt.len(),
            computed_prompt_tokens: request.computed.min(request.spec.prompt.len()),
            cached: crate::memory::Hit::default(),
            recomputed_tokens: 0,
            preemptions: 0,
            stamps: Stamps {
                finished_ns: Some(self.now),
                ..request.stamps
            },
        });
    }

    fn retire(&mut self) -> Vec<PlannedRow> {
        let (epoch, rows) = self.in_flight.pop_front().unwrap();
        for slot in &mut self.slots {
            if *slot == Slot::Fenced(epoch) {
                *slot = Slot::Free;
            }
        }
        rows
    }

    fn check_epoch(&self, epoch: Epoch) -> Result<()> {
        if self.in_flight.front().is_some_and(|step| epoch.0 == step.0) {
            return Ok(());
        }
        Err(Error::StalePlan { epoch })
    }

    fn check_open(&self) -> Result<()> {
        let reason = self.closed.clone();
        reason.map_or(Ok(()), |reason| Err(Error::Closed { reason }))
    }

    fn is_live(&self, id: RequestId) -> bool {
        self.live.iter().any(|live| live.id == id)
    }

    fn waiting(&self) -> usize {
        let waiting = self.live.iter().filter(|live| live.slot.is_none());
        waiting.count()
    }
}

impl Live {
    fn decodes(&self) -> bool {
        self.computed >= self.spec.prompt.len()
    }

    fn row(&self, tokens: usize) -> Row {
        let text: Vec<u32> = [&*self.spec.prompt, &self.generated].concat();
        let end = self.computed + tokens;
        Row {
            id: self.id.0,
            slot: u32::try_from(self.slot.unwrap()).unwrap(),
            start: self.computed,
            tokens: text[self.computed..end].to_vec(),
            sample: (end == text.len()).then_some(self.generated.len()),
            decode: self.decodes(),
            source: None,
        }
    }
}

/// Which field, but not in which words.
pub(super) fn invalid(field: &'static str) -> Error {
    Error::InvalidRequest {
        field,
        value: String::new(),
        expected: String::new(),
    }
}

fn nonzero(stops: &[bool]) -> Option<usize> {
    Some(stops.len()).filter(|&len| len > 0)
}
