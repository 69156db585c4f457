//! The thread of one stream: runs its operations in order.

use std::sync::Arc;
use std::time::Duration;

use headrace_core::{Direction, Mechanism};

use super::link::CHUNK;
use super::{Fault, Injection, LayerCopy, Op, Progress, Shared, State, Stream, word_reached};
use crate::clock::monotonic_ns;
use crate::device::Transfer;

/// Longest sleep; the condvar wakes earlier if there is something to do.
const IDLE: Duration = Duration::from_hours(1);
/// The end of a paced copy is met by spinning: a condvar comes back late by about this much.
const SPIN: Duration = Duration::from_micros(60);

/// Why the thread leaves.
struct Ended;

pub(super) fn run(shared: &Arc<Shared>, stream: Stream, generation: u64) {
    let mut lane = Runner {
        shared,
        stream,
        generation,
        ready_ns: 0,
    };
    while lane.step().is_ok() {}
}

/// Progress of a record behind these faults.
pub(super) fn outcome(faults: &mut Vec<Fault>) -> Progress {
    if faults.is_empty() {
        return Progress::Done;
    }
    Progress::Failed(std::mem::take(faults).into())
}

struct Runner<'a> {
    shared: &'a Shared,
    stream: Stream,
    generation: u64,
    /// When, on the time line of the link, the last operation ended.
    ready_ns: u64,
}

impl Runner<'_> {
    fn check(&self, state: &State) -> Result<(), Ended> {
        let same = state.lanes[self.stream.index()].generation == self.generation;
        if state.closed || !same {
            return Err(Ended);
        }
        Ok(())
    }

    /// Runs one operation, waiting for it.
    fn step(&mut self) -> Result<(), Ended> {
        let (how, batch, injected) = {
            let mut state = self.shared.state.lock();
            loop {
                self.check(&state)?;
                match self.pop(&mut state) {
                    Some(Op::Copy {
                        how,
                        batch,
                        queued_ns,
                    }) => {
                        self.ready_ns = self.ready_ns.max(queued_ns);
                        state.lanes[self.stream.index()].running = true;
                        // At once: a stream that takes this one's place starts copies of its own.
                        break (how, batch, self.injected(&mut state));
                    }
                    Some(op) => {
                        let wakers = self.instant(op, &mut state);
                        drop(state);
                        self.shared.changed.notify_all();
                        for wake in &wakers {
                            wake();
                        }
                        return Ok(());
                    }
                    None => self.shared.changed.wait_for(&mut state, IDLE),
                }
            }
        };
        let done = self.copy(how, &batch, injected)?;
        let mut state = self.shared.state.lock();
        self.check(&state)?;
        let lane = &mut state.lanes[self.stream.index()];
        lane.running = false;
        lane.faults.extend(done.err());
        Ok(())
    }

    /// The next operation, if it may start.
    fn pop(&mut self, state: &mut State) -> Option<Op> {
        let lane = &state.lanes[self.stream.index()];
        match lane.ops.front()? {
            Op::Wait(event) => {
                let &(_, at_ns) = event.0.get()?;
                self.ready_ns = self.ready_ns.max(at_ns);
            }
            Op::WaitValue(word, value) => {
                let reached = word_reached(state.words[word.0 as usize], *value);
                reached.then_some(())?;
                self.ready_ns = self.ready_ns.max(monotonic_ns());
            }
            Op::Copy { .. } | Op::Record(_) | Op::WriteValue(..) => {}
        }
        state.lanes[self.stream.index()].ops.pop_front()
    }

    /// An operation that takes no time; returns whom to wake.
    fn instant(&self, op: Op, state: &mut State) -> Vec<super::Waker> {
        match op {
            Op::Record(event) => {
                let capped = state.links[0].is_capped();
                let at_ns = if capped {
                    self.ready_ns
                } else {
                    monotonic_ns()
                };
                let faults = &mut state.lanes[self.stream.index()].faults;
                event.set(outcome(faults), at_ns);
                return state.wakers.clone();
            }
            Op::WriteValue(word, value) => state.words[word.0 as usize] = value,
            Op::Wait(_) | Op::WaitValue(..) | Op::Copy { .. } => {}
        }
        Vec::new()
    }

    fn copy(
        &mut self,
        how: Mechanism,
        batch: &LayerCopy,
        injected: Option<Injection>,
    ) -> Result<Result<(), Fault>, Ended> {
        let fault = |at, text: String| Fault {
            job: batch.job,
            at,
            text,
        };
        match injected {
            Some(Injection::Fail) => {
                let first = batch.transfers(how).next().and_then(Result::ok);
                let at = first.map(|t| (t.plane, t.run.device));
                return Ok(Err(fault(at, "injected failure".to_owned())));
            }
            Some(Injection::Hang) => self.hang()?,
            Some(Injection::Delay(delay)) => {
                let ns = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
                self.ready_ns = monotonic_ns().max(self.ready_ns).saturating_add(ns);
                self.sleep_until(self.ready_ns)?;
            }
            None => {}
        }
        let to_device = batch.plan.direction() == Direction::ToDevice;
        for transfer in batch.transfers(how) {
            let transfer = match transfer {
                Ok(transfer) => transfer,
                Err(refused) => return Ok(Err(fault(None, refused.to_string()))),
            };
            let mut at = 0;
            while at < transfer.run.bytes {
                let bytes = CHUNK.min(transfer.run.bytes - at);
                copy_bytes(&transfer, at, bytes, to_device);
                self.pace(bytes, to_device)?;
                at += bytes;
            }
        }
        Ok(check(batch, to_device).map_err(|(at, text)| fault(Some(at), text)))
    }

    fn injected(&self, state: &mut State) -> Option<Injection> {
        let mine = |i: &(Stream, u64, Injection)| i.0 == self.stream;
        let hit = state.injections.iter().position(|i| mine(i) && i.1 == 0);
        let hit = hit.map(|index| state.injections.remove(index).2);
        let later = state.injections.iter_mut().filter(|i| mine(i));
        later.for_each(|i| i.1 = i.1.saturating_sub(1));
        hit
    }

    /// Until the device is dropped.
    fn hang(&self) -> Result<(), Ended> {
        let mut state = self.shared.state.lock();
        while !state.closed {
            self.shared.changed.wait_for(&mut state, IDLE);
        }
        Err(Ended)
    }

    fn pace(&mut self, bytes: u64, to_device: bool) -> Result<(), Ended> {
        let mut state = self.shared.state.lock();
        let link = &mut state.links[usize::from(to_device)];
        if !link.is_capped() {
            return Ok(());
        }
        let end_ns = link.reserve(self.ready_ns, bytes);
        drop(state);
        self.ready_ns = end_ns;
        self.sleep_until(end_ns)
    }

    fn sleep_until(&self, end_ns: u64) -> Result<(), Ended> {
        loop {
            let now_ns = monotonic_ns();
            if now_ns >= end_ns {
                return Ok(());
            }
            let left = Duration::from_nanos(end_ns - now_ns);
            let Some(sleep) = left.checked_sub(SPIN) else {
                std::thread::yield_now();
                continue;
            };
            let mut state = self.shared.state.lock();
            self.check(&state)?;
            self.shared.changed.wait_for(&mut state, sleep);
        }
    }
}

