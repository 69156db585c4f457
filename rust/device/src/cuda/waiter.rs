//! Waits for an event of whoever runs the forward, with an end.
//!
//! A step may be over in less than a millisecond, and its tokens are waited for, so the wait spins
//! on the event as the driver's own does; that one cannot be ended. Owns whether it was closed, which
//! ends the waits of every thread. No locks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use headrace_core::{Error, Result};

use super::context::Context;
use super::driver::{Driver, Handle};
use crate::clock::{Deadline, monotonic_ns};

/// So long the processor is kept, for steps that are as short as a turn of other threads on it.
const SPIN_NS: u64 = 1_000_000;
/// From here on a pause costs a step little, and the processor is wanted elsewhere.
const YIELD_NS: u64 = 50_000_000;
const PAUSE: Duration = Duration::from_micros(50);
/// Between two looks, so that the driver's lock is free for other threads.
const SPINS: u32 = 16;

/// Waits for events of one GPU, on any number of threads.
pub struct EventWaiter {
    context: Arc<Context>,
    closed: AtomicBool,
}

impl EventWaiter {
    /// Fails with `Config` without a driver or such a GPU, `Device` for what the driver refuses.
    pub fn new(ordinal: u32) -> Result<Self> {
        Self::with_driver(Driver::load()?, ordinal)
    }

    pub(super) fn with_driver(driver: Driver, ordinal: u32) -> Result<Self> {
        let context = Context::retain(driver, ordinal)?;
        let closed = AtomicBool::new(false);
        Ok(Self { context, closed })
    }

    /// From now on an event is looked at, and not waited for. Ends the waits of other threads.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Whether all before the last record of `event` is over, waiting for it for at most `limit`.
    ///
    /// `began_ns`: when the wait began, of which this call may be a part. Looks at least once.
    /// Fails with `Device` for what the driver reports, faults of kernels included; `Closed` if it
    /// is not over and the waiter was closed.
    pub fn wait(&self, event: u64, began_ns: u64, limit: Duration) -> Result<bool> {
        let event = Handle::try_from(event)
            .map_err(|_| Error::request("event", event, "a handle of this process"))?;
        let entered = self.context.enter()?;
        let deadline = Deadline::after(Some(limit));
        loop {
            // Before the look: a thread that was kept from running must not miss what has ended.
            let left = deadline.slice(PAUSE);
            if entered.event_over(event)? {
                return Ok(true);
            }
            if self.closed.load(Ordering::Acquire) {
                let reason = "closed while a step was on the GPU".to_owned();
                return Err(Error::Closed { reason });
            }
            if left.is_zero() {
                return Ok(false);
            }
            match monotonic_ns().saturating_sub(began_ns) {
                ..SPIN_NS => (0..SPINS).for_each(|_| std::hint::spin_loop()),
                SPIN_NS..YIELD_NS => std::thread::yield_now(),
                YIELD_NS.. => std::thread::park_timeout(left),
            }
        }
    }
}
