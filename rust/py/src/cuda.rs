//! `CudaDevice` and `EventWaiter` for Python.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use headrace_core as core;
use headrace_device as device;
use pyo3::prelude::*;

use crate::convert::number;
use crate::copy::injection;
use crate::door::{Door, Home, timeout as to_duration};
use crate::error::to_py;
use crate::exit;
use crate::region::HostMemory;

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct CudaDevice {
    pub(crate) inner: Arc<device::CudaDevice>,
    home: Home,
}

#[pymethods]
impl CudaDevice {
    #[new]
    #[pyo3(signature = (ordinal, stream_handle, cubin, symbol, *, owner, thresholds=None,
        cache=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords, one per field")]
    fn new(
        py: Python<'_>,
        ordinal: u32,
        stream_handle: u64,
        cubin: Vec<u8>,
        symbol: String,
        owner: Py<PyAny>,
        thresholds: Option<(u64, Option<u64>)>,
        cache: Option<PathBuf>,
    ) -> PyResult<Self> {
        let home = Home::here();
        let thresholds = thresholds.map(|(plain_bytes, batch_bytes)| core::Thresholds {
            plain_bytes,
            batch_bytes,
        });
        let config = device::CudaConfig {
            ordinal,
            stream: stream_handle,
            owner: Arc::new(owner),
            code: cubin,
            symbol,
            thresholds,
            cache,
        };
        let inner = py.enter(home, || device::CudaDevice::new(config))?;
        let inner = Arc::new(inner);
        Ok(Self { inner, home })
    }

    fn register(&self, py: Python<'_>, memory: &HostMemory) -> PyResult<()> {
        py.enter(self.home, || self.inner.register(&memory.inner))
    }

    #[getter]
    fn thresholds(&self) -> (u64, Option<u64>) {
        let thresholds = device::Device::thresholds(&*self.inner);
        (thresholds.plain_bytes, thresholds.batch_bytes)
    }

    /// For tests.
    #[pyo3(signature = (stream, nth, what, *, seconds=0.0))]
    fn inject(
        &self,
        py: Python<'_>,
        stream: &str,
        nth: u64,
        what: &str,
        seconds: f64,
    ) -> PyResult<()> {
        let (stream, what) = injection(py, stream, what, seconds)?;
        py.enter(self.home, || self.inner.inject(stream, nth, what))
    }
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct EventWaiter {
    inner: device::EventWaiter,
    home: Home,
}

#[pymethods]
impl EventWaiter {
    #[new]
    fn new(py: Python<'_>, ordinal: &Bound<'_, PyAny>) -> PyResult<Self> {
        let home = Home::here();
        let ordinal = number("ordinal", ordinal, "the index of a GPU in [0, 2^32)")?;
        let inner = py.enter(home, || device::EventWaiter::new(ordinal))?;
        Ok(Self { inner, home })
    }

    fn wait(
        &self,
        py: Python<'_>,
        event_handle: &Bound<'_, PyAny>,
        timeout: f64,
    ) -> PyResult<bool> {
        let event: u64 = number("event_handle", event_handle, "a handle in [0, 2^64)")?;
        if timeout.is_nan() {
            let nan = core::Error::config("timeout", timeout, "a number of seconds");
            return Err(to_py(py, &nan));
        }
        let timeout = to_duration(py, Some(timeout))?.unwrap_or(Duration::MAX);
        let began_ns = device::monotonic_ns();
        let over = py.wait(self.home, Some(timeout), |slice| {
            let over = self.inner.wait(event, began_ns, slice)?;
            Ok(over.then_some(()))
        })?;
        if over.is_none() && exit::exiting() {
            // The wait may have been cut short.
            let reason = "the interpreter exits".to_owned();
            return Err(to_py(py, &core::Error::Closed { reason }));
        }
        Ok(over.is_some())
    }

    fn close(&self) {
        self.inner.close();
    }
}
