//! Errors of the core as the Python classes of `headrace.errors`.

use headrace_core::{CopyFailure, Error};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// The Python exception for `error`; its attributes carry the numbers.
pub(crate) fn to_py(py: Python<'_>, error: &Error) -> PyErr {
    let class = match error {
        Error::Config { .. } => "ConfigError",
        Error::InvalidRequest { .. } => "InvalidRequest",
        Error::PromptTooLong { .. } => "PromptTooLong",
        Error::DuplicateRequest { .. } => "DuplicateRequest",
        Error::UnknownRequest { .. } => "UnknownRequest",
        Error::OutOfSlots { .. } | Error::OutOfPages { .. } | Error::OutOfHostMemory { .. } => {
            "OutOfPages"
        }
        Error::PageState { .. } | Error::HostPageState { .. } => "PageStateError",
        Error::QueueFull { .. } | Error::CopyQueueFull { .. } => "QueueFull",
        Error::Copy(_) => "CopyError",
        Error::Device { .. } => "DeviceError",
        Error::StalePlan { .. } => "StalePlan",
        Error::Closed { .. } => "EngineClosed",
    };
    let py_error = raise(py, class, &error.to_string());
    let value = py_error.value(py);
    let attributes = match error {
        Error::Config { field, .. } | Error::InvalidRequest { field, .. } => {
            value.setattr("field", *field)
        }
        Error::OutOfSlots { needed, free, .. } => value
            .setattr("needed", *needed)
            .and_then(|()| value.setattr("free", *free))
            .and_then(|()| value.setattr("evictable", 0)),
        Error::OutOfHostMemory {
            needed, available, ..
        } => value
            .setattr("needed", *needed)
            .and_then(|()| value.setattr("free", *available))
            .and_then(|()| value.setattr("evictable", 0)),
        Error::Copy(failure) => value
            .setattr("job", failure.job)
            .and_then(|()| value.setattr("page", failure.page))
            .and_then(|()| value.setattr("plane", failure.plane.as_deref()))
            .and_then(|()| value.setattr("layer", failure.layer))
            .and_then(|()| value.setattr("settled", failure.settled)),
        Error::OutOfPages {
            needed,
            free,
            evictable,
            item,
        } => value
            .setattr("needed", *needed)
            .and_then(|()| value.setattr("free", *free))
            .and_then(|()| value.setattr("evictable", *evictable))
            .and_then(|()| value.setattr("item", *item)),
        Error::PageState {
            index,
            page,
            start,
            fault,
        } => value
            .setattr("index", *index)
            .and_then(|()| value.setattr("page", *page))
            .and_then(|()| value.setattr("start", *start))
            .and_then(|()| value.setattr("fault", *fault)),
        Error::DuplicateRequest { id } | Error::UnknownRequest { id } => {
            value.setattr("request_id", id.0)
        }
        Error::HostPageState { page, .. } => value.setattr("page", *page),
        _ => Ok(()),
    };
    match attributes {
        Ok(()) => py_error,
        Err(failed) => failed,
    }
}

/// A `ConfigError` for a name that is none of those expected.
pub(crate) fn invalid_config(
    py: Python<'_>,
    field: &'static str,
    value: &str,
    expected: &str,
) -> PyErr {
    to_py(py, &Error::config(field, format!("{value:?}"), expected))
}

/// The `CopyError` of a failed job.
pub(crate) fn copy_error(py: Python<'_>, failure: &CopyFailure) -> PyErr {
    to_py(py, &Error::Copy(Box::new(failure.clone())))
}

/// An `InvalidRequest` for a value that does not even have the right type.
pub(crate) fn invalid(py: Python<'_>, field: &'static str, value: String, expected: &str) -> PyErr {
    let error = Error::InvalidRequest {
        field,
        value,
        expected: expected.to_owned(),
    };
    to_py(py, &error)
}

/// A broken invariant, found by `check`: a fault of the engine, not of its user.
pub(crate) fn broken(py: Python<'_>, what: &str) -> PyErr {
    raise(py, "HeadraceError", &format!("invariant broken: {what}"))
}

/// A lease or a store that was given back already.
pub(crate) fn released(py: Python<'_>, what: &str) -> PyErr {
    let message = format!("this {what} was given back already; it can be once only");
    raise(py, "LeaseReleased", &message)
}

/// An object of the parent process was used in a forked child.
pub(crate) fn forked(py: Python<'_>) -> PyErr {
    raise(
        py,
        "ForkedProcess",
        "this engine was made in the parent process; make a new one here, or start workers with \
         multiprocessing's `spawn` method",
    )
}

/// The module of the error classes. Loaded with `_core` itself: an import runs Python code, and
/// under a Rust frame that must not happen while the interpreter exits (see `exit`).
pub(crate) fn errors(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = ERRORS.get_or_try_init(py, || py.import("headrace.errors").map(Bound::unbind))?;
    Ok(module.bind(py))
}

fn raise(py: Python<'_>, class: &str, message: &str) -> PyErr {
    let instance = errors(py)
        .and_then(|module| module.getattr(class))
        .and_then(|class| class.call1((message,)));
    match instance {
        Ok(instance) => PyErr::from_value(instance),
        Err(failed) => failed,
    }
}
