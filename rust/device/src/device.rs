//! What a copy device can do: four streams, copies, recorded tickets, flags.
//!
//! A stream runs what was enqueued in order; between streams only tickets and words order. Waiting
//! on an event nobody has recorded is a silent no-op on CUDA, so [`Device::wait`] takes a
//! [`Ticket`], which only [`Device::record`] returns: such a wait cannot be written down.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use headrace_core::sync::Mutex;
use headrace_core::{CopyPlan, Error, LayerKind, Mechanism, Result, Run, Thresholds};

use crate::regions::{CopyMemory, Region};

/// The queues of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stream {
    /// Where the forward runs. On the CPU that is the calling thread.
    Compute,
    /// Load-backs, host to device.
    Load,
    /// Window loads, host to device: a stream of its own, so that load-backs use the link while
    /// the window waits for the compute.
    Window,
    /// Device to host.
    Store,
}

impl Stream {
    /// The streams the copy queue owns.
    pub const COPY: [Self; 3] = [Self::Load, Self::Window, Self::Store];

    /// 0 to 3.
    pub fn index(self) -> usize {
        self as usize
    }
}

/// A copy that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The job it belonged to.
    pub job: u64,
    /// Index of the plane and offset on the device, if one run is known to have failed.
    pub at: Option<(usize, u64)>,
    /// What the device said.
    pub text: String,
}

/// How far a stream has come with a ticket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Not there yet.
    Pending,
    /// Everything before it is done.
    Done,
    /// There, but these copies since the ticket before it failed; all others are done.
    Failed(Arc<[Fault]>),
    /// The stream was abandoned; what was before the ticket may or may not run on.
    Lost(String),
}

impl Progress {
    /// Whether the ticket is behind us, however it went.
    pub fn is_over(&self) -> bool {
        *self != Self::Pending
    }
}

/// A point of a stream that has been recorded.
#[derive(Clone)]
pub struct Ticket(Arc<dyn Any + Send + Sync>);

impl Ticket {
    /// For `Device::record` alone: it returns no ticket that the stream does not know.
    pub(crate) fn recorded<E: Any + Send + Sync>(event: Arc<E>) -> Self {
        Self(event)
    }

    /// The event of the device that recorded it. A ticket of another kind of device is refused.
    pub(crate) fn event<E: Any + Send + Sync>(&self) -> Result<Arc<E>> {
        let event = self.0.clone().downcast::<E>();
        event.map_err(|_| Error::request("ticket", "of another device", "one of this device"))
    }
}

/// A 32-bit flag that streams write and wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word(pub(crate) u32);

/// Whether a flag has come to `target`: cyclic, so that a counter may wrap.
pub fn word_reached(value: u32, target: u32) -> bool {
    value.wrapping_sub(target).cast_signed() >= 0
}

/// One layer of one job.
#[derive(Clone)]
pub struct LayerCopy {
    /// Id of the job.
    pub job: u64,
    /// The planes.
    pub memory: Arc<CopyMemory>,
    /// What to copy.
    pub plan: Arc<CopyPlan>,
    /// Which layer.
    pub layer: LayerKind,
    /// Running index of a streamed layer; without meaning in others.
    pub k: u64,
    /// Checksums to write (store) or to compare with (load).
    pub sums: Option<Arc<Sums>>,
}

/// Checksum of every stored piece by (plane, host offset), with its length. One lock, taken alone.
pub struct Sums(Mutex<BTreeMap<(usize, u64), (u64, u64)>>);

impl Default for Sums {
    fn default() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }
}

impl Sums {
    /// Remembers what was stored.
    pub(crate) fn put(&self, plane: usize, run: Run, sum: u64) {
        let mut sums = self.0.lock();
        sums.insert((plane, run.host), (run.bytes, sum));
    }

