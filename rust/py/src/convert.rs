//! Numbers and arrays from Python, refused with a typed error that names the argument.

use headrace_core::{FinishReason, Phase, Policy, PriorityClass, RequestId};
use numpy::{PyReadonlyArray1, PyReadonlyArrayDyn};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt};

use crate::error::{invalid, to_py};

pub(crate) fn request_id(value: &Bound<'_, PyAny>) -> PyResult<RequestId> {
    let is_int = value.is_instance_of::<PyInt>() && !value.is_instance_of::<PyBool>();
    let id = if is_int {
        value.extract::<u64>().ok()
    } else {
        None
    };
    id.map(RequestId).ok_or_else(|| {
        let shown = repr(value);
        invalid(value.py(), "request_id", shown, "an integer in [0, 2^64)")
    })
}

/// An integer of a fixed size that names something of the machine.
pub(crate) fn number<T: for<'py> FromPyObjectOwned<'py>>(
    field: &'static str,
    value: &Bound<'_, PyAny>,
    expected: &str,
) -> PyResult<T> {
    let is_int = value.is_instance_of::<PyInt>() && !value.is_instance_of::<PyBool>();
    let number = if is_int { value.extract().ok() } else { None };
    number.ok_or_else(|| {
        let error = headrace_core::Error::config(field, repr(value), expected);
        to_py(value.py(), &error)
    })
}

/// Token ids as they come: an int64 array, or anything that is a sequence of integers.
pub(crate) fn tokens(field: &'static str, value: &Bound<'_, PyAny>) -> PyResult<Box<[u32]>> {
    let py = value.py();
    let expected = "token ids: an int64 array or a sequence of integers in [0, 2^32)";
    let signed: Vec<i64> = if let Ok(array) = value.extract::<PyReadonlyArray1<'_, i64>>() {
        array.as_array().to_vec()
    } else if value.extract::<PyReadonlyArrayDyn<'_, f64>>().is_ok() {
        return Err(invalid(py, field, "a float array".to_owned(), expected));
    } else {
        value
            .extract::<Vec<i64>>()
            .map_err(|_| invalid(py, field, repr(value), expected))?
    };
    let narrowed: Result<Box<[u32]>, i64> = signed
        .into_iter()
        .map(|token| u32::try_from(token).map_err(|_| token))
        .collect();
    narrowed.map_err(|token| invalid(py, field, token.to_string(), expected))
}

pub(crate) fn policy(py: Python<'_>, name: &str) -> PyResult<Policy> {
    match name {
        "fcfs" => Ok(Policy::Fcfs),
        "priority" => Ok(Policy::Priority),
        _ => Err(to_py(
            py,
            &headrace_core::Error::Config {
                field: "policy",
                value: name.to_owned(),
                expected: "'fcfs' or 'priority'".to_owned(),
            },
        )),
    }
}

pub(crate) fn class(py: Python<'_>, name: &str) -> PyResult<PriorityClass> {
    match name {
        "high" => Ok(PriorityClass::High),
        "low" => Ok(PriorityClass::Low),
        _ => Err(invalid(
            py,
            "priority",
            format!("{name:?}"),
            "'high' or 'low'",
        )),
    }
}

pub(crate) fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Waiting => "waiting",
        Phase::Preempted => "preempted",
        Phase::Prefilling => "prefilling",
        Phase::Decoding => "decoding",
    }
}

pub(crate) fn close_reason(error: bool) -> FinishReason {
    if error {
        FinishReason::Error
    } else {
        FinishReason::Abort
    }
}

/// At most this much of a bad value is shown.
const SHOWN: usize = 80;

fn repr(value: &Bound<'_, PyAny>) -> String {
    let text = value.repr().map(|text| text.to_string());
    let mut text = text.unwrap_or_else(|_| "an object without a repr".to_owned());
    if let Some((end, _)) = text.char_indices().nth(SHOWN) {
        text.truncate(end);
        text.push_str("...");
    }
    text
}
