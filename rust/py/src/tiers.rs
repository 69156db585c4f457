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
    let counters = [
        ("lookups", stats.lookups),
        ("hit_device_tokens", stats.hit_device_tokens),
        ("hit_host_tokens", stats.hit_host_tokens),
        ("lost_no_snapshot_tokens", stats.lost_no_snapshot_tokens),
        ("inserted_pages", stats.inserted_pages),
        ("duplicate_pages", stats.duplicate_pages),
        ("demoted_pages", stats.demoted_pages),
        ("evicted_host_pages", stats.evicted_host_pages),
        ("removed_pages", stats.removed_pages),
        ("splits", stats.splits),
        ("loaded_pages", stats.loaded_pages),
        ("stored_pages", stats.stored_pages),
        ("host_full_tokens", stats.host_full_tokens),
        ("snapshots_taken", stats.snapshots_taken),
        ("evicted_snapshots", stats.evicted_snapshots),
    ];
    for (name, value) in counters {
        dict.set_item(name, value)?;
    }
    let gauges = [
        ("nodes", stats.nodes),
        ("leases", stats.leases),
        ("full_pages", stats.full_pages),
        ("low_pages", stats.low_pages),
        ("host_only_pages", stats.host_only_pages),
        ("loading_pages", stats.loading_pages),
        ("backing_pages", stats.backing_pages),
        ("host_pages", stats.host_pages),
        ("snapshots", stats.snapshots),
    ];
    for (name, value) in gauges {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}
