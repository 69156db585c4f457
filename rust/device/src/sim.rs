//! Simulated device: streams are queues of operations, a virtual clock decides when each ends.
//!
//! Two ways to run it: [`SimDevice::step`] does one of all legal next things, chosen by the caller,
//! so that a seed is an interleaving; [`SimDevice::tick`] runs to the next end on the clock, with
//! one link per direction.
//!
//! Shadow memory keeps a version per 8 bytes instead of bytes ([`memory`]). An operation holds what
//! it reads and writes from its start to its end; whatever else touches that meanwhile, and every
//! read of another version than its kernel names, is a violation.
//!
//! Owns: streams, flags, shadow memory, under one mutex that is never held while calling out.

mod memory;
#[cfg(all(test, not(loom)))]
mod tests;

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use headrace_core::sync::Mutex;
use headrace_core::{Direction, Error, Mechanism, Result, Thresholds};

use crate::device::{
    Device, Fault, LayerCopy, Progress, Stream, Ticket, Waker, Word, word_reached,
};
use crate::regions::{CopyMemory, Space};
use memory::{Access, Memory};

pub use memory::{CELL, Kernel, Read, Write};

/// What an injected fault does to a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimFault {
    /// It fails and leaves garbage.
    Fail,
    /// It never ends.
    Hang,
    /// The submission returns an error.
    Refuse,
}

/// Nanoseconds a copy takes on the link.
pub type CopyCost = Box<dyn Fn(&LayerCopy) -> u64 + Send>;

/// The simulated device.
pub struct SimDevice {
    state: Mutex<Sim>,
}

struct Sim {
    clock_ns: u64,
    sequence: u64,
    lanes: [Lane; 4],
    words: Vec<u32>,
    memory: Memory,
    cost: CopyCost,
    injections: Vec<(Stream, u64, SimFault)>,
    /// Jobs whose bytes are garbage by injection or by the caller's word.
    excused: BTreeSet<u64>,
    copied: BTreeSet<u64>,
    /// What abandoned copies may still touch.
    ghosts: Vec<Access>,
    out_of_order: bool,
}

#[derive(Default)]
struct Lane {
    ops: VecDeque<(u64, Op)>,
    active: Option<Active>,
    faults: Vec<Fault>,
}

struct Active {
    op: Op,
    access: Access,
    /// `None`: never.
    end_ns: Option<u64>,
    fails: bool,
}

enum Op {
    Copy(LayerCopy, Option<SimFault>),
    Kernel(Kernel),
    /// A small copy of the step itself, on the link.
    Metadata(u64),
    Record(Arc<Event>),
    Wait(Arc<Event>),
    WriteValue(Word, u32),
    WaitValue(Word, u32),
}

#[derive(Default)]
struct Event(OnceLock<Progress>);

impl Event {
    fn is_over(&self) -> bool {
        self.0.get().is_some()
    }
}

impl SimDevice {
    /// An idle device at time 0. `cost` gives the time of every copy on the clock.
    pub fn new(cost: CopyCost) -> Self {
        Self {
            state: Mutex::new(Sim {
                clock_ns: 0,
                sequence: 0,
                lanes: Default::default(),
                words: Vec::new(),
                memory: Memory::default(),
                cost,
                injections: Vec::new(),
                excused: BTreeSet::new(),
                copied: BTreeSet::new(),
                ghosts: Vec::new(),
                out_of_order: false,
            }),
        }
    }

    /// What happens to the `nth` copy (0: the next) submitted to `stream`.
    pub fn inject(&self, stream: Stream, nth: u64, fault: SimFault) {
        self.state.lock().injections.push((stream, nth, fault));
    }

    /// Reads behind this job may see anything: it was cancelled.
    pub fn excuse(&self, job: u64) {
        self.state.lock().excused.insert(job);
    }

    /// Sets the version of memory that nothing uses yet.
    pub fn preset(&self, write: Write) {
        self.state.lock().memory.preset(write);
    }

    /// Whatever touches these bytes from now on is a violation: they were unmapped.
    pub fn unmap(&self, address: u64, bytes: u64) {
        self.state.lock().memory.unmap(address, bytes);
    }

    /// Breaks the order of streams: a record may overtake the copy before it.
    pub fn break_order(&self) {
        self.state.lock().out_of_order = true;
    }

    /// Enqueues a kernel of the forward.
    pub fn launch(&self, kernel: Kernel) {
        self.state.lock().push(Stream::Compute, Op::Kernel(kernel));
    }

    /// Enqueues a small copy of the step's own on the compute stream.
    pub fn metadata(&self, cost_ns: u64) {
        self.state
            .lock()
            .push(Stream::Compute, Op::Metadata(cost_ns));
    }

    /// Whether a copy of this job was ever submitted.
    pub fn has_copied(&self, job: u64) -> bool {
        self.state.lock().copied.contains(&job)
    }

    /// Virtual time.
    pub fn clock_ns(&self) -> u64 {
        self.state.lock().clock_ns
    }

