//! `StepPlan` for Python: the vectors of a plan moved into `NumPy` arrays, none copied.

use headrace_core as core;
use numpy::{IntoPyArray, PyArray1};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::convert;
use crate::error::invalid;
use crate::sampling::SamplingSpec;

type Array<T> = Py<PyArray1<T>>;

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct StepPlan {
    /// Given to the copy queue once.
    pub(crate) copies: Mutex<core::StepCopies>,
    #[pyo3(get)]
    pub(crate) epoch: u64,
    #[pyo3(get)]
    num_decode: usize,
    #[pyo3(get)]
    num_rows: usize,
    #[pyo3(get)]
    decode_width: usize,
    #[pyo3(get)]
    request_ids: Array<u64>,
    #[pyo3(get)]
    slots: Array<i64>,
    #[pyo3(get)]
    starts: Array<i64>,
    #[pyo3(get)]
    token_offsets: Array<i64>,
    #[pyo3(get)]
    token_ids: Array<i64>,
    #[pyo3(get)]
    token_sources: Array<i64>,
    #[pyo3(get)]
    positions: Array<i64>,
    #[pyo3(get)]
    token_slots: Array<i64>,
    #[pyo3(get)]
    block_tables: Array<u32>,
    #[pyo3(get)]
    table_offsets: Array<i64>,
    #[pyo3(get)]
    token_pages: Array<i64>,
    #[pyo3(get)]
    stream_k0: u64,
    #[pyo3(get)]
    snapshots: Vec<(u32, u32)>,
    #[pyo3(get)]
    has_copies: bool,
    #[pyo3(get)]
    sample_rows: Array<i64>,
    #[pyo3(get)]
    sample_index: Array<i64>,
    #[pyo3(get)]
    sampling: Py<SamplingRows>,
}

#[pyclass(frozen, get_all, module = "headrace._core")]
pub(crate) struct SamplingRows {
    temperature: Array<f32>,
    top_k: Array<i32>,
    top_p: Array<f32>,
    min_p: Array<f32>,
    repetition_penalty: Array<f32>,
    presence_penalty: Array<f32>,
    frequency_penalty: Array<f32>,
    uniform: Array<f64>,
    logprobs: Array<i32>,
    history_tokens: Array<i64>,
    history_offsets: Array<i64>,
    history_prompt_lens: Array<i64>,
    banned_tokens: Array<i64>,
    banned_offsets: Array<i64>,
}

fn array<T: numpy::Element>(py: Python<'_>, values: Vec<T>) -> Array<T> {
    values.into_pyarray(py).unbind()
}

impl StepPlan {
    pub(crate) fn new(py: Python<'_>, plan: core::StepPlan) -> PyResult<Self> {
        Ok(Self {
            has_copies: !plan.copies.is_empty(),
            copies: Mutex::new(plan.copies),
            block_tables: array(py, plan.block_tables),
            table_offsets: array(py, plan.table_offsets),
            token_pages: array(py, plan.token_pages),
            stream_k0: plan.stream_k0,
            snapshots: plan.snapshots,
            epoch: plan.epoch.0,
            num_decode: plan.num_decode,
            num_rows: plan.request_ids.len(),
            decode_width: core::decode_width(plan.num_decode),
            request_ids: array(py, plan.request_ids),
            slots: array(py, plan.slots),
            starts: array(py, plan.starts),
            token_offsets: array(py, plan.token_offsets),
            token_ids: array(py, plan.token_ids),
            token_sources: array(py, plan.token_sources),
            positions: array(py, plan.positions),
            token_slots: array(py, plan.token_slots),
            sample_rows: array(py, plan.sample_rows),
            sample_index: array(py, plan.sample_index),
            sampling: Py::new(py, SamplingRows::new(py, plan.sampling))?,
        })
    }
}

impl SamplingRows {
    fn new(py: Python<'_>, rows: core::SamplingRows) -> Self {
        Self {
            temperature: array(py, rows.temperature),
            top_k: array(py, rows.top_k),
            top_p: array(py, rows.top_p),
            min_p: array(py, rows.min_p),
            repetition_penalty: array(py, rows.repetition_penalty),
            presence_penalty: array(py, rows.presence_penalty),
            frequency_penalty: array(py, rows.frequency_penalty),
            uniform: array(py, rows.uniform),
            logprobs: array(py, rows.logprobs),
            history_tokens: array(py, rows.history_tokens),
            history_offsets: array(py, rows.history_offsets),
            history_prompt_lens: array(py, rows.history_prompt_lens),
            banned_tokens: array(py, rows.banned_tokens),
            banned_offsets: array(py, rows.banned_offsets),
        }
    }
}

/// (request id, slot, start, tokens, sampling, prompt, generated)
type Row<'py> = (
    Bound<'py, PyAny>,
    u32,
    usize,
    Bound<'py, PyAny>,
    Option<Bound<'py, SamplingSpec>>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
);

#[pyfunction]
#[pyo3(signature = (rows, *, decode))]
pub(crate) fn build_plan(py: Python<'_>, rows: Vec<Row<'_>>, decode: bool) -> PyResult<StepPlan> {
    let mut builder = core::PlanBuilder::new(core::Epoch(0));
    for (id, slot, start, tokens, sampling, prompt, generated) in rows {
        let tokens = convert::tokens("tokens", &tokens)?;
        let prompt = convert::tokens("prompt", &prompt)?;
        let generated = convert::tokens("generated", &generated)?;
        let too_large = || invalid(py, "slot", slot.to_string(), "a slot of the table");
        let row = core::RowInput {
            request: convert::request_id(&id)?,
            slot: core::SlotId::new(slot).ok_or_else(too_large)?,
            start,
            tokens: &tokens,
            source: None,
            table: &[slot],
            table_tokens: usize::MAX,
            sample: sampling.as_ref().map(|sampling| core::SampleInput {
                spec: &sampling.get().inner,
                prompt: &prompt,
                generated: &generated,
                awaited: 0,
            }),
        };
        match (decode, tokens.len()) {
            (true, 1) => builder.push_decode(row),
            (false, 1..) => builder.push_prefill(row),
            (_, n) => {
                let expected = "one token a decode row, at least one a prefill segment";
                return Err(invalid(py, "tokens", format!("{n} tokens"), expected));
            }
        }
    }
    StepPlan::new(py, builder.finish())
}

#[pyfunction]
pub(crate) fn decode_width(rows: usize) -> usize {
    core::decode_width(rows)
}
