//! Copies between pinned host memory and one GPU, through the driver alone.
//!
//! Streams and events are the driver's own and order everything: a wait is enqueued on a stream, and
//! no call here blocks for longer than a submission. The compute stream belongs to whoever runs the
//! forward and comes as a handle; what keeps it alive is held. No Python, no GIL.
//!
//! Owns: three copy streams, the events, pinned memory for lists and flags, registrations, and the
//! streams it gave up. Lock order: a lane -> pool, events, words or retired streams, each a leaf.
//!
//! Invariants: what a copy touches (regions, their registration, its list) is kept until the copy is
//! known to be over, and for ever if that never becomes known; a ticket that is given up is never
//! waited for again.

mod context;
mod driver;
mod events;
#[cfg(test)]
mod fake;
mod lane;
mod measure;
mod paths;
mod pinned;
mod register;
#[cfg(test)]
mod tests;
mod waiter;

pub use waiter::EventWaiter;

use std::any::Any;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use headrace_core::sync::Mutex;
use headrace_core::{Direction, Error, Mechanism, Result, Thresholds};

use crate::clock::monotonic_ns;
use crate::cpu::Injection;
use crate::device::{Device, LayerCopy, Progress, Stream, Ticket, Waker, Word};
use crate::host::HostMemory;
use crate::regions::{CopyMemory, Space};
use context::{Context, Entered, symbol};
use driver::{DevicePtr, Driver, Handle};
use events::{Event, Events};
use lane::{Held, Lane};
use paths::{PIECE_BYTES, Paths, Span};
use pinned::{Block, Pool};
use register::Registration;

/// Handles of the default streams: none, the legacy one, that of a thread.
const DEFAULT_STREAMS: [u64; 3] = [0, 1, 2];
/// How long a device that is dropped waits for its streams. Its queue has drained them before.
const DROP_WAIT_NS: u64 = 1_000_000_000;
const DROP_POLL: Duration = Duration::from_micros(200);
const WORD_BYTES: u32 = 4;
/// Flags of one block of pinned memory.
const BLOCK_WORDS: u32 = 1 << 14;

/// What a device is made of.
pub struct CudaConfig {
    /// Index of the GPU.
    pub ordinal: u32,
    /// Handle of the stream the forward runs on: none of the default streams.
    pub stream: u64,
    /// Keeps that stream alive.
    pub owner: Arc<dyn Any + Send + Sync>,
    /// Machine code of `copy_gather.cu`.
    pub code: Vec<u8>,
    /// Symbol of its kernel.
    pub symbol: String,
    /// From which run length which mechanism pays; measured if not given.
    pub thresholds: Option<Thresholds>,
    /// Folder that remembers what was measured.
    pub cache: Option<PathBuf>,
}

/// Copies to and from a GPU. Dropping it waits a second for its streams and the compute stream; what
/// still runs then keeps its memory for ever.
pub struct CudaDevice {
    context: Arc<Context>,
    compute: Handle,
    /// By stream; that of the compute stream is empty.
    lanes: [Mutex<Lane>; 4],
    events: Arc<Events>,
    pool: Arc<Pool>,
    /// An option only for `drop`, which may have to leave it behind.
    paths: Option<Paths>,
    registrations: Mutex<Arc<Vec<Arc<Registration>>>>,
    words: Mutex<Words>,
    retired: Mutex<Vec<Retired>>,
    thresholds: Thresholds,
    /// Last: the compute stream outlives everything that names it.
    _owner: Arc<dyn Any + Send + Sync>,
}

#[derive(Default)]
struct Words {
    blocks: Vec<Block>,
    used: u32,
}

/// A stream that was given up, and what it may still touch.
struct Retired {
    stream: Option<Handle>,
    _held: Vec<Held>,
}

impl CudaDevice {
    /// Opens the driver, makes the streams, and measures thresholds that are neither given nor
    /// known, which takes at most 200 ms.
    ///
    /// Fails with `Config` for a default stream, no driver, no such GPU; `Device` for what the
    /// driver refuses.
    pub fn new(config: CudaConfig) -> Result<Self> {
        check_stream(config.stream)?;
        Self::with_driver(Driver::load()?, config)
    }