    /// Everything that went wrong so far.
    pub fn violations(&self) -> Vec<String> {
        self.state.lock().memory.violations().to_vec()
    }

    /// Does one legal thing, `choose(n)` of n; false if there is none.
    pub fn step(&self, choose: &mut dyn FnMut(usize) -> usize) -> bool {
        let mut sim = self.state.lock();
        let mut legal = Vec::new();
        for stream in 0..sim.lanes.len() {
            let lane = &sim.lanes[stream];
            match &lane.active {
                Some(active) => {
                    if active.end_ns.is_some() {
                        legal.push(Move::Finish(stream));
                    }
                    if sim.out_of_order && matches!(lane.ops.front(), Some((_, Op::Record(_)))) {
                        legal.push(Move::Start(stream));
                    }
                }
                None if sim.may_start(stream) => legal.push(Move::Start(stream)),
                None => {}
            }
        }
        if legal.is_empty() {
            return false;
        }
        match legal[choose(legal.len())] {
            Move::Start(stream) => sim.start(stream),
            Move::Finish(stream) => sim.finish(stream),
        }
        true
    }

    /// Starts what can start now; the clock stands still.
    pub fn settle(&self) {
        let mut sim = self.state.lock();
        while let Some(stream) = sim.next_start() {
            sim.start(stream);
        }
    }

    /// Starts what can start, then moves the clock to the next end; false if nothing runs.
    pub fn tick(&self) -> bool {
        self.settle();
        let mut sim = self.state.lock();
        let ends = (0..sim.lanes.len()).filter_map(|stream| {
            let active = sim.lanes[stream].active.as_ref()?;
            Some((active.end_ns?, stream))
        });
        let Some((end_ns, stream)) = ends.min() else {
            return false;
        };
        sim.clock_ns = end_ns;
        sim.finish(stream);
        true
    }
}

#[derive(Clone, Copy)]
enum Move {
    Start(usize),
    Finish(usize),
}

/// Which link an operation needs on the clock.
fn link_of(op: &Op) -> Option<Direction> {
    match op {
        Op::Copy(batch, _) => Some(batch.plan.direction()),
        Op::Metadata(_) => Some(Direction::ToDevice),
        _ => None,
    }
}

impl Sim {
    fn push(&mut self, stream: Stream, op: Op) {
        self.sequence += 1;
        let op = (self.sequence, op);
        self.lanes[stream.index()].ops.push_back(op);
    }

    fn may_start(&self, stream: usize) -> bool {
        match self.lanes[stream].ops.front() {
            None => false,
            Some((_, Op::Wait(event))) => event.is_over(),
            Some((_, Op::WaitValue(word, value))) => {
                word_reached(self.words[word.0 as usize], *value)
            }
            Some(_) => true,
        }
    }

    /// The next stream to start on the clock: a free link goes to what was enqueued first.
    fn next_start(&self) -> Option<usize> {
        let active = self.lanes.iter().filter_map(|lane| lane.active.as_ref());
        let busy: Vec<_> = active.filter_map(|active| link_of(&active.op)).collect();
        let startable = (0..self.lanes.len()).filter(|&stream| {
            let lane = &self.lanes[stream];
            let link = lane.ops.front().and_then(|(_, op)| link_of(op));
            lane.active.is_none()
                && self.may_start(stream)
                && link.is_none_or(|link| !busy.contains(&link))
        });
        startable.min_by_key(|&stream| self.lanes[stream].ops.front().map(|(at, _)| *at))
    }

    fn start(&mut self, stream: usize) {
        let Some((_, op)) = self.lanes[stream].ops.pop_front() else {
            return;
        };
        let now_ns = self.clock_ns;
        let (access, cost_ns, fault) = match &op {
            Op::Record(event) => {
                let faults = std::mem::take(&mut self.lanes[stream].faults);
                let _ = event.0.set(over(faults));
                return;
            }
            Op::WriteValue(word, value) => {
                self.words[word.0 as usize] = *value;
                return;
            }
            Op::Wait(_) | Op::WaitValue(..) => return,
            Op::Copy(batch, fault) => {
                let cost_ns = (self.cost)(batch);
                (Access::of_copy(batch), cost_ns, *fault)
            }
            Op::Kernel(kernel) => {
                let access = Access::of_kernel(kernel, &self.excused);
                (access, kernel.cost_ns, None)
            }
            Op::Metadata(cost_ns) => (Access::default(), *cost_ns, None),
        };
        self.memory.begin(&access);
        let hangs = fault == Some(SimFault::Hang);
        self.lanes[stream].active = Some(Active {
            op,
            access,
            end_ns: (!hangs).then_some(now_ns.saturating_add(cost_ns)),
            fails: fault == Some(SimFault::Fail),
        });
    }

