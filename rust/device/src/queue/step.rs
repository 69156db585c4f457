//! The gates of one step: what the forward waits for, and what it releases.
//!
//! Owns: per layer the ticket of its copies, per KV layer the ticket behind its readers, and how
//! many jobs of the step are not terminal. One mutex; `changed` wakes whoever passes gates.
//!
//! Invariant: gates open in layer order and stay open; a buffer that was released stays released.

use std::sync::Arc;
use std::time::Duration;

use headrace_core::sync::{Condvar, Mutex};
use headrace_core::{Error, LayerKind, Planes, Result};

use super::edges::Edge;
use super::job::{LoadJob, WindowJob};
use super::{Shared, overdue};
use crate::clock::{Deadline, monotonic_ns};
use crate::device::{Stream, Ticket};

/// Gates of one kind of copy, in the order in which they open.
#[derive(Default)]
struct Gates {
    all_open: bool,
    tickets: Vec<Option<Ticket>>,
}

impl Gates {
    /// `None`: closed; `Some(None)`: open, nothing to wait for.
    #[expect(
        clippy::option_option,
        reason = "two questions: is it open, and behind what"
    )]
    fn at(&self, index: usize) -> Option<Option<&Ticket>> {
        match self.tickets.get(index) {
            Some(ticket) => Some(ticket.as_ref()),
            None => self.all_open.then_some(None),
        }
    }
}

/// Whether the readers of a streamed layer are behind a ticket.
#[derive(Clone)]
pub(super) enum Readers {
    /// They may not have been enqueued yet.
    Open,
    /// They are before this ticket.
    Behind(Ticket),
    /// The compute stream refused to record.
    Lost,
}

/// The layers a window job streams.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub(super) job: u64,
    pub(super) k0: u64,
    pub(super) width: u32,
}

pub(super) struct Step {
    span: Option<Span>,
    load_jobs: Vec<u64>,
    kv_layers: usize,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    loads: Gates,
    window: Gates,
    readers: Vec<Readers>,
    open_jobs: usize,
    failed: Vec<u64>,
    closed: bool,
}

impl Step {
    pub(super) fn new(planes: &Planes, loads: &[LoadJob], window: Option<&WindowJob>) -> Self {
        let open = |all_open| Gates {
            all_open,
            ..Gates::default()
        };
        let kv_layers = planes.kv_shape().layers as usize;
        let streamed = if window.is_some() { kv_layers } else { 0 };
        Self {
            span: window.map(|w| Span {
                job: w.job,
                k0: w.k0,
                width: w.width,
            }),
            load_jobs: loads.iter().map(|load| load.job).collect(),
            kv_layers,
            state: Mutex::new(State {
                loads: open(loads.is_empty()),
                window: open(window.is_none()),
                readers: vec![Readers::Open; streamed],
                open_jobs: loads.len() + usize::from(window.is_some()),
                failed: Vec::new(),
                closed: false,
            }),
            changed: Condvar::default(),
        }
    }

    pub(super) fn span(&self) -> Option<Span> {
        self.span
    }

    pub(super) fn kv_layers(&self) -> u64 {
        self.kv_layers as u64
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.state.lock());
        self.changed.notify_all();
        changed
    }

    /// The copies of the next model layer are submitted, and `ticket` is behind them.
    pub(super) fn open_load(&self, ticket: Option<Ticket>) {
        self.change(|state| state.loads.tickets.push(ticket));
    }

    /// The same for the next streamed layer.
    pub(super) fn open_window(&self, ticket: Option<Ticket>) {
        self.change(|state| state.window.tickets.push(ticket));
    }

    /// No more will be loaded into the window.
    pub(super) fn open_all_windows(&self) {
        self.change(|state| state.window.all_open = true);
    }

    /// A job of the step is terminal and its outcome delivered.
    pub(super) fn job_over(&self, job: u64, failed: bool) {
        self.change(|state| {
            state.open_jobs = state.open_jobs.saturating_sub(1);
            if failed {
                state.failed.push(job);
            }
        });
    }

    /// The queue is shut down: nobody waits here any more.
    pub(super) fn close(&self) {
        self.change(|state| state.closed = true);
    }

    /// Where the readers of the step's streamed layer `index` are.
    pub(super) fn readers(&self, index: usize) -> Readers {
        let state = self.state.lock();
        state.readers.get(index).cloned().unwrap_or(Readers::Lost)
    }

    pub(super) fn release(&self, index: usize, readers: Readers) {
        self.change(|state| {
            if let Some(open @ Readers::Open) = state.readers.get_mut(index) {
                *open = readers;
            }
        });
    }

    /// Waits once for the gates of a layer; the tickets behind it, or `None` if it is closed.
    /// Fails with `Closed`.
    pub(super) fn pass(
        &self,
        model_layer: usize,
        kind: LayerKind,
        slice: Duration,
    ) -> Result<Option<[Option<Ticket>; 2]>> {
        let mut state = self.state.lock();
        for last_try in [false, true] {
            if let Some(tickets) = state.tickets(model_layer, kind)? {
                return Ok(Some(tickets));
            }
            if !last_try && !slice.is_zero() {
                self.changed.wait_for(&mut state, slice);
            }
        }
        Ok(None)
    }

    /// Waits once for the jobs of the step; those that failed, or `None` while some live.
    pub(super) fn over(&self, slice: Duration) -> Option<Vec<u64>> {
        let mut state = self.state.lock();
        if state.open_jobs > 0 && !slice.is_zero() {
            self.changed.wait_for(&mut state, slice);
        }
        (state.open_jobs == 0).then(|| state.failed.clone())
    }

    /// A job to name in an error: the window's if that is what a KV layer waits for.
    fn suspect(&self, model_layer: usize) -> u64 {
        let loads_open = self.state.lock().loads.at(model_layer).is_some();
        let load = self.load_jobs.first().copied();
        let window = self.span.map(|span| span.job);
        let suspect = if loads_open { window.or(load) } else { load };
        suspect.unwrap_or_default()
    }
}

