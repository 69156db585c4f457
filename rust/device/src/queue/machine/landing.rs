//! How copies land: tickets that are over, faults, time-outs, and the end of jobs.

use std::collections::VecDeque;
use std::time::Duration;

use headrace_core::{CopyFailure, CopyOutcome};

use super::{Flight, Job, Key, Machine};
use crate::device::{Fault, Progress, Stream};
use crate::queue::edges::Edge;

impl Machine {
    /// Time until the oldest ticket in flight is overdue; `None` if nothing is in flight.
    pub(in crate::queue) fn next_deadline(&self, now_ns: u64) -> Option<Duration> {
        let fronts = self.flights.iter().filter_map(VecDeque::front);
        let waited = fronts
            .map(|flight| now_ns.saturating_sub(flight.since_ns))
            .max()?;
        Some(
            self.shared
                .config
                .deadline
                .saturating_sub(Duration::from_nanos(waited)),
        )
    }

    /// Delivers what has ended: first the outcome, then those who wait for it.
    pub(in crate::queue) fn deliver(&mut self) {
        for (job, outcome) in std::mem::take(&mut self.outcomes) {
            let mut stats = self.shared.stats.lock();
            stats.job_over(job.stream);
            match &outcome {
                CopyOutcome::Done => {}
                CopyOutcome::Failed(failure) => stats.failed(failure.settled),
                CopyOutcome::Cancelled => stats.cancelled(),
            }
            drop(stats);
            let failed = matches!(outcome, CopyOutcome::Failed(_));
            (self.shared.config.on_done)(job.id, outcome);
            // The id is free before those who wait for the step go on.
            self.shared.desk.finish(job.id);
            if let Some(step) = &job.step {
                step.job_over(job.id, failed);
            }
        }
    }

    /// Looks at the oldest ticket of a stream.
    pub(super) fn poll(&mut self, stream: Stream, now_ns: u64) -> bool {
        let Some(flight) = self.flights[stream.index()].front() else {
            return false;
        };
        let progress = self.progress(flight);
        if progress.is_over() {
            self.land(stream, progress, now_ns);
            return true;
        }
        let waited = Duration::from_nanos(now_ns.saturating_sub(flight.since_ns));
        if waited < self.shared.config.deadline {
            return false;
        }
        self.shared.stats.lock().timed_out();
        self.shared.device.abandon(stream);
        let deadline = self.shared.config.deadline;
        let progress = match self.flights[stream.index()].front() {
            Some(flight) => self.progress(flight),
            None => return true,
        };
        let progress = match progress {
            Progress::Pending | Progress::Lost(_) => {
                Progress::Lost(format!("did not end within {deadline:?}"))
            }
            over => over,
        };
        self.land(stream, progress, now_ns);
        true
    }

    fn progress(&self, flight: &Flight) -> Progress {
        let progress = self.shared.device.query(&flight.ticket);
        progress.unwrap_or_else(|refused| Progress::Lost(refused.to_string()))
    }

    /// The oldest ticket of a stream is over.
    fn land(&mut self, stream: Stream, progress: Progress, now_ns: u64) {
        let flights = &mut self.flights[stream.index()];
        let Some(flight) = flights.pop_front() else {
            return;
        };
        if let Some(next) = flights.front_mut() {
            next.since_ns = next.since_ns.max(now_ns);
        }
        self.shared
            .stats
            .lock()
            .landed(stream, flight.bytes, now_ns);
        for key in &flight.jobs {
            if let Some(job) = self.jobs.get_mut(key) {
                job.in_flight = job.in_flight.saturating_sub(1);
            }
        }
        match progress {
            Progress::Done | Progress::Pending => {}
            Progress::Failed(faults) => {
                for fault in faults.iter() {
                    self.fault(&flight, fault);
                }
            }
            Progress::Lost(text) => self.fail_all(&flight.jobs, &text, flight.layer, false),
        }
        for &key in &flight.jobs {
            self.end_if_over(key);
        }
    }

    fn fault(&mut self, flight: &Flight, fault: &Fault) {
        if !self.shared.edges.keeps(Edge::FailureReported) {
            return;
        }
        let mut keys = flight.jobs.iter().copied();
        let hit = keys.find(|key| self.jobs.get(key).is_some_and(|job| job.id == fault.job));
        let Some(key) = hit else {
            return;
        };
        let planes = self.shared.memory.planes();
        let place = fault
            .at
            .and_then(|(plane, offset)| planes.locate(plane, offset));
        let failure = CopyFailure {
            page: place.map(|(page, _)| page),
            plane: fault.at.map(|(plane, _)| planes.name(plane).to_owned()),
            layer: flight.layer.and_then(|layer| u32::try_from(layer).ok()),
            ..CopyFailure::of(fault.job, fault.text.clone())
        };
        self.fail(key, &failure);
    }

    pub(super) fn fail_all(
        &mut self,
        keys: &[Key],
        text: &str,
        layer: Option<usize>,
        settled: bool,
    ) {
        for &key in keys {
            let Some(job) = self.jobs.get(&key) else {
                continue;
            };
            if let (false, Some(plan)) = (settled, &job.plan) {
                self.lost.add(plan);
            }
            let failure = CopyFailure {
                layer: layer.and_then(|layer| u32::try_from(layer).ok()),
                settled,
                ..CopyFailure::of(job.id, text)
            };
            self.fail(key, &failure);
        }
    }

    /// The first failure of a job stays; that the device may run on is remembered always.
    pub(super) fn fail(&mut self, key: Key, failure: &CopyFailure) {
        let Some(job) = self.jobs.get_mut(&key) else {
            return;
        };
        let first = job.failure.get_or_insert_with(|| failure.clone());
        first.settled &= failure.settled;
        self.end_if_over(key);
    }

    pub(super) fn end_if_over(&mut self, key: Key) {
        let early = !self.shared.edges.keeps(Edge::OutcomeAfterTicket);
        let over = |job: &Job| {
            let submitting = job.submitting && !job.is_ended();
            !submitting && (job.in_flight == 0 || early)
        };
        if !self.jobs.get(&key).is_some_and(over) {
            return;
        }
        if let Some(mut job) = self.jobs.remove(&key) {
            let cancelled = self.shared.desk.end(job.id);
            let outcome = match job.failure.take() {
                _ if cancelled => CopyOutcome::Cancelled,
                Some(failure) => CopyOutcome::Failed(Box::new(failure)),
                None => CopyOutcome::Done,
            };
            self.outcomes.push((job, outcome));
        }
    }

    /// Ends every job: what is in flight is abandoned, what is not submitted fails.
    pub(in crate::queue) fn give_up(&mut self, reason: &str) {
        for stream in Stream::COPY {
            if self.flights[stream.index()].is_empty() {
                continue;
            }
            self.shared.device.abandon(stream);
            while let Some(flight) = self.flights[stream.index()].front() {
                let progress = match self.progress(flight) {
                    Progress::Pending | Progress::Lost(_) => Progress::Lost(reason.to_owned()),
                    over => over,
                };
                self.land(stream, progress, 0);
            }
        }
        let left: Vec<Key> = self.jobs.keys().copied().collect();
        self.fail_all(&left, reason, None, true);
        self.stores.clear();
        for active in std::mem::take(&mut self.steps) {
            active.step.close();
        }
    }
}