    fn finish(&mut self, stream: usize) {
        let Some(active) = self.lanes[stream].active.take() else {
            return;
        };
        self.memory.end(&active.access, active.fails);
        if let (Op::Copy(batch, _), true) = (&active.op, active.fails) {
            let first = batch.transfers(Mechanism::Plain).next();
            let at = first.and_then(Result::ok).map(|t| (t.plane, t.run.device));
            self.lanes[stream].faults.push(Fault {
                job: batch.job,
                at,
                text: "injected failure".to_owned(),
            });
        }
    }

    fn injected(&mut self, stream: Stream) -> Option<SimFault> {
        let mine = |i: &(Stream, u64, SimFault)| i.0 == stream;
        let hit = self.injections.iter().position(|i| mine(i) && i.1 == 0);
        let hit = hit.map(|index| self.injections.remove(index).2);
        for later in self.injections.iter_mut().filter(|i| mine(i)) {
            later.1 = later.1.saturating_sub(1);
        }
        hit
    }

    fn abandon(&mut self, stream: Stream) {
        let lane = &mut self.lanes[stream.index()];
        let mut running = lane.active.take().map(|active| {
            if let Op::Copy(batch, _) = &active.op {
                self.excused.insert(batch.job);
            }
            self.ghosts.push(active.access);
        });
        let mut faults = std::mem::take(&mut lane.faults);
        for (_, op) in std::mem::take(&mut lane.ops) {
            match op {
                Op::Copy(batch, _) => {
                    self.excused.insert(batch.job);
                    faults.push(Fault {
                        job: batch.job,
                        at: None,
                        text: "dropped behind a copy that never ended".to_owned(),
                    });
                }
                Op::Record(event) => {
                    let faults = std::mem::take(&mut faults);
                    let lost = || Progress::Lost("abandoned with a copy running".to_owned());
                    let _ = event
                        .0
                        .set(running.take().map_or_else(|| over(faults), |()| lost()));
                }
                _ => {}
            }
        }
    }
}

fn over(faults: Vec<Fault>) -> Progress {
    if faults.is_empty() {
        return Progress::Done;
    }
    Progress::Failed(faults.into())
}

impl Device for SimDevice {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn check(&self, memory: &CopyMemory) -> Result<()> {
        let (device, host) = memory.regions();
        let mut regions = device.iter().chain(host);
        match regions.find(|r| r.space() != Space::Virtual) {
            None => Ok(()),
            Some(region) => Err(Error::config(
                "region",
                format_args!("{:?} memory", region.space()),
                "virtual addresses: the simulated device moves no bytes",
            )),
        }
    }

    fn copy(&self, stream: Stream, _how: Mechanism, batch: LayerCopy) -> Result<()> {
        for transfer in batch.transfers(Mechanism::Plain) {
            transfer?;
        }
        let mut sim = self.state.lock();
        let fault = sim.injected(stream);
        if fault.is_some() {
            sim.excused.insert(batch.job);
        }
        if fault == Some(SimFault::Refuse) {
            return Err(Error::request("copy", "refused", "no injected refusal"));
        }
        sim.copied.insert(batch.job);
        sim.push(stream, Op::Copy(batch, fault));
        Ok(())
    }

    fn record(&self, stream: Stream) -> Result<Ticket> {
        let event = Arc::new(Event::default());
        self.state.lock().push(stream, Op::Record(event.clone()));
        Ok(Ticket::recorded(event))
    }

    fn wait(&self, stream: Stream, ticket: &Ticket) -> Result<()> {
        let event = ticket.event()?;
        self.state.lock().push(stream, Op::Wait(event));
        Ok(())
    }

    fn join(&self, ticket: &Ticket, _slice: Duration) -> Result<bool> {
        self.wait(Stream::Compute, ticket)?;
        Ok(true)
    }

    fn query(&self, ticket: &Ticket) -> Result<Progress> {
        let event = ticket.event::<Event>()?;
        Ok(event.0.get().cloned().unwrap_or(Progress::Pending))
    }

    fn word(&self) -> Result<Word> {
        let mut sim = self.state.lock();
        let index = u32::try_from(sim.words.len());
        let word = Word(index.map_err(|_| Error::config("words", "2^32", "fewer flags"))?);
        sim.words.push(0);
        Ok(word)
    }

    fn write_value(&self, stream: Stream, word: Word, value: u32) -> Result<()> {
        self.state
            .lock()
            .push_word(stream, word, Op::WriteValue(word, value))
    }

    fn wait_value(&self, stream: Stream, word: Word, value: u32) -> Result<()> {
        self.state
            .lock()
            .push_word(stream, word, Op::WaitValue(word, value))
    }

    fn abandon(&self, stream: Stream) {
        self.state.lock().abandon(stream);
    }

    fn watch(&self, _waker: Waker) -> bool {
        false
    }

    fn thresholds(&self) -> Thresholds {
        Thresholds {
            plain_bytes: 0,
            batch_bytes: None,
        }
    }
}

impl Sim {
    fn push_word(&mut self, stream: Stream, word: Word, op: Op) -> Result<()> {
        if word.0 as usize >= self.words.len() {
            return Err(Error::request("word", word.0, "a flag of this device"));
        }
        self.push(stream, op);
        Ok(())
    }
}
