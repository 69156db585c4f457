//! Copies by memcpy on a thread per stream; the compute stream is the calling thread.
//!
//! A bandwidth cap imitates a link: copies of one direction share it, and each ends at the time
//! the link would need. Times are computed from one another and not from when a thread woke up,
//! so a late wake-up does not add to the next copy.
//!
//! Owns: the streams, the flags and the links, under one mutex; no lock is taken inside it, and no
//! bytes are moved under it. One condvar wakes streams and joiners.

mod lane;
mod link;
#[cfg(all(test, not(loom)))]
mod tests;

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use headrace_core::sync::{Condvar, Mutex};
use headrace_core::{Error, Mechanism, Result, Thresholds};

use crate::clock::monotonic_ns;
use crate::device::{
    Device, Fault, LayerCopy, Progress, Stream, Ticket, Waker, Word, word_reached,
};
use crate::regions::{CopyMemory, Space};
use link::Link;

/// What an injected fault does to a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Injection {
    /// It fails before a byte is moved.
    Fail,
    /// It never ends.
    Hang,
    /// It starts late.
    Delay(Duration),
}

/// Copies in host memory. Dropping it ends its threads; nothing may wait for its tickets then.
pub struct CpuDevice {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    lanes: [Lane; 4],
    links: [Link; 2],
    words: Vec<u32>,
    wakers: Vec<Waker>,
    injections: Vec<(Stream, u64, Injection)>,
    threads: Vec<JoinHandle<()>>,
    closed: bool,
}

/// The queue of one stream.
#[derive(Default)]
struct Lane {
    ops: VecDeque<Op>,
    /// A thread of an older generation was abandoned and must not touch the queue.
    generation: u64,
    /// Copying right now.
    running: bool,
    /// Copies that failed since the last record.
    faults: Vec<Fault>,
}

enum Op {
    Copy {
        how: Mechanism,
        batch: LayerCopy,
        queued_ns: u64,
    },
    Record(Arc<Event>),
    Wait(Arc<Event>),
    WriteValue(Word, u32),
    WaitValue(Word, u32),
}

/// Set once, under the lock of the device.
#[derive(Default)]
struct Event(OnceLock<(Progress, u64)>);

impl Event {
    fn over(at_ns: u64) -> Arc<Self> {
        let event = Self::default();
        event.set(Progress::Done, at_ns);
        Arc::new(event)
    }

    /// The first end of an event stays.
    fn set(&self, progress: Progress, at_ns: u64) {
        let _ = self.0.set((progress, at_ns));
    }

    fn progress(&self) -> Progress {
        let over = self.0.get();
        over.map_or(Progress::Pending, |(progress, _)| progress.clone())
    }
}

impl CpuDevice {
    /// Starts the streams. `bandwidth`: bytes per second of either direction; `None` is as fast as
    /// memory. Fails with `Config` for 0.
    pub fn new(bandwidth: Option<u64>) -> Result<Self> {
        if bandwidth == Some(0) {
            return Err(Error::config(
                "bandwidth",
                0,
                "at least 1 byte a second, or none",
            ));
        }
        let state = State {
            lanes: Default::default(),
            links: [Link::new(bandwidth), Link::new(bandwidth)],
            words: Vec::new(),
            wakers: Vec::new(),
            injections: Vec::new(),
            threads: Vec::new(),
            closed: false,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::default(),
        });
        let device = Self { shared };
        for stream in Stream::COPY {
            device.spawn(stream)?;
        }
        Ok(device)
    }

    fn spawn(&self, stream: Stream) -> Result<()> {
        let mut state = self.shared.state.lock();
        let generation = state.lanes[stream.index()].generation;
        let shared = self.shared.clone();
        let name = format!("headrace-copy-{}", stream.index());
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || lane::run(&shared, stream, generation));
        let thread = thread.map_err(|why| {
            Error::config(
                "threads",
                "one more",
                format!("that the system starts it ({why})"),
            )
        })?;
        state.threads.push(thread);
        Ok(())
    }

    /// For tests: what happens to the `nth` copy (0: the next) that starts on `stream`.
    pub fn inject(&self, stream: Stream, nth: u64, what: Injection) {
        self.shared
            .state
            .lock()
            .injections
            .push((stream, nth, what));
    }

    fn push(&self, stream: Stream, op: Op) -> Result<()> {
        let mut state = self.shared.state.lock();
        if stream == Stream::Compute {
            let expected = "a copy stream: the compute stream of the CPU is the calling thread";
            return Err(Error::request("stream", "compute", expected));
        }
        if let Op::WriteValue(word, _) | Op::WaitValue(word, _) = &op
            && word.0 as usize >= state.words.len()
        {
            return Err(Error::request("word", word.0, "a flag of this device"));
        }
        state.lanes[stream.index()].ops.push_back(op);
        drop(state);
        self.shared.changed.notify_all();
        Ok(())
    }
}