    fn with_driver(driver: Driver, config: CudaConfig) -> Result<Self> {
        let compute = check_stream(config.stream)?;
        let symbol = symbol(&config.symbol)?;
        let context = Context::retain(driver, config.ordinal)?;
        let pool = Pool::new(context.clone())?;
        let mut device = Self {
            compute,
            lanes: Default::default(),
            events: Events::new(context.clone()),
            pool,
            paths: None,
            registrations: Mutex::default(),
            words: Mutex::default(),
            retired: Mutex::default(),
            thresholds: Thresholds {
                plain_bytes: 0,
                batch_bytes: None,
            },
            _owner: config.owner,
            context,
        };
        let entered = device.context.enter()?;
        for stream in Stream::COPY {
            *device.lanes[stream.index()].lock() = Lane::new(entered.new_stream()?);
        }
        drop(entered);
        let context = device.context.clone();
        let load = device.lanes[Stream::Load.index()].lock().handle()?;
        let paths = Paths::new(&context, &device.pool, &config.code, &symbol, load)?;
        let paths = device.paths.insert(paths);
        device.thresholds = match config.thresholds {
            Some(given) => given,
            None => measure::thresholds(&context, paths, load, config.cache.as_deref())?,
        };
        if !context.has_batch() {
            device.thresholds.batch_bytes = None;
        }
        Ok(device)
    }

    /// Pins host memory for as long as the device lives, in pieces of at most 1 GiB.
    ///
    /// Fails with `Config` if the driver refuses one; nothing stays pinned then.
    pub fn register(&self, memory: &HostMemory) -> Result<()> {
        let registration = Registration::new(&self.context, memory)?;
        self.add(registration);
        Ok(())
    }

    fn add(&self, registration: Registration) {
        let mut registrations = self.registrations.lock();
        let mut all = registrations.to_vec();
        all.push(Arc::new(registration));
        *registrations = Arc::new(all);
    }

    /// For tests: what happens to the `nth` copy (0: the next) that is enqueued on `stream`.
    /// Fails with `Config` for a copy that never ends, which would never let the GPU go.
    pub fn inject(&self, stream: Stream, nth: u64, what: Injection) -> Result<()> {
        if what == Injection::Hang {
            return Err(Error::config("what", "hang", "fail or delay on a GPU"));
        }
        self.lanes[stream.index()].lock().inject(nth, what);
        Ok(())
    }

    /// Every byte of a copy, as both sides address it.
    fn spans(&self, how: Mechanism, batch: &LayerCopy) -> Result<Vec<Span>> {
        let most = if how == Mechanism::Gather {
            PIECE_BYTES
        } else {
            u64::MAX
        };
        let registrations = self.registrations.lock().clone();
        let mut spans = Vec::new();
        for transfer in batch.transfers(how) {
            let transfer = transfer?;
            let run = transfer.run;
            let host = transfer.host.address() + run.host;
            let device = transfer.device.address() + run.device;
            let mut holders = registrations.iter();
            let holder = holders.find(|registration| registration.holds(host, run.bytes));
            let holder = holder.ok_or_else(|| unregistered(run.bytes))?;
            spans.extend(holder.parts(host, run.bytes, most).map(|part| Span {
                host: part.host,
                mapped: part.mapped,
                device: device + part.offset,
                bytes: part.bytes,
            }));
        }
        Ok(spans)
    }

    /// The event of a ticket of this device.
    fn event(&self, ticket: &Ticket) -> Result<Arc<Event>> {
        let event = ticket.event::<Event>()?;
        if Arc::ptr_eq(&event.pool, &self.events) {
            return Ok(event);
        }
        let expected = "one of this device";
        Err(Error::request("ticket", "of another device", expected))
    }

    /// Calls `f` with a stream, locked against other submissions.
    fn on<T>(&self, stream: Stream, f: impl FnOnce(Handle) -> Result<T>) -> Result<T> {
        if stream == Stream::Compute {
            return f(self.compute);
        }
        let lane = self.lanes[stream.index()].lock();
        f(lane.handle()?)
    }

    fn word_address(&self, word: Word) -> Result<DevicePtr> {
        let words = self.words.lock();
        let block = words.blocks.get((word.0 / BLOCK_WORDS) as usize);
        match block {
            Some(block) if word.0 < words.used => {
                Ok(block.mapped() + u64::from(word.0 % BLOCK_WORDS * WORD_BYTES))
            }
            _ => Err(Error::request("word", word.0, "a flag of this device")),
        }
    }

