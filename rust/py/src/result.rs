//! `RequestResult` and `RequestStatus` for Python.

use std::sync::Arc;

use headrace_core as core;
use pyo3::prelude::*;

use crate::convert::phase_name;

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct RequestResult {
    pub(crate) inner: Arc<core::RequestResult>,
}

#[pymethods]
impl RequestResult {
    #[getter]
    fn request_id(&self) -> u64 {
        self.inner.id.0
    }

    #[getter]
    fn token_ids(&self) -> Vec<u32> {
        self.inner.tokens.clone()
    }

    #[getter]
    fn finish_reason(&self) -> &'static str {
        self.inner.reason.as_str()
    }

    #[getter]
    fn message(&self) -> Option<&str> {
        self.inner.message.as_deref()
    }

    #[getter]
    fn prompt_len(&self) -> usize {
        self.inner.prompt_len
    }

    #[getter]
    fn computed_prompt_tokens(&self) -> usize {
        self.inner.computed_prompt_tokens
    }

    /// (device, host, streamed)
    #[getter]
    fn cached_tokens(&self) -> (usize, usize, usize) {
        let cached = self.inner.cached;
        (cached.device, cached.host, cached.streamed)
    }

    #[getter]
    fn recomputed_tokens(&self) -> usize {
        self.inner.recomputed_tokens
    }

    #[getter]
    fn preemptions(&self) -> u32 {
        self.inner.preemptions
    }

    #[getter]
    fn submitted_ns(&self) -> u64 {
        self.inner.stamps.submitted_ns
    }

    #[getter]
    fn first_planned_ns(&self) -> Option<u64> {
        self.inner.stamps.first_planned_ns
    }

    #[getter]
    fn first_token_ns(&self) -> Option<u64> {
        self.inner.stamps.first_token_ns
    }

    #[getter]
    fn finished_ns(&self) -> Option<u64> {
        self.inner.stamps.finished_ns
    }
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct RequestStatus {
    inner: core::RequestStatus,
}

impl From<core::RequestStatus> for RequestStatus {
    fn from(inner: core::RequestStatus) -> Self {
        Self { inner }
    }
}

#[pymethods]
impl RequestStatus {
    #[getter]
    fn phase(&self) -> &'static str {
        match &self.inner {
            core::RequestStatus::Live { phase, .. } => phase_name(*phase),
            core::RequestStatus::Finished(_) => "finished",
        }
    }

    #[getter]
    fn computed(&self) -> usize {
        match &self.inner {
            core::RequestStatus::Live { computed, .. } => *computed,
            core::RequestStatus::Finished(result) => {
                result.computed_prompt_tokens + result.tokens.len().saturating_sub(1)
            }
        }
    }

    #[getter]
    fn token_ids(&self) -> Vec<u32> {
        match &self.inner {
            core::RequestStatus::Live { tokens, .. } => tokens.clone(),
            core::RequestStatus::Finished(result) => result.tokens.clone(),
        }
    }

    #[getter]
    fn result(&self) -> Option<RequestResult> {
        match &self.inner {
            core::RequestStatus::Live { .. } => None,
            core::RequestStatus::Finished(result) => Some(RequestResult {
                inner: result.clone(),
            }),
        }
    }
}
