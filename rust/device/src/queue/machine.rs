//! What the worker does, one action at a time and without waiting: plan, submit, poll, end jobs.
//!
//! Owns: the steps and stores that are not wholly submitted, the tickets in flight, and what is
//! known of every job. No locks of its own; it is called by one thread.
//!
//! Invariants: a job is in `jobs` until its outcome is in `outcomes`; it is terminal only when
//! nothing of it is in flight and nothing of it will be submitted; window loads are submitted in
//! the order of their running index.

mod landing;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use headrace_core::{CopyFailure, CopyOutcome, CopyPlan, KvPiece, LayerKind, PlanKind, StatePiece};

use super::Shared;
use super::desk::Command;
use super::edges::Edge;
use super::job::{LoadJob, StoreJob, WindowJob};
use super::lost::Lost;
use super::step::{Readers, Span, Step};
use crate::device::{LayerCopy, Stream, Ticket};

/// Names a job beyond its life: ids may be used again.
type Key = u64;

/// A job that is not terminal.
struct Job {
    id: u64,
    stream: Stream,
    step: Option<Arc<Step>>,
    plan: Option<Arc<CopyPlan>>,
    /// More layers are to be submitted.
    submitting: bool,
    submitted: bool,
    cancelled: bool,
    in_flight: u32,
    failure: Option<CopyFailure>,
}

impl Job {
    fn is_ended(&self) -> bool {
        self.cancelled || self.failure.is_some()
    }
}

/// A step with loads that are not all submitted.
struct ActiveStep {
    step: Arc<Step>,
    loads: Vec<Key>,
    next_load: usize,
    window: Option<Key>,
    next_window: u32,
}

/// A ticket that is not over, and whose copies are behind it.
struct Flight {
    ticket: Ticket,
    jobs: Vec<Key>,
    bytes: u64,
    layer: Option<usize>,
    /// When it was submitted, or the flight before it ended.
    since_ns: u64,
}

pub(super) struct Machine {
    shared: Arc<Shared>,
    jobs: BTreeMap<Key, Job>,
    next_key: Key,
    steps: VecDeque<ActiveStep>,
    stores: VecDeque<(Key, Ticket)>,
    flights: [VecDeque<Flight>; 4],
    lost: Lost,
    /// The newest step whose window is wholly submitted.
    last_window: Option<Arc<Step>>,
    outcomes: Vec<(Job, CopyOutcome)>,
}

