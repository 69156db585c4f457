//! The worker thread: takes commands, advances the machine, sleeps. It never attaches to Python.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use headrace_core::{Error, Result};

use super::Shared;
use super::desk::Desk;
use super::machine::Machine;
use crate::clock::monotonic_ns;

/// How often tickets are looked at on a device that cannot wake the worker.
const POLL: Duration = Duration::from_micros(200);

pub(super) fn start(shared: &Arc<Shared>) -> Result<JoinHandle<()>> {
    let desk: Weak<Desk> = Arc::downgrade(&shared.desk);
    let wakes = shared.device.watch(Arc::new(move || {
        if let Some(desk) = desk.upgrade() {
            desk.poke();
        }
    }));
    let shared = shared.clone();
    let thread = std::thread::Builder::new().name("headrace-copy-worker".to_owned());
    let started = thread.spawn(move || run(&shared, wakes));
    started.map_err(|why| {
        let expected = format!("that the system starts it ({why})");
        Error::config("threads", "the copy worker", expected)
    })
}

fn run(shared: &Arc<Shared>, wakes: bool) {
    let mut machine = Machine::new(shared.clone());
    while !shared.desk.is_stopped() {
        let overdue = machine.next_deadline(monotonic_ns());
        let sleep = match overdue {
            Some(left) if !wakes => left.min(POLL),
            Some(left) => left,
            None => shared.config.deadline,
        };
        // Never zero: a wait that is not needed returns at once.
        let mut command = shared.desk.next(sleep.max(Duration::from_nanos(1)));
        while let Some(taken) = command {
            machine.accept(taken);
            command = shared.desk.next(Duration::ZERO);
        }
        while machine.advance(monotonic_ns()) {}
        machine.deliver();
    }
    while let Some(command) = shared.desk.next(Duration::ZERO) {
        machine.accept(command);
    }
    machine.give_up("the copy queue was shut down");
    machine.deliver();
}