/// Writes the checksums of what was stored, or compares those of what was loaded.
fn check(batch: &LayerCopy, to_device: bool) -> Result<(), ((usize, u64), String)> {
    let Some(sums) = &batch.sums else {
        return Ok(());
    };
    for piece in batch.transfers(Mechanism::Gather).flatten() {
        let sum = checksum(&piece);
        if !to_device {
            sums.put(piece.plane, piece.run, sum);
        } else if !sums.agrees(piece.plane, piece.run, sum) {
            let text = "the checksum differs from that of the store".to_owned();
            return Err(((piece.plane, piece.run.device), text));
        }
    }
    Ok(())
}

/// Of the device side of a transfer (FNV-1a, 64 bits).
fn checksum(piece: &Transfer<'_>) -> u64 {
    let first = piece.device.address() + piece.run.device;
    let fold = |sum: u64, at: u64| {
        let Ok(address) = usize::try_from(first + at) else {
            return sum; // no region of this process has such an address
        };
        #[expect(unsafe_code, reason = "reads what was just copied")]
        // SAFETY: as in `copy_bytes`; volatile, since another thread may break the protocol that
        // this is here to check.
        let byte = unsafe { std::ptr::with_exposed_provenance::<u8>(address).read_volatile() };
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    };
    (0..piece.run.bytes).fold(0xCBF2_9CE4_8422_2325, fold)
}

/// Moves part of a transfer.
fn copy_bytes(transfer: &Transfer<'_>, at: u64, bytes: u64, to_device: bool) {
    let pointer = |address: u64| -> Option<*mut u8> {
        Some(std::ptr::with_exposed_provenance_mut(
            usize::try_from(address).ok()?,
        ))
    };
    let device = pointer(transfer.device.address() + transfer.run.device + at);
    let host = pointer(transfer.host.address() + transfer.run.host + at);
    let (Some(device), Some(host), Ok(bytes)) = (device, host, usize::try_from(bytes)) else {
        return; // no region of this process has such an address
    };
    let (from, to) = if to_device {
        (host, device)
    } else {
        (device, host)
    };
    #[expect(unsafe_code, reason = "the memcpy of the device")]
    // SAFETY: a `Transfer` lies inside its regions, whose owners the running `LayerCopy` holds; both
    // are memory of this process (`CpuDevice::check`) and open to any thread (`Region::from_raw`).
    // The two may be one buffer, so this is a memmove.
    unsafe {
        std::ptr::copy(from, to, bytes);
    }
}