impl Machine {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            jobs: BTreeMap::new(),
            next_key: 0,
            steps: VecDeque::new(),
            stores: VecDeque::new(),
            flights: Default::default(),
            lost: Lost::default(),
            last_window: None,
            outcomes: Vec::new(),
        }
    }

    /// Plans the jobs of a command.
    pub(super) fn accept(&mut self, command: Command) {
        match command {
            Command::Step {
                step,
                loads,
                window,
            } => self.accept_step(step, loads, window),
            Command::Store { store, after } => {
                let StoreJob { job, kv, state } = store;
                let key = self.plan(job, Stream::Store, None, PlanKind::Store, kv, state);
                self.stores.push_back((key, after));
            }
        }
    }

    fn accept_step(&mut self, step: Arc<Step>, loads: Vec<LoadJob>, window: Option<WindowJob>) {
        let loads: Vec<Key> = loads
            .into_iter()
            .map(|LoadJob { job, kv, state }| {
                let step = Some(step.clone());
                self.plan(job, Stream::Load, step, PlanKind::Load, kv, state)
            })
            .collect();
        let window = window.map(|window| {
            let width = window.width;
            let (step, kind) = (Some(step.clone()), PlanKind::Window { width });
            let none = Vec::new();
            self.plan(window.job, Stream::Window, step, kind, window.pieces, none)
        });
        self.steps.push_back(ActiveStep {
            step,
            loads,
            next_load: 0,
            window,
            next_window: 0,
        });
    }

    fn plan(
        &mut self,
        id: u64,
        stream: Stream,
        step: Option<Arc<Step>>,
        kind: PlanKind,
        kv: Vec<KvPiece>,
        state: Vec<StatePiece>,
    ) -> Key {
        let key = self.next_key;
        self.next_key += 1;
        let mut job = Job {
            id,
            stream,
            step,
            plan: None,
            submitting: true,
            submitted: false,
            cancelled: !self.shared.desk.claim(id),
            in_flight: 0,
            failure: None,
        };
        if !job.cancelled {
            let plan = self
                .shared
                .memory
                .planes()
                .plan(kind, kv.into(), state.into());
            match plan {
                Ok(plan) => job.plan = Some(Arc::new(plan)),
                Err(refused) => job.failure = Some(CopyFailure::of(id, refused.to_string())),
            }
        }
        self.jobs.insert(key, job);
        self.end_if_over(key);
        key
    }

    /// Does one thing; false if there is nothing to do now.
    pub(super) fn advance(&mut self, now_ns: u64) -> bool {
        Stream::COPY.into_iter().any(|s| self.poll(s, now_ns))
            || self.submit_window(now_ns)
            || self.submit_load(now_ns)
            || self.submit_store(now_ns)
    }

    /// Jobs that ended without success and are not delivered yet.
    #[cfg(all(test, not(loom)))]
    pub(super) fn failed(&self) -> impl Iterator<Item = u64> + '_ {
        let failed = self
            .outcomes
            .iter()
            .filter(|(_, o)| *o != CopyOutcome::Done);
        failed.map(|(job, _)| job.id)
    }

    // Submission.

    /// The next layer of the first step with loads to submit.
    fn submit_load(&mut self, now_ns: u64) -> bool {
        let shared = self.shared.clone();
        let layers = shared.memory.planes().model_layers();
        let pending = |s: &ActiveStep| !s.loads.is_empty() && s.next_load < layers.len();
        let Some(index) = self.steps.iter().position(pending) else {
            return false;
        };
        let active = &mut self.steps[index];
        let (step, loads, layer) = (active.step.clone(), active.loads.clone(), active.next_load);
        active.next_load += 1;
        let ticket = self.submit_layer(Stream::Load, &loads, layer, layers[layer], 0, now_ns);
        step.open_load(ticket);
        if layer + 1 == layers.len() {
            for key in loads {
                self.wholly_submitted(key);
            }
            self.forget_steps();
        }
        true
    }

    /// The next streamed layer, if its buffer is released.
    fn submit_window(&mut self, now_ns: u64) -> bool {
        let Some(index) = self.steps.iter().position(|s| s.window.is_some()) else {
            return false;
        };
        let active = &self.steps[index];
        let (step, layer) = (active.step.clone(), active.next_window);
        let (Some(key), Some(span)) = (active.window, step.span()) else {
            return false;
        };
        let ended = self.notice_cancel(key);
        if ended {
            self.end_window(index, key);
            return true;
        }
        let edges = self.shared.edges;
        match self.readers_before(&step, span, layer) {
            Some(Readers::Open) if edges.keeps(Edge::ConsumedRecorded) => return false,
            Some(Readers::Behind(ticket)) if edges.keeps(Edge::ConsumedWait) => {
                if let Err(refused) = self.shared.device.wait(Stream::Window, &ticket) {
                    self.fail(key, &CopyFailure::of(span.job, refused.to_string()));
                    return true;
                }
            }
            Some(Readers::Lost) => {
                let text = "the compute stream lost the readers of its buffers";
                self.fail(key, &CopyFailure::of(span.job, text));
                return true;
            }
            _ => {}
        }
        let k = span.k0 + u64::from(layer);
        let model_layer = self.model_layer(layer);
        let kind = LayerKind::Kv(layer);
        let ticket = self.submit_layer(Stream::Window, &[key], model_layer, kind, k, now_ns);
        self.steps[index].next_window += 1;
        step.open_window(ticket);
        if u64::from(layer) + 1 == step.kv_layers() {
            self.end_window(index, key);
        }
        true
    }

    /// Who must be done with the buffer of streamed layer `layer`; `None` if nobody used it.
    fn readers_before(&self, step: &Step, span: Span, layer: u32) -> Option<Readers> {
        if let Some(before) = layer.checked_sub(span.width) {
            return Some(step.readers(before as usize));
        }
        let last = self.last_window.as_ref()?;
        if !self.shared.edges.keeps(Edge::ConsumedAcross) {
            return None;
        }
        let (last_span, newest) = (last.span()?, last.kv_layers() - 1);
        let before = (span.k0 + u64::from(layer)).saturating_sub(u64::from(span.width));
        let index = before.saturating_sub(last_span.k0).min(newest);
        // Windows of another width share no buffer numbers: behind all of them then.
        let same_width = last_span.width == span.width;
        let index = if same_width { index } else { newest };
        Some(last.readers(usize::try_from(index).unwrap_or(usize::MAX)))
    }

    /// No more of a window will be submitted.
    fn end_window(&mut self, index: usize, key: Key) {
        let active = &mut self.steps[index];
        active.window = None;
        let step = active.step.clone();
        let failed = self.jobs.get(&key).is_none_or(Job::is_ended);
        if !failed || self.shared.edges.keeps(Edge::FailureOpensGates) {
            step.open_all_windows();
        }
        self.last_window = Some(step);
        self.wholly_submitted(key);
        self.forget_steps();
    }

    fn submit_store(&mut self, now_ns: u64) -> bool {
        let Some((key, after)) = self.stores.pop_front() else {
            return false;
        };
        if self.notice_cancel(key) {
            return true;
        }
        if self.shared.edges.keeps(Edge::StoreAfter)
            && let Err(refused) = self.shared.device.wait(Stream::Store, &after)
        {
            let id = self.jobs[&key].id;
            self.fail(key, &CopyFailure::of(id, refused.to_string()));
            return true;
        }
        let shared = self.shared.clone();
        let mut bytes = 0;
        // Held open until the ticket is recorded: a layer that is refused does not end the job
        // while those before it run.
        self.hold(key, true);
        for (layer, &kind) in shared.memory.planes().model_layers().iter().enumerate() {
            bytes += self.submit_copy(Stream::Store, key, layer, kind, 0);
        }
        self.take_off(Stream::Store, vec![key], bytes, None, now_ns);
        self.hold(key, false);
        self.wholly_submitted(key);
        true
    }

    fn hold(&mut self, key: Key, open: bool) {
        if let Some(job) = self.jobs.get_mut(&key) {
            let held = if open { 1 } else { -1 };
            job.in_flight = job.in_flight.saturating_add_signed(held);
        }
    }

    fn forget_steps(&mut self) {
        let layers = self.shared.memory.planes().model_layers().len();
        self.steps.retain(|active| {
            let loading = !active.loads.is_empty() && active.next_load < layers;
            loading || active.window.is_some()
        });
    }

    fn model_layer(&self, kv_layer: u32) -> usize {
        let mut layers = self.shared.memory.planes().model_layers().iter();
        let found = layers.position(|&kind| kind == LayerKind::Kv(kv_layer));
        found.unwrap_or_default()
    }

    /// One layer of several jobs and the ticket behind it, if there was anything to copy.
    fn submit_layer(
        &mut self,
        stream: Stream,
        keys: &[Key],
        model_layer: usize,
        kind: LayerKind,
        k: u64,
        now_ns: u64,
    ) -> Option<Ticket> {
        let mut bytes = 0;
        let mut jobs = Vec::new();
        for &key in keys {
            let copied = self.submit_copy(stream, key, model_layer, kind, k);
            bytes += copied;
            if copied > 0 {
                jobs.push(key);
            }
        }
        self.take_off(stream, jobs, bytes, Some(model_layer), now_ns)
    }

    /// Enqueues one layer of a job that still goes on; the bytes enqueued.
    fn submit_copy(
        &mut self,
        stream: Stream,
        key: Key,
        model_layer: usize,
        kind: LayerKind,
        k: u64,
    ) -> u64 {
        if self.notice_cancel(key) {
            return 0;
        }
        let Some(job) = self.jobs.get_mut(&key) else {
            return 0;
        };
        let Some(plan) = job.plan.clone() else {
            return 0;
        };
        let (bytes, runs) = (plan.layer_bytes(kind), plan.layer_runs(kind));
        if bytes == 0 {
            return 0;
        }
        let lost = self.shared.edges.keeps(Edge::LostPages) && self.lost.blocks(&plan);
        if !job.submitted && lost {
            let text = "names a page that a copy which never ended may still touch";
            let failure = CopyFailure::of(job.id, text);
            self.fail(key, &failure);
            return 0;
        }
        if !job.submitted {
            if !self.shared.desk.submitted(job.id) {
                job.cancelled = true;
                self.end_if_over(key);
                return 0;
            }
            job.submitted = true;
        }
        let id = job.id;
        let pieces = plan.layer_pieces(kind);
        let how = self.shared.device.thresholds().choose(bytes, runs);
        let batch = LayerCopy {
            job: id,
            memory: self.shared.memory.clone(),
            plan,
            layer: kind,
            k,
            sums: self.shared.sums.clone(),
        };
        match self.shared.device.copy(stream, how, batch) {
            Ok(()) => {
                let mut stats = self.shared.stats.lock();
                stats.copied(stream, how as usize, pieces, runs);
                bytes
            }
            Err(refused) => {
                if self.shared.edges.keeps(Edge::RefusalReported) {
                    let failure = CopyFailure {
                        layer: u32::try_from(model_layer).ok(),
                        ..CopyFailure::of(id, refused.to_string())
                    };
                    self.fail(key, &failure);
                }
                0
            }
        }
    }

    /// Records behind what was enqueued for `jobs`.
    fn take_off(
        &mut self,
        stream: Stream,
        jobs: Vec<Key>,
        bytes: u64,
        layer: Option<usize>,
        now_ns: u64,
    ) -> Option<Ticket> {
        if bytes == 0 {
            return None;
        }
        let ticket = match self.shared.device.record(stream) {
            Ok(ticket) => ticket,
            Err(refused) => {
                // What was enqueued cannot be followed any more.
                self.shared.device.abandon(stream);
                self.fail_all(&jobs, &refused.to_string(), layer, false);
                return None;
            }
        };
        for key in &jobs {
            if let Some(job) = self.jobs.get_mut(key) {
                job.in_flight += 1;
            }
        }
        self.shared.stats.lock().took_off(stream, now_ns);
        self.flights[stream.index()].push_back(Flight {
            ticket: ticket.clone(),
            jobs,
            bytes,
            layer,
            since_ns: now_ns,
        });
        Some(ticket)
    }

    /// Whether a job goes no further; a cancel that came in time is seen here.
    fn notice_cancel(&mut self, key: Key) -> bool {
        let Some(job) = self.jobs.get_mut(&key) else {
            return true;
        };
        if self.shared.desk.is_cancelled(job.id) {
            job.cancelled = true;
            self.end_if_over(key);
            return true;
        }
        job.is_ended()
    }

    fn wholly_submitted(&mut self, key: Key) {
        if let Some(job) = self.jobs.get_mut(&key) {
            job.submitting = false;
        }
        self.end_if_over(key);
    }
}