    /// Lets go of the streams that were given up and are over after all.
    fn sweep(&self, entered: &Entered<'_>) {
        let mut retired = self.retired.lock();
        let (over, running) = std::mem::take(&mut *retired)
            .into_iter()
            .partition(|one| one.is_over(entered));
        *retired = running;
        drop(retired);
        let over: Vec<Retired> = over;
        for stream in over.iter().filter_map(|one| one.stream) {
            entered.destroy_stream(stream);
        }
    }
}

impl Retired {
    /// A stream that answers with an error runs nothing any more.
    fn is_over(&self, entered: &Entered<'_>) -> bool {
        let over = self.stream.map(|stream| entered.stream_over(stream));
        over.is_none_or(|over| over.unwrap_or(true))
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn check(&self, memory: &CopyMemory) -> Result<()> {
        let (device, host) = memory.regions();
        let here = Space::Cuda(self.context.ordinal());
        if let Some(region) = device.iter().find(|region| region.space() != here) {
            let value = format_args!("{:?} memory", region.space());
            let expected = format!("memory of GPU {}", self.context.ordinal());
            return Err(Error::config("device region", value, expected));
        }
        let registrations = self.registrations.lock().clone();
        let registered = |address, bytes| {
            let mut holders = registrations.iter();
            holders.any(|registration| registration.holds(address, bytes))
        };
        let stray = host.iter().find(|region| {
            region.space() != Space::Host || !registered(region.address(), region.bytes())
        });
        stray.map_or(Ok(()), |region| Err(unregistered(region.bytes())))
    }

    fn checks_sums(&self) -> bool {
        false
    }

    fn copy(&self, stream: Stream, how: Mechanism, batch: LayerCopy) -> Result<()> {
        if stream == Stream::Compute {
            return Err(Error::request("stream", "compute", "a copy stream"));
        }
        self.check(&batch.memory)?;
        let how = match how {
            Mechanism::Batch if !self.context.has_batch() => Mechanism::Gather,
            how => how,
        };
        let spans = self.spans(how, &batch)?;
        let to_device = batch.plan.direction() == Direction::ToDevice;
        let Some(paths) = &self.paths else {
            return Err(Error::request("device", "half made", "one that is whole"));
        };
        let entered = self.context.enter()?;
        let mut lane = self.lanes[stream.index()].lock();
        let handle = lane.handle()?;
        match lane.injected() {
            Some(Injection::Fail) => {
                lane.fault(batch.job, "injected failure".to_owned());
                return Ok(());
            }
            Some(Injection::Delay(time)) => {
                let nanos = usize::try_from(time.as_nanos()).unwrap_or(usize::MAX);
                entered.call_host(handle, sleep, nanos)?;
            }
            Some(Injection::Hang) | None => {}
        }
        let sent = paths.send(&entered, handle, how, to_device, &spans)?;
        if let Some(refused) = sent.refused {
            // What is enqueued already cannot be taken back: the job fails behind its ticket.
            lane.fault(batch.job, refused.to_string());
        }
        lane.hold(Held {
            batch,
            _list: sent.list,
        });
        Ok(())
    }

    fn record(&self, stream: Stream) -> Result<Ticket> {
        let entered = self.context.enter()?;
        let event = Arc::new(self.events.take(&entered, stream)?);
        if stream == Stream::Compute {
            entered.record(event.raw, self.compute)?;
            return Ok(Ticket::recorded(event));
        }
        let mut lane = self.lanes[stream.index()].lock();
        entered.record(event.raw, lane.handle()?)?;
        lane.recorded(event.clone());
        let over = lane.reap(&entered);
        drop(lane);
        drop(over);
        Ok(Ticket::recorded(event))
    }

    fn wait(&self, stream: Stream, ticket: &Ticket) -> Result<()> {
        let event = self.event(ticket)?;
        if event.progress().is_over() {
            return Ok(());
        }
        let entered = self.context.enter()?;
        self.on(stream, |handle| entered.wait_event(handle, event.raw))
    }

    fn join(&self, ticket: &Ticket, _slice: Duration) -> Result<bool> {
        self.wait(Stream::Compute, ticket)?;
        Ok(true)
    }

    fn query(&self, ticket: &Ticket) -> Result<Progress> {
        let event = self.event(ticket)?;
        if event.progress().is_over() {
            return Ok(event.progress());
        }
        let entered = self.context.enter()?;
        if event.stream == Stream::Compute {
            match entered.event_over(event.raw) {
                Ok(true) => event.set(Progress::Done),
                Ok(false) => {}
                Err(refused) => event.set(Progress::Lost(refused.to_string())),
            }
            return Ok(event.progress());
        }
        let over = self.lanes[event.stream.index()].lock().reap(&entered);
        drop(over);
        Ok(event.progress())
    }

    fn word(&self) -> Result<Word> {
        let mut words = self.words.lock();
        let next = words.used.checked_add(1);
        let next = next.ok_or_else(|| Error::config("words", "2^32", "fewer flags"))?;
        if words.used.is_multiple_of(BLOCK_WORDS) {
            let mut block = self.pool.block((BLOCK_WORDS * WORD_BYTES) as usize)?;
            block.clear();
            words.blocks.push(block);
        }
        let word = Word(words.used);
        words.used = next;
        Ok(word)
    }

    fn write_value(&self, stream: Stream, word: Word, value: u32) -> Result<()> {
        let address = self.word_address(word)?;
        let entered = self.context.enter()?;
        self.on(stream, |handle| entered.write_value(handle, address, value))
    }

    fn wait_value(&self, stream: Stream, word: Word, value: u32) -> Result<()> {
        let address = self.word_address(word)?;
        let entered = self.context.enter()?;
        self.on(stream, |handle| entered.wait_value(handle, address, value))
    }

    fn abandon(&self, stream: Stream) {
        if stream == Stream::Compute {
            return;
        }
        let entered = self.context.enter();
        let mut lane = self.lanes[stream.index()].lock();
        let over = entered.as_ref().map(|entered| lane.reap(entered));
        let (old, held) = lane.give_up("the stream was abandoned with a copy running");
        // Without a fresh stream later copies are refused, which their jobs report.
        let fresh = entered.as_ref().map(Entered::new_stream);
        lane.stream = fresh.ok().and_then(Result::ok);
        drop(lane);
        drop(over);
        let retired = Retired {
            stream: old,
            _held: held,
        };
        self.retired.lock().push(retired);
        if let Ok(entered) = entered {
            self.sweep(&entered);
        }
    }

    fn watch(&self, _waker: Waker) -> bool {
        false
    }

    fn thresholds(&self) -> Thresholds {
        self.thresholds
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        let mut retired = std::mem::take(&mut *self.retired.lock());
        for lane in &self.lanes {
            let (stream, held) = lane.lock().give_up("the device was closed");
            retired.push(Retired {
                stream,
                _held: held,
            });
        }
        // A context that cannot be entered is gone, and what ran in it too.
        let context = self.context.clone();
        if let Ok(entered) = context.enter() {
            let end_ns = monotonic_ns() + DROP_WAIT_NS;
            // The compute stream reads flags. Beside that, to unpin memory waits for all of the GPU.
            let compute = Retired {
                stream: Some(self.compute),
                _held: Vec::new(),
            };
            while !retired.iter().all(|one| one.is_over(&entered)) || !compute.is_over(&entered) {
                if monotonic_ns() > end_ns {
                    self.leave_behind(retired);
                    return;
                }
                std::thread::park_timeout(DROP_POLL);
            }
            for stream in retired.iter().filter_map(|one| one.stream) {
                entered.destroy_stream(stream);
            }
        }
    }
}

impl CudaDevice {
    /// Something still runs: all it may touch stays for the life of the process.
    fn leave_behind(&mut self, retired: Vec<Retired>) {
        std::mem::forget(retired);
        std::mem::forget(self.registrations.lock().clone());
        std::mem::forget(self.pool.clone());
        std::mem::forget(self.paths.take());
    }
}

/// A stream of its own as a handle of the driver.
fn check_stream(stream: u64) -> Result<Handle> {
    let handle = Handle::try_from(stream).ok();
    match handle.filter(|_| !DEFAULT_STREAMS.contains(&stream)) {
        Some(handle) => Ok(handle),
        None => Err(Error::config(
            "stream",
            stream,
            "the handle of a stream of its own: default streams wait for each other",
        )),
    }
}

fn unregistered(bytes: u64) -> Error {
    let value = format_args!("{bytes} bytes");
    let expected = "host memory registered with the device, all of it in one registration";
    Error::config("host region", value, expected)
}

/// Delays a stream by nanoseconds in the shape of a pointer.
#[expect(clippy::disallowed_methods, reason = "a test asked for a delay")]
extern "C" fn sleep(nanos: *mut c_void) {
    std::thread::sleep(Duration::from_nanos(nanos.addr() as u64));
}
