//! Interpreter exit: close every scheduler and copy queue, and let no thread be caught outside Python.
//!
//! Owns the lists of live schedulers and copy queues (weak) and the number of threads that are detached from the
//! interpreter. While it is finalised, a thread that wants to attach again is ended on the spot,
//! which Rust frames do not survive (PyO3/pyo3#6084). So the exit hook closes, waits for those
//! outside, and from then on nobody detaches. Both the flag and the count are changed while
//! attached, so no thread can slip out between them. Lock order: either lock alone.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use headrace_core::{FinishReason, Scheduler};
use headrace_device::{CopyQueue, Deadline, monotonic_ns};
use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;

/// Longest time that detached threads may hold up the exit.
const EXIT_WAIT: Duration = Duration::from_secs(1);

static SCHEDULERS: Mutex<Vec<Weak<Scheduler>>> = Mutex::new(Vec::new());
static COPIES: Mutex<Vec<Weak<CopyQueue>>> = Mutex::new(Vec::new());
/// Set while attached, never cleared.
static EXITING: AtomicBool = AtomicBool::new(false);
static OUTSIDE: Mutex<usize> = Mutex::new(0);
static NOBODY_OUTSIDE: Condvar = Condvar::new();

/// Whether the interpreter is on its way out: do not wait, do not detach.
pub(crate) fn exiting() -> bool {
    EXITING.load(Ordering::Acquire)
}

/// Remembers `scheduler` until it is dropped.
pub(crate) fn watch(scheduler: &Arc<Scheduler>) {
    let mut schedulers = SCHEDULERS.lock();
    schedulers.retain(|known| known.strong_count() > 0);
    schedulers.push(Arc::downgrade(scheduler));
}

/// Remembers `queue` until it is dropped.
pub(crate) fn watch_copies(queue: &Arc<CopyQueue>) {
    let mut queues = COPIES.lock();
    queues.retain(|known| known.strong_count() > 0);
    queues.push(Arc::downgrade(queue));
}

/// Runs `f` detached from Python, or attached once the interpreter exits.
pub(crate) fn detached<T: Send>(py: Python<'_>, f: impl FnOnce() -> T + Send) -> T {
    if exiting() {
        return f();
    }
    let _outside = Outside::enter();
    py.detach(f)
}

/// A thread that is detached; ends once it is attached again.
struct Outside;

impl Outside {
    fn enter() -> Self {
        *OUTSIDE.lock() += 1;
        Self
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        let mut outside = OUTSIDE.lock();
        *outside -= 1;
        if *outside == 0 {
            NOBODY_OUTSIDE.notify_all();
        }
    }
}

/// The process that loaded the module: a forked child has none of its threads to wait for.
static LOADED_IN: AtomicU32 = AtomicU32::new(0);

#[pyfunction]
fn close_all(py: Python<'_>) {
    if LOADED_IN.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    EXITING.store(true, Ordering::Release);
    py.detach(|| {
        let schedulers = std::mem::take(&mut *SCHEDULERS.lock());
        for scheduler in schedulers.iter().filter_map(Weak::upgrade) {
            scheduler.close("the interpreter exits", FinishReason::Abort, monotonic_ns());
        }
        let queues = std::mem::take(&mut *COPIES.lock());
        for queue in queues.iter().filter_map(Weak::upgrade) {
            // Nobody is left to read what still comes.
            queue.shutdown_within(Duration::ZERO);
        }
        let deadline = Deadline::after(Some(EXIT_WAIT));
        let mut outside = OUTSIDE.lock();
        while *outside > 0 {
            let left = deadline.slice(EXIT_WAIT);
            if left.is_zero() {
                break;
            }
            NOBODY_OUTSIDE.wait_for(&mut outside, left);
        }
    });
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    LOADED_IN.store(std::process::id(), Ordering::Relaxed);
    let close_all = wrap_pyfunction!(close_all, module)?;
    let atexit = module.py().import("atexit")?;
    atexit.call_method1("register", (close_all,))?;
    Ok(())
}