    /// Whether what was loaded is what was stored; true if it was never stored, or as a piece of
    /// another length.
    pub(crate) fn agrees(&self, plane: usize, run: Run, sum: u64) -> bool {
        let stored = self.0.lock().get(&(plane, run.host)).copied();
        stored.is_none_or(|(bytes, stored)| bytes != run.bytes || stored == sum)
    }
}

/// Bytes to move, inside the bounds of their regions.
#[derive(Clone, Copy)]
pub struct Transfer<'a> {
    /// Index of the plane.
    pub plane: usize,
    /// Where on the device side.
    pub device: &'a Region,
    /// Where on the host side.
    pub host: &'a Region,
    /// Offsets and length.
    pub run: Run,
}

impl LayerCopy {
    /// The transfers in the order and form of a mechanism. An item is an `InvalidRequest` if it
    /// leaves its region; nothing of it may be copied then.
    pub fn transfers(&self, how: Mechanism) -> impl Iterator<Item = Result<Transfer<'_>>> {
        let gather = how == Mechanism::Gather;
        let planes = self.memory.planes();
        let runs = (!gather).then(|| self.plan.runs(self.layer, self.k));
        let pieces = gather.then(|| self.plan.gather(planes, self.layer, self.k));
        let all = runs.into_iter().flatten();
        let all = all.chain(pieces.into_iter().flatten());
        all.map(|(plane, run)| self.memory.transfer(plane, run))
    }

    /// Bytes of all its transfers.
    pub fn bytes(&self) -> u64 {
        self.plan.layer_bytes(self.layer)
    }
}

/// Called by a device when a ticket is over.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// A copy device. Every method may be called from any thread; none but `join` blocks for longer
/// than a submission takes.
///
/// A call either succeeds, and what it enqueued will be over some day, or returns an error with
/// nothing enqueued.
pub trait Device: Send + Sync {
    /// Short name.
    fn name(&self) -> &'static str;

    /// Whether it can reach these planes. Fails with `Config`.
    fn check(&self, memory: &CopyMemory) -> Result<()>;

    /// Whether it writes and compares the checksums of a `LayerCopy`.
    fn checks_sums(&self) -> bool {
        true
    }

    /// Enqueues the copies of one layer of one job. The device keeps the `LayerCopy`, and with it
    /// the memory, until they are over.
    fn copy(&self, stream: Stream, how: Mechanism, batch: LayerCopy) -> Result<()>;

    /// Marks what was enqueued so far.
    fn record(&self, stream: Stream) -> Result<Ticket>;

    /// What is enqueued on `stream` from now on starts only once the ticket is over.
    fn wait(&self, stream: Stream, ticket: &Ticket) -> Result<()>;

    /// Makes the forward wait for a ticket: enqueues a wait on the compute stream and returns
    /// true, or, where the forward runs on the calling thread, waits at most `slice` and returns
    /// whether the ticket is over.
    fn join(&self, ticket: &Ticket, slice: Duration) -> Result<bool>;

    /// How far a ticket is. Does not block.
    fn query(&self, ticket: &Ticket) -> Result<Progress>;

    /// A new flag, 0.
    fn word(&self) -> Result<Word>;

    /// Enqueues a write to a flag.
    fn write_value(&self, stream: Stream, word: Word, value: u32) -> Result<()>;

    /// What is enqueued on `stream` from now on starts only once [`word_reached`] of the flag.
    /// Legal before the write is enqueued.
    fn wait_value(&self, stream: Stream, word: Word, value: u32) -> Result<()>;

    /// Gives up on a stream with a copy that does not end. Its tickets that are not over become
    /// `Lost`, or `Failed` where the device can drop the work behind them; what is enqueued later
    /// runs on a fresh stream.
    fn abandon(&self, stream: Stream);

    /// Has `waker` called whenever a ticket is over. False if the device cannot: poll then.
    fn watch(&self, waker: Waker) -> bool;

    /// From which run length which mechanism pays.
    fn thresholds(&self) -> Thresholds;
}
