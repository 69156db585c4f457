//! Settings of the KV memory for Python.

use headrace_core as core;
use pyo3::prelude::*;

use crate::error::invalid_config;

/// Layout and tiers of the KV memory of a scheduler; checked there.
#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct MemoryConfig {
    pub(crate) inner: core::MemoryConfig,
}

#[pymethods]
impl MemoryConfig {
    #[new]
    #[pyo3(signature = (*, page_size=64, num_pages=None, num_layers=1, slot_widths=2, low_pages=None,
        prefix_cache=false, write_policy="write_through", host_pages=0, hybrid=false, snapshots=0,
        staging=0, state_slots=0, snapshot_interval=4096, page_bytes=0, admission="estimate",
        admission_ratio=0.5, preemption="recompute", preempt_every=0, load_back_threshold=1,
        link_bytes_per_ms=50e6, high_step_ms=5.0, row_ms=0.1, token_ms=0.02, low_step_ms=100.0))]
    #[expect(clippy::too_many_arguments, reason = "keywords, one per setting")]
    fn new(
        py: Python<'_>,
        page_size: u32,
        num_pages: Option<u32>,
        num_layers: u32,
        slot_widths: u32,
        low_pages: Option<u32>,
        prefix_cache: bool,
        write_policy: &str,
        host_pages: u32,
        hybrid: bool,
        snapshots: u32,
        staging: u32,
        state_slots: u32,
        snapshot_interval: u32,
        page_bytes: u64,
        admission: &str,
        admission_ratio: f64,
        preemption: &str,
        preempt_every: u64,
        load_back_threshold: u32,
        link_bytes_per_ms: f64,
        high_step_ms: f64,
        row_ms: f64,
        token_ms: f64,
        low_step_ms: f64,
    ) -> PyResult<Self> {
        use core::tree::WritePolicy;
        let policy = match write_policy {
            "write_through" => WritePolicy::WriteThrough,
            "write_through_selective" => WritePolicy::Selective { hits: 2 },
            "write_back" => WritePolicy::WriteBack,
            "none" => WritePolicy::None,
            other => {
                let expected = "write_through, write_through_selective, write_back or none";
                return Err(invalid_config(py, "write_policy", other, expected));
            }
        };
        let admission = match admission {
            "reserve" => core::Admission::Reserve,
            "estimate" => core::Admission::Estimate {
                ratio: admission_ratio,
            },
            other => {
                return Err(invalid_config(
                    py,
                    "admission",
                    other,
                    "estimate or reserve",
                ));
            }
        };
        let preemption = match preemption {
            "recompute" => core::Preemption::Recompute,
            "park" => core::Preemption::Park,
            other => return Err(invalid_config(py, "preemption", other, "recompute or park")),
        };
        let pages = num_pages.map(|num_pages| core::PageConfig {
            num_pages,
            num_layers,
            page_size,
            slot_widths,
            addressing: core::Addressing::Flat,
            cap_high: None,
            cap_low: low_pages,
        });
        let inner = core::MemoryConfig {
            page_size,
            pages,
            prefix_cache,
            policy,
            host_pages,
            snapshots,
            staging,
            state_slots,
            hybrid,
            snapshot_interval,
            page_bytes,
            admission,
            preemption,
            preempt_every,
            load_back_threshold,
            stream: core::StreamBudget {
                bytes_per_ms: link_bytes_per_ms,
                high_ms_base: high_step_ms,
                high_ms_per_row: row_ms,
                high_ms_per_token: token_ms,
                low_step_ms,
                ..core::StreamBudget::default()
            },
        };
        Ok(Self { inner })
    }
}
