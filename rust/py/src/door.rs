//! The one way into the core: detach from Python, run, map the error.

use std::time::Duration;

use headrace_core::{Error, Result};
use headrace_device::Deadline;
use pyo3::prelude::*;

use crate::error::{self, to_py};
use crate::exit;

/// Longest time without a look at Python's signals, so that Ctrl-C ends a wait.
const SIGNAL_SLICE: Duration = Duration::from_millis(50);

/// The process an object was made in. Threads and locks do not survive a fork, so every call in a
/// child is refused.
#[derive(Clone, Copy)]
pub(crate) struct Home(u32);

impl Home {
    pub(crate) fn here() -> Self {
        Self(std::process::id())
    }

    fn check(self, py: Python<'_>) -> PyResult<()> {
        if self.0 == std::process::id() {
            return Ok(());
        }
        Err(error::forked(py))
    }
}

pub(crate) trait Door {
    /// Runs `f` without the GIL.
    fn enter<T: Send>(self, home: Home, f: impl FnOnce() -> Result<T> + Send) -> PyResult<T>;

    /// Calls `f` with the time it may wait until it gives a value or `timeout` is over.
    fn wait<T: Send>(
        self,
        home: Home,
        timeout: Option<Duration>,
        f: impl Fn(Duration) -> Result<Option<T>> + Send + Sync,
    ) -> PyResult<Option<T>>;
}

impl Door for Python<'_> {
    fn enter<T: Send>(self, home: Home, f: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
        home.check(self)?;
        exit::detached(self, f).map_err(|error| to_py(self, &error))
    }

    fn wait<T: Send>(
        self,
        home: Home,
        timeout: Option<Duration>,
        f: impl Fn(Duration) -> Result<Option<T>> + Send + Sync,
    ) -> PyResult<Option<T>> {
        let deadline = Deadline::after(timeout);
        loop {
            let slice = deadline.slice(SIGNAL_SLICE);
            if let Some(value) = self.enter(home, || f(slice))? {
                return Ok(Some(value));
            }
            self.check_signals()?;
            if slice.is_zero() || exit::exiting() {
                return Ok(None);
            }
        }
    }
}

/// Seconds from Python as a duration. `None` waits for ever; a negative number does not wait.
pub(crate) fn timeout(py: Python<'_>, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    let Some(seconds) = seconds else {
        return Ok(None);
    };
    if seconds.is_nan() {
        let error = Error::Config {
            field: "timeout",
            value: seconds.to_string(),
            expected: "seconds, or None to wait for ever".to_owned(),
        };
        return Err(to_py(py, &error));
    }
    // A time too long to represent is never.
    Ok(Duration::try_from_secs_f64(seconds.max(0.0)).ok())
}
