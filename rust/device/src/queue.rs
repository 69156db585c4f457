//! Copy queue: jobs between host and device, executed by one worker thread.
//!
//! The engine thread hands jobs over and passes the gates of a step; the worker plans, submits,
//! polls and reports. Order is enforced by recorded tickets, never by timing:
//!
//! - a layer's gate opens once its copies are submitted and a ticket is recorded behind them; the
//!   forward waits for that ticket;
//! - a window buffer is overwritten only behind the ticket that `after_layer` recorded after its
//!   last reader;
//! - a store starts only behind the ticket given with it.
//!
//! A failed job still opens its gates, and the step runs to its end. Every job has one outcome,
//! delivered once, by the worker, with no lock held.
//!
//! Lock order: desk, step and statistics are each taken alone, also by the device.

mod desk;
mod edges;
mod job;
#[cfg(all(test, loom))]
mod loom_tests;
mod lost;
mod machine;
#[cfg(all(test, not(loom)))]
mod sim_tests;
mod stats;
mod step;
#[cfg(all(test, not(loom)))]
pub(crate) mod tests;
mod worker;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use headrace_core::sync::Mutex;
use headrace_core::{CopyFailure, CopyOutcome, Error, PlanKind, Result};

use crate::clock::{Deadline, monotonic_ns};
use crate::device::{Device, Stream, Sums, Ticket};
use crate::regions::CopyMemory;
use desk::{Command, Desk};
use edges::{Edge, Edges};
use stats::Stats;
use step::Step;

pub use job::{LoadJob, StoreJob, WindowJob};
pub use stats::{QueueStats, StreamStats};
pub use step::StepHandle;

/// Receives the outcome of every job, on the worker thread.
pub type OnDone = Box<dyn Fn(u64, CopyOutcome) + Send + Sync>;

/// Limits of a queue. Checked once, by [`CopyQueue::new`].
pub struct QueueConfig {
    /// Longest time that a copy, or a wait for one, may take.
    pub deadline: Duration,
    /// Jobs that may live at once; more are refused with `CopyQueueFull`.
    pub max_jobs: usize,
    /// Compare checksums of what is stored and later loaded, per piece, plane and layer. For tests:
    /// every byte is read once more.
    pub copy_check: bool,
    /// Called once for every job.
    pub on_done: OnDone,
}

/// What the engine's side and the worker share.
struct Shared {
    device: Arc<dyn Device>,
    memory: Arc<CopyMemory>,
    config: QueueConfig,
    /// Of its own, so that a device that wakes the worker keeps nothing else alive.
    desk: Arc<Desk>,
    stats: Mutex<Stats>,
    sums: Option<Arc<Sums>>,
    edges: Edges,
}

impl Shared {
    fn new(
        device: Arc<dyn Device>,
        memory: Arc<CopyMemory>,
        config: QueueConfig,
        edges: Edges,
    ) -> Result<Arc<Self>> {
        if config.max_jobs == 0 {
            return Err(Error::config("max_jobs", 0, "at least 1"));
        }
        if config.deadline.is_zero() {
            return Err(Error::config("deadline", "0 s", "a time above zero"));
        }
        if config.copy_check && !device.checks_sums() {
            let expected = format!("off, as the {} device compares no checksums", device.name());
            return Err(Error::config("copy_check", "on", expected));
        }
        device.check(&memory)?;
        let layers = memory.planes().model_layers().len();
        Ok(Arc::new(Self {
            device,
            desk: Arc::new(Desk::new(config.max_jobs)),
            stats: Mutex::new(Stats::new(layers)),
            sums: config.copy_check.then(Arc::default),
            memory,
            config,
            edges,
        }))
    }
}

/// Thread-safe; dropping it shuts it down.
pub struct CopyQueue {
    shared: Arc<Shared>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

impl CopyQueue {
    /// Starts the worker. Fails with `Config` for a limit of zero, memory the device
    /// cannot reach, or checksums it does not compare.
    pub fn new(
        device: Arc<dyn Device>,
        memory: Arc<CopyMemory>,
        config: QueueConfig,
    ) -> Result<Self> {
        let shared = Shared::new(device, memory, config, Edges::default())?;
        let worker = worker::start(&shared)?;
        Ok(Self {
            shared,
            worker: Mutex::new(Some(worker)),
        })
    }

    /// A queue whose worker is advanced by the test.
    #[cfg(test)]
    fn without_worker(
        device: Arc<dyn Device>,
        memory: Arc<CopyMemory>,
        config: QueueConfig,
        edges: Edges,
    ) -> Result<(Self, machine::Machine)> {
        let shared = Shared::new(device, memory, config, edges)?;
        let machine = machine::Machine::new(shared.clone());
        let worker = Mutex::new(None);
        Ok((Self { shared, worker }, machine))
    }

