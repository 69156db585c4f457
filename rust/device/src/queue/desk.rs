//! Where the engine leaves commands and the worker takes them, and the list of live jobs.
//!
//! Owns: the inbox, the phase of every live job, the number of the next streamed layer. One mutex;
//! `wake` wakes the worker, `idle` those who drain.
//!
//! Invariant: a job is listed from its hand-over until its outcome was delivered, and at most
//! `max_jobs` are.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use headrace_core::sync::{Condvar, Mutex};
use headrace_core::{Error, Result};

use super::job::{LoadJob, StoreJob, WindowJob};
use super::step::Step;
use crate::device::Ticket;

/// Something to do.
pub(super) enum Command {
    Step {
        step: Arc<Step>,
        loads: Vec<LoadJob>,
        window: Option<WindowJob>,
    },
    Store {
        store: StoreJob,
        after: Ticket,
    },
}

impl Command {
    fn jobs(&self) -> Vec<u64> {
        match self {
            Self::Step { loads, window, .. } => {
                let loads = loads.iter().map(|load| load.job);
                loads.chain(window.iter().map(|w| w.job)).collect()
            }
            Self::Store { store, .. } => vec![store.job],
        }
    }
}

/// Where a live job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// In the inbox.
    Queued,
    /// Taken by the worker; the device knows nothing of it.
    Planned,
    /// The device has, or had, some of it.
    Submitted,
    /// Will not be submitted.
    Cancelled,
    /// Has its outcome, which is not delivered yet.
    Ended,
}

pub(super) struct Desk {
    state: Mutex<State>,
    wake: Condvar,
    idle: Condvar,
    max_jobs: usize,
}

struct State {
    inbox: VecDeque<Command>,
    jobs: BTreeMap<u64, Phase>,
    next_k: u64,
    closed: bool,
    stop: bool,
    /// Something changed that the worker should look at.
    poked: bool,
}

impl Desk {
    pub(super) fn new(max_jobs: usize) -> Self {
        Self {
            state: Mutex::new(State {
                inbox: VecDeque::new(),
                jobs: BTreeMap::new(),
                next_k: 0,
                closed: false,
                stop: false,
                poked: false,
            }),
            wake: Condvar::default(),
            idle: Condvar::default(),
            max_jobs,
        }
    }

    /// End of the last window: the next one may not begin before it.
    pub(super) fn next_k(&self) -> u64 {
        self.state.lock().next_k
    }

    /// Takes all of a command's jobs, or none.
    pub(super) fn submit(&self, command: Command) -> Result<()> {
        let mut state = self.state.lock();
        state.admit(&command, self.max_jobs)?;
        if let Command::Step {
            step,
            window: Some(window),
            ..
        } = &command
        {
            state.next_k = window.k0 + step.kv_layers();
        }
        for job in command.jobs() {
            state.jobs.insert(job, Phase::Queued);
        }
        state.inbox.push_back(command);
        drop(state);
        self.wake.notify_all();
        Ok(())
    }

    /// The next command; waits at most `timeout` for something to happen. `None` may come early.
    pub(super) fn next(&self, timeout: Duration) -> Option<Command> {
        let mut state = self.state.lock();
        if state.inbox.is_empty() && !state.poked && !state.stop && !timeout.is_zero() {
            self.wake.wait_for(&mut state, timeout);
        }
        state.poked = false;
        state.inbox.pop_front()
    }

    /// Has the worker look around.
    pub(super) fn poke(&self) {
        self.state.lock().poked = true;
        self.wake.notify_all();
    }

    /// Queued to planned; false if it was cancelled.
    pub(super) fn claim(&self, job: u64) -> bool {
        self.step_phase(job, Phase::Planned)
    }

    /// Planned to submitted; false if it was cancelled.
    pub(super) fn submitted(&self, job: u64) -> bool {
        self.step_phase(job, Phase::Submitted)
    }

    fn step_phase(&self, job: u64, to: Phase) -> bool {
        let mut state = self.state.lock();
        let phase = state.jobs.get_mut(&job);
        let phase = phase.filter(|phase| **phase != Phase::Cancelled);
        phase.map(|phase| *phase = to).is_some()
    }

    pub(super) fn is_cancelled(&self, job: u64) -> bool {
        self.state.lock().jobs.get(&job) == Some(&Phase::Cancelled)
    }

    /// Cancels a job that is not submitted, or in a test also one that is (`late`).
    pub(super) fn cancel(&self, job: u64, late: bool) -> bool {
        let mut state = self.state.lock();
        match state.jobs.get_mut(&job) {
            Some(phase @ (Phase::Queued | Phase::Planned)) => *phase = Phase::Cancelled,
            Some(phase @ Phase::Submitted) if late => *phase = Phase::Cancelled,
            _ => return false,
        }
        state.poked = true;
        drop(state);
        self.wake.notify_all();
        true
    }

    /// A job gets its outcome, after which it cannot be cancelled. True: it was, and that is it.
    pub(super) fn end(&self, job: u64) -> bool {
        let mut state = self.state.lock();
        let phase = state.jobs.get_mut(&job);
        phase.is_some_and(|phase| std::mem::replace(phase, Phase::Ended) == Phase::Cancelled)
    }

    /// The outcome of a job was delivered.
    pub(super) fn finish(&self, job: u64) {
        let mut state = self.state.lock();
        state.jobs.remove(&job);
        let idle = state.jobs.is_empty();
        drop(state);
        if idle {
            self.idle.notify_all();
        }
    }

    /// Waits once for all jobs to be over; a job that is not.
    pub(super) fn drain_for(&self, slice: Duration) -> Option<u64> {
        let mut state = self.state.lock();
        if !state.jobs.is_empty() && !slice.is_zero() {
            self.idle.wait_for(&mut state, slice);
        }
        state.jobs.keys().next().copied()
    }

    pub(super) fn live(&self) -> usize {
        self.state.lock().jobs.len()
    }

    pub(super) fn close(&self) {
        self.state.lock().closed = true;
    }

    /// Ends the worker; jobs that live are given up.
    pub(super) fn stop(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        state.stop = true;
        drop(state);
        self.wake.notify_all();
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.state.lock().stop
    }
}

impl State {
    fn admit(&self, command: &Command, max_jobs: usize) -> Result<()> {
        if self.closed {
            let reason = "the copy queue was shut down".to_owned();
            return Err(Error::Closed { reason });
        }
        let mut jobs = command.jobs();
        let (live, asked) = (self.jobs.len(), jobs.len());
        if live.saturating_add(asked) > max_jobs {
            return Err(Error::CopyQueueFull {
                live,
                asked,
                max_jobs,
            });
        }
        jobs.sort_unstable();
        let twice = jobs.windows(2).find(|pair| pair[0] == pair[1]);
        let lives = jobs.iter().find(|job| self.jobs.contains_key(job));
        if let Some(job) = lives.or(twice.map(|pair| &pair[0])) {
            return Err(Error::request("job", job, "an id of no job that lives"));
        }
        if let Command::Step {
            window: Some(window),
            ..
        } = command
            && window.k0 < self.next_k
        {
            let expected = format!("at least {}, the end of the window before", self.next_k);
            return Err(Error::request("k0", window.k0, expected));
        }
        Ok(())
    }
}