impl Device for CpuDevice {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn check(&self, memory: &CopyMemory) -> Result<()> {
        let (device, host) = memory.regions();
        match device.iter().chain(host).find(|r| r.space() != Space::Host) {
            None => Ok(()),
            Some(region) => Err(Error::config(
                "region",
                format_args!("{:?} memory", region.space()),
                "memory of this process: the cpu device copies no other",
            )),
        }
    }

    fn copy(&self, stream: Stream, how: Mechanism, batch: LayerCopy) -> Result<()> {
        self.check(&batch.memory)?;
        let queued_ns = monotonic_ns();
        self.push(
            stream,
            Op::Copy {
                how,
                batch,
                queued_ns,
            },
        )
    }

    fn record(&self, stream: Stream) -> Result<Ticket> {
        if stream == Stream::Compute {
            return Ok(Ticket::recorded(Event::over(monotonic_ns())));
        }
        let event = Arc::new(Event::default());
        self.push(stream, Op::Record(event.clone()))?;
        Ok(Ticket::recorded(event))
    }

    fn wait(&self, stream: Stream, ticket: &Ticket) -> Result<()> {
        self.push(stream, Op::Wait(ticket.event()?))
    }

    fn join(&self, ticket: &Ticket, slice: Duration) -> Result<bool> {
        let event = ticket.event::<Event>()?;
        let mut state = self.shared.state.lock();
        if event.0.get().is_none() && !slice.is_zero() {
            self.shared.changed.wait_for(&mut state, slice);
        }
        Ok(event.0.get().is_some())
    }

    fn query(&self, ticket: &Ticket) -> Result<Progress> {
        Ok(ticket.event::<Event>()?.progress())
    }

    fn word(&self) -> Result<Word> {
        let mut state = self.shared.state.lock();
        let index = u32::try_from(state.words.len());
        let word = Word(index.map_err(|_| Error::config("words", "2^32", "fewer flags"))?);
        state.words.push(0);
        Ok(word)
    }

    fn write_value(&self, stream: Stream, word: Word, value: u32) -> Result<()> {
        self.push(stream, Op::WriteValue(word, value))
    }

    fn wait_value(&self, stream: Stream, word: Word, value: u32) -> Result<()> {
        self.push(stream, Op::WaitValue(word, value))
    }

    fn abandon(&self, stream: Stream) {
        let mut state = self.shared.state.lock();
        let now = monotonic_ns();
        let lane = &mut state.lanes[stream.index()];
        lane.generation += 1;
        let mut running = std::mem::take(&mut lane.running);
        let mut faults = std::mem::take(&mut lane.faults);
        for op in std::mem::take(&mut lane.ops) {
            match op {
                Op::Copy { batch, .. } => faults.push(Fault {
                    job: batch.job,
                    at: None,
                    text: "dropped behind a copy that never ended".to_owned(),
                }),
                Op::Record(event) if running => {
                    running = false;
                    faults.clear();
                    let text = "the stream was abandoned with a copy running";
                    event.set(Progress::Lost(text.to_owned()), now);
                }
                Op::Record(event) => event.set(lane::outcome(&mut faults), now),
                Op::Wait(_) | Op::WriteValue(..) | Op::WaitValue(..) => {}
            }
        }
        drop(state);
        // Without a fresh thread the next copies time out, which their jobs report.
        let _ = self.spawn(stream);
        self.shared.changed.notify_all();
    }

    fn watch(&self, waker: Waker) -> bool {
        self.shared.state.lock().wakers.push(waker);
        true
    }

    fn thresholds(&self) -> Thresholds {
        // A memcpy costs the same whatever it is called.
        Thresholds {
            plain_bytes: 0,
            batch_bytes: None,
        }
    }
}

impl Drop for CpuDevice {
    fn drop(&mut self) {
        let threads = {
            let mut state = self.shared.state.lock();
            state.closed = true;
            std::mem::take(&mut state.threads)
        };
        self.shared.changed.notify_all();
        for thread in threads {
            // A thread that panicked has nothing left to end.
            let _ = thread.join();
        }
    }
}