impl State {
    fn tickets(&self, model_layer: usize, kind: LayerKind) -> Result<Option<[Option<Ticket>; 2]>> {
        if self.closed {
            let reason = "the copy queue was shut down".to_owned();
            return Err(Error::Closed { reason });
        }
        let load = self.loads.at(model_layer);
        let window = match kind {
            LayerKind::Kv(layer) => self.window.at(layer as usize),
            LayerKind::State(_) => Some(None),
        };
        let both = load.zip(window);
        Ok(both.map(|(load, window)| [load.cloned(), window.cloned()]))
    }
}

/// One step as the engine thread sees it. Dropping it releases what it holds.
pub struct StepHandle {
    step: Arc<Step>,
    shared: Arc<Shared>,
}

impl StepHandle {
    pub(super) fn new(step: Arc<Step>, shared: Arc<Shared>) -> Self {
        Self { step, shared }
    }

    fn kind(&self, model_layer: usize) -> Result<LayerKind> {
        let layers = self.shared.memory.planes().model_layers();
        layers.get(model_layer).copied().ok_or_else(|| {
            let expected = format!("below {}, the layers of the model", layers.len());
            Error::request("model_layer", model_layer, expected)
        })
    }

    /// How long the engine waits: twice the time a copy may take. The worker ends what is overdue
    /// and opens its gates, so only a worker that does not answer lets a gate time out.
    pub fn patience(&self) -> Duration {
        self.shared.config.deadline.saturating_mul(2)
    }

    /// Blocks until what the layer reads is there, or on a GPU until it is submitted and the
    /// compute stream waits for it. A failed job counts as there.
    ///
    /// Fails with `InvalidRequest` for no layer of the model, `Copy` naming a job at the deadline,
    /// `Closed`.
    pub fn before_layer(&self, model_layer: usize) -> Result<()> {
        let deadline = self.patience();
        let end = Deadline::after(Some(deadline));
        loop {
            let slice = end.slice(deadline);
            if self.before_layer_for(model_layer, slice)? {
                return Ok(());
            }
            if slice.is_zero() {
                return Err(self.overdue(model_layer));
            }
        }
    }

    /// As [`StepHandle::before_layer`], but waits about `slice`; false if that was too short.
    pub fn before_layer_for(&self, model_layer: usize, slice: Duration) -> Result<bool> {
        let kind = self.kind(model_layer)?;
        let start_ns = monotonic_ns();
        let passed = self.pass(model_layer, kind, slice);
        let waited_ns = monotonic_ns() - start_ns;
        let mut stats = self.shared.stats.lock();
        stats.gate_waited(model_layer, waited_ns);
        passed
    }

    fn pass(&self, model_layer: usize, kind: LayerKind, slice: Duration) -> Result<bool> {
        let edges = &self.shared.edges;
        let Some([load, window]) = self.step.pass(model_layer, kind, slice)? else {
            return Ok(!edges.keeps(Edge::GateClosed));
        };
        let load = load.filter(|_| edges.keeps(Edge::LoadReady));
        let window = window.filter(|_| edges.keeps(Edge::WindowReady));
        for ticket in load.into_iter().chain(window) {
            if !self.shared.device.join(&ticket, slice)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// What a wait for `model_layer` that took too long raises.
    pub fn overdue(&self, model_layer: usize) -> Error {
        let job = self.step.suspect(model_layer);
        self.shared.stats.lock().timed_out();
        let what = format!("layer {model_layer} did not arrive");
        overdue(job, &what, self.patience())
    }

    /// The forward has enqueued the last read of the layer: its window buffer may be refilled.
    /// Layers without a window are ignored. Fails with `InvalidRequest` for no layer of the model.
    pub fn after_layer(&self, model_layer: usize) -> Result<()> {
        let kind = self.kind(model_layer)?;
        if let (LayerKind::Kv(layer), Some(_)) = (kind, self.step.span()) {
            let readers = self.record();
            self.step.release(layer as usize, readers);
            self.shared.desk.poke();
        }
        Ok(())
    }

    fn record(&self) -> Readers {
        let ticket = self.shared.device.record(Stream::Compute);
        ticket.map_or(Readers::Lost, Readers::Behind)
    }

    /// Releases every buffer that is not yet. The forward has enqueued all it will.
    pub fn release(&self) {
        if self.step.span().is_none() {
            return;
        }
        let readers = self.record();
        for layer in 0..self.step.kv_layers {
            self.step.release(layer, readers.clone());
        }
        self.shared.desk.poke();
    }

    /// Releases, then waits for the jobs of the step; the ids of those that failed. On a GPU, call
    /// it once the step's tokens are there. Fails with `Copy` naming a job at the deadline.
    pub fn finish(self) -> Result<Vec<u64>> {
        let deadline = self.patience();
        let end = Deadline::after(Some(deadline));
        loop {
            let slice = end.slice(deadline);
            if let Some(failed) = self.finish_for(slice) {
                return Ok(failed);
            }
            if slice.is_zero() {
                return Err(self.overdue(0));
            }
        }
    }

    /// As [`StepHandle::finish`], but waits about `slice`; `None` if that was too short.
    pub fn finish_for(&self, slice: Duration) -> Option<Vec<u64>> {
        self.release();
        self.step.over(slice)
    }
}

impl Drop for StepHandle {
    fn drop(&mut self) {
        self.release();
    }
}