    /// Hands over the loads of one step and returns its gates. Planning is left to the worker; only
    /// pages, slots and overlaps are checked here.
    ///
    /// Fails with `InvalidRequest` (a page, slot or width that is none, destinations that overlap, a
    /// job without pieces, an id that lives, a `k0` that goes back), `CopyQueueFull` or `Closed`;
    /// nothing is taken then.
    pub fn start_step(&self, loads: Vec<LoadJob>, window: Option<WindowJob>) -> Result<StepHandle> {
        let start_ns = monotonic_ns();
        let planes = self.shared.memory.planes();
        job::check_loads(planes, &loads)?;
        if let Some(window) = &window {
            job::check_window(planes, window)?;
        }
        let step = Arc::new(Step::new(planes, &loads, window.as_ref()));
        self.shared.desk.submit(Command::Step {
            step: step.clone(),
            loads,
            window,
        })?;
        self.shared
            .stats
            .lock()
            .handed_over(monotonic_ns() - start_ns);
        Ok(StepHandle::new(step, self.shared.clone()))
    }

    /// Queues a copy to the host that starts only behind `after`, which must be recorded after the
    /// last kernel that writes its pages. Errors as [`CopyQueue::start_step`].
    pub fn submit_store(&self, store: StoreJob, after: Ticket) -> Result<()> {
        let planes = self.shared.memory.planes();
        job::check_pieces(planes, PlanKind::Store, &store.kv, &store.state)?;
        // A foreign ticket is refused here and not on the worker.
        self.shared.device.query(&after)?;
        self.shared.desk.submit(Command::Store { store, after })
    }

    /// A ticket behind everything the forward has enqueued.
    pub fn record_compute(&self) -> Result<Ticket> {
        self.shared.device.record(Stream::Compute)
    }

    /// Ends a job that is not submitted to the device yet with `Cancelled`. False: it does not
    /// live, or it is too late, and it ends as it ends.
    pub fn cancel(&self, job: u64) -> bool {
        let late = !self.shared.edges.keeps(Edge::CancelBeforeSubmit);
        self.shared.desk.cancel(job, late)
    }

    /// Waits, at most `slice`, for every job to be terminal; else the id of one that is not.
    pub fn drain_for(&self, slice: Duration) -> Option<u64> {
        self.shared.desk.drain_for(slice)
    }

    /// Waits for every job to be terminal. Fails with `Copy`, naming one that is not, at the
    /// deadline.
    pub fn drain(&self, deadline: Duration) -> Result<()> {
        let end = Deadline::after(Some(deadline));
        loop {
            let slice = end.slice(deadline);
            let Some(job) = self.drain_for(slice) else {
                return Ok(());
            };
            if slice.is_zero() {
                return Err(overdue(job, "not terminal", deadline));
            }
        }
    }

    /// Takes no more jobs.
    pub fn close(&self) {
        self.shared.desk.close();
    }

    /// Takes no more jobs, lets those that live end within the deadline of the queue, gives up on
    /// the others, and ends the worker. Idempotent.
    pub fn shutdown(&self) {
        self.shutdown_within(self.shared.config.deadline);
    }

    /// As [`CopyQueue::shutdown`] with another deadline.
    pub fn shutdown_within(&self, deadline: Duration) {
        self.close();
        // Those that are left are failed by the worker, each with its reason.
        let _ = self.drain(deadline);
        self.shared.desk.stop();
        let worker = self.worker.lock().take();
        if let Some(worker) = worker
            && worker.thread().id() != std::thread::current().id()
        {
            // A worker that panicked (in `on_done`) has nothing left to report.
            let _ = worker.join();
        }
    }

    /// Running number that the first layer of the next window may have at least.
    pub fn next_k(&self) -> u64 {
        self.shared.desk.next_k()
    }

    /// Longest time that a copy, or a wait for one, may take.
    pub fn deadline(&self) -> Duration {
        self.shared.config.deadline
    }

    /// The planes it copies.
    pub fn memory(&self) -> &Arc<CopyMemory> {
        &self.shared.memory
    }

    /// The device it copies with.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.shared.device
    }

    /// Counts so far.
    pub fn stats(&self) -> QueueStats {
        let live = self.shared.desk.live();
        self.shared.stats.lock().snapshot(live)
    }
}

impl Drop for CopyQueue {
    fn drop(&mut self) {
        self.shutdown();
    }
}

fn overdue(job: u64, what: &str, deadline: Duration) -> Error {
    let text = format!("{what} within {deadline:?}");
    Error::Copy(Box::new(CopyFailure {
        settled: false,
        ..CopyFailure::of(job, text)
    }))
}
