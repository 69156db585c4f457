//! What ties a scheduler to its copy queue: both stay in Rust, Python only says when.

use headrace_core as core;
use headrace_device as device;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::copy::{CopyQueue, StepHandle};

impl CopyQueue {
    /// Hands the copies of a step over; `width` is that of a LOW page.
    pub(crate) fn start(
        &self,
        step: core::StepCopies,
        width: u32,
    ) -> core::Result<device::StepHandle> {
        let loads = step.loads.into_iter().map(|load| device::LoadJob {
            job: load.job,
            kv: load.kv,
            state: load.state,
        });
        let window = step.window.map(|window| device::WindowJob {
            job: window.job,
            pieces: window.pieces,
            k0: window.k0,
            width,
        });
        self.inner.start_step(loads.collect(), window)
    }

    /// Hands a store over, behind everything the compute stream has been given so far.
    pub(crate) fn store(&self, store: core::StoreCopy) -> core::Result<()> {
        let after = self.inner.record_compute()?;
        let job = device::StoreJob {
            job: store.job,
            kv: store.kv,
            state: store.state,
        };
        self.inner.submit_store(job, after)
    }

    pub(crate) fn handle(&self, inner: device::StepHandle) -> StepHandle {
        StepHandle {
            inner,
            home: self.home,
        }
    }

    /// The outcome of a job that the queue did not take.
    pub(crate) fn refused(job: u64, error: &core::Error) -> core::CopyOutcome {
        let failure = core::CopyFailure::of(job, error.to_string());
        core::CopyOutcome::Failed(Box::new(failure))
    }
}

/// The counts of a prefix tree by name.
pub(crate) fn tree_dict<'py>(
    py: Python<'py>,
    stats: &core::tree::TreeStats,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, count) in stats.rows() {
        dict.set_item(name, count)?;
    }
    Ok(dict)
}
