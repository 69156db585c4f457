//! Events: made without timing, used again, destroyed with the device.
//!
//! Owns: the events nobody uses. One mutex, taken alone. A wait that was enqueued for an event keeps
//! the record it was enqueued for, so recording the event again disturbs nobody.

use std::sync::{Arc, OnceLock};

use headrace_core::Result;
use headrace_core::sync::Mutex;

use super::context::{Context, Entered};
use super::driver::Handle;
use crate::device::{Progress, Stream};

/// The events of a device.
pub(super) struct Events {
    context: Arc<Context>,
    free: Mutex<Vec<Handle>>,
}

/// A recorded event, or one about to be.
pub(super) struct Event {
    pub(super) pool: Arc<Events>,
    pub(super) raw: Handle,
    /// Where it is recorded.
    pub(super) stream: Stream,
    /// Set once: how what is before it went.
    over: OnceLock<Progress>,
}

impl Events {
    pub(super) fn new(context: Arc<Context>) -> Arc<Self> {
        Arc::new(Self {
            context,
            free: Mutex::new(Vec::new()),
        })
    }

    /// An event for one record on `stream`. Fails with `Device`.
    pub(super) fn take(self: &Arc<Self>, entered: &Entered<'_>, stream: Stream) -> Result<Event> {
        let free = self.free.lock().pop();
        let raw = match free {
            Some(raw) => raw,
            None => entered.new_event()?,
        };
        Ok(Event {
            pool: self.clone(),
            raw,
            stream,
            over: OnceLock::new(),
        })
    }
}

impl Event {
    /// How far it is known to be.
    pub(super) fn progress(&self) -> Progress {
        self.over.get().cloned().unwrap_or(Progress::Pending)
    }

    /// The first end stays.
    pub(super) fn set(&self, progress: Progress) {
        let _ = self.over.set(progress);
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.pool.free.lock().push(self.raw);
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let Ok(entered) = self.context.enter() else {
            return;
        };
        for &event in &*self.free.lock() {
            entered.destroy_event(event);
        }
    }
}
