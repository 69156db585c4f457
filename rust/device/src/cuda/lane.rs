//! One copy stream: what was enqueued, what is recorded, and what must be kept until it is over.
//!
//! Invariants: `pending` is in the order of the records; a copy is in `open` until a record is
//! behind it, then in that record's flight, until it is known to be over. No locks of its own.

use std::collections::VecDeque;
use std::sync::Arc;

use headrace_core::{Error, Result};

use super::context::Entered;
use super::driver::Handle;
use super::events::Event;
use super::pinned::Block;
use crate::cpu::Injection;
use crate::device::{Fault, LayerCopy, Progress};

/// A copy that is not known to be over, with the memory it may touch.
pub(super) struct Held {
    pub(super) batch: LayerCopy,
    pub(super) _list: Option<Block>,
}

/// A record and the copies since the one before it.
pub(super) struct Flight {
    event: Arc<Event>,
    held: Vec<Held>,
    faults: Vec<Fault>,
}

#[derive(Default)]
pub(super) struct Lane {
    /// None: the driver had no fresh stream after one was given up.
    pub(super) stream: Option<Handle>,
    open: Vec<Held>,
    faults: Vec<Fault>,
    pending: VecDeque<Flight>,
    /// Copies of a stream that broke: nobody knows whether they are over.
    broken: Vec<Held>,
    injections: Vec<(u64, Injection)>,
}

impl Lane {
    pub(super) fn new(stream: Handle) -> Self {
        Self {
            stream: Some(stream),
            ..Self::default()
        }
    }

    /// Fails with `Device` if there is none.
    pub(super) fn handle(&self) -> Result<Handle> {
        self.stream.ok_or_else(|| Error::Device {
            call: "cuStreamCreate",
            text: "no fresh stream after one was given up".to_owned(),
        })
    }

    pub(super) fn inject(&mut self, nth: u64, what: Injection) {
        self.injections.push((nth, what));
    }

    /// What was injected for the copy that starts now.
    pub(super) fn injected(&mut self) -> Option<Injection> {
        let due = self.injections.iter().position(|&(nth, _)| nth == 0);
        let what = due.map(|index| self.injections.remove(index).1);
        for (nth, _) in &mut self.injections {
            *nth = nth.saturating_sub(1);
        }
        what
    }

    pub(super) fn hold(&mut self, held: Held) {
        self.open.push(held);
    }

    pub(super) fn fault(&mut self, job: u64, text: String) {
        self.faults.push(Fault {
            job,
            at: None,
            text,
        });
    }

    /// `event` was recorded behind everything so far.
    pub(super) fn recorded(&mut self, event: Arc<Event>) {
        let held = std::mem::take(&mut self.open);
        let faults = std::mem::take(&mut self.faults);
        self.pending.push_back(Flight {
            event,
            held,
            faults,
        });
    }

    /// Settles the records that are over; what they held, to be dropped without a lock.
    pub(super) fn reap(&mut self, entered: &Entered<'_>) -> Vec<Flight> {
        let mut over = Vec::new();
        while let Some(flight) = self.pending.front() {
            match entered.event_over(flight.event.raw) {
                Ok(true) => over.extend(self.pending.pop_front()),
                Ok(false) => break,
                Err(refused) => {
                    self.break_off(&refused.to_string());
                    break;
                }
            }
        }
        for flight in &mut over {
            let faults = std::mem::take(&mut flight.faults);
            flight.event.set(if faults.is_empty() {
                Progress::Done
            } else {
                Progress::Failed(faults.into())
            });
        }
        over
    }

    /// Everything pending failed.
    fn break_off(&mut self, text: &str) {
        for flight in std::mem::take(&mut self.pending) {
            let mut faults = flight.faults;
            faults.extend(flight.held.iter().map(|held| Fault {
                job: held.batch.job,
                at: None,
                text: text.to_owned(),
            }));
            flight.event.set(Progress::Failed(faults.into()));
            self.broken.extend(flight.held);
        }
    }

    /// Gives up: every pending ticket is lost. What the stream may still touch.
    pub(super) fn give_up(&mut self, text: &str) -> (Option<Handle>, Vec<Held>) {
        let mut held = std::mem::take(&mut self.open);
        self.faults.clear();
        for flight in std::mem::take(&mut self.pending) {
            flight.event.set(Progress::Lost(text.to_owned()));
            held.extend(flight.held);
        }
        held.append(&mut self.broken);
        (self.stream.take(), held)
    }
}
