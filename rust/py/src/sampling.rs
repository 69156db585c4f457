//! `SamplingSpec` for Python.

use headrace_core as core;
use pyo3::prelude::*;

use crate::convert;
use crate::error::to_py;

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct SamplingSpec {
    pub(crate) inner: core::SamplingSpec,
}

#[pymethods]
impl SamplingSpec {
    #[new]
    #[pyo3(signature = (*, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
        presence_penalty=0.0, frequency_penalty=0.0, seed=0, logprobs=None, max_tokens=128,
        min_tokens=0, stop_token_ids=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords, one per field")]
    fn new(
        temperature: f32,
        top_k: i32,
        top_p: f32,
        min_p: f32,
        repetition_penalty: f32,
        presence_penalty: f32,
        frequency_penalty: f32,
        seed: u64,
        logprobs: Option<i32>,
        max_tokens: u32,
        min_tokens: u32,
        stop_token_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let stops = stop_token_ids.map(|ids| convert::tokens("stop_token_ids", ids));
        Ok(Self {
            inner: core::SamplingSpec {
                temperature,
                top_k,
                top_p,
                min_p,
                repetition_penalty,
                presence_penalty,
                frequency_penalty,
                seed,
                logprobs: logprobs.unwrap_or(-1),
                max_tokens,
                min_tokens,
                stop_token_ids: stops.transpose()?.unwrap_or_default(),
            },
        })
    }

    fn validate(&self, py: Python<'_>, vocab_size: u32) -> PyResult<()> {
        let valid = self.inner.validate(vocab_size);
        valid.map_err(|error| to_py(py, &error))
    }

    #[pyo3(signature = (prompt_len, generated, *, max_context))]
    fn finish_reason(
        &self,
        prompt_len: usize,
        generated: &Bound<'_, PyAny>,
        max_context: usize,
    ) -> PyResult<Option<&'static str>> {
        let generated = convert::tokens("generated", generated)?;
        let reason = self
            .inner
            .finish_reason(prompt_len, &generated, false, max_context);
        Ok(reason.map(core::FinishReason::as_str))
    }
}
