//! `CpuDevice`, `CopyQueue` and its handles for Python.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use headrace_core as core;
use headrace_device::{self as device, CopyQueue as Queue, Device};
use numpy::{PyReadonlyArray2, PyUntypedArrayMethods};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cuda::CudaDevice;
use crate::door::{Door, Home, timeout as to_duration};
use crate::error::{copy_error, invalid, to_py};
use crate::exit;
use crate::region::CopyPlanes;

/// A dropped queue does not hold its thread up for longer than this.
const DROP_WAIT: Duration = Duration::from_secs(1);

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct CpuDevice {
    inner: Arc<device::CpuDevice>,
    home: Home,
}

#[pymethods]
impl CpuDevice {
    #[new]
    #[pyo3(signature = (bandwidth=None))]
    fn new(py: Python<'_>, bandwidth: Option<u64>) -> PyResult<Self> {
        let home = Home::here();
        let inner = py.enter(home, || device::CpuDevice::new(bandwidth))?;
        let inner = Arc::new(inner);
        Ok(Self { inner, home })
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
        py.enter(self.home, || {
            self.inner.inject(stream, nth, what);
            Ok(())
        })
    }
}

/// The stream and the fault that a test names.
pub(crate) fn injection(
    py: Python<'_>,
    stream: &str,
    what: &str,
    seconds: f64,
) -> PyResult<(device::Stream, device::Injection)> {
    let stream = match stream {
        "load" => device::Stream::Load,
        "window" => device::Stream::Window,
        "store" => device::Stream::Store,
        _ => {
            let shown = format!("{stream:?}");
            return Err(invalid(py, "stream", shown, "'load', 'window' or 'store'"));
        }
    };
    let delay = to_duration(py, Some(seconds))?.unwrap_or(Duration::MAX);
    let what = match what {
        "fail" => device::Injection::Fail,
        "hang" => device::Injection::Hang,
        "delay" => device::Injection::Delay(delay),
        _ => {
            let shown = format!("{what:?}");
            return Err(invalid(py, "what", shown, "'fail', 'hang' or 'delay'"));
        }
    };
    Ok((stream, what))
}

/// A device of either class.
#[derive(FromPyObject)]
enum AnyDevice<'py> {
    Cpu(PyRef<'py, CpuDevice>),
    Cuda(PyRef<'py, CudaDevice>),
}

impl AnyDevice<'_> {
    fn inner(&self) -> Arc<dyn Device> {
        match self {
            Self::Cpu(device) => device.inner.clone(),
            Self::Cuda(device) => device.inner.clone(),
        }
    }
}

/// Receives outcomes on the worker thread; must not attach to Python.
pub(crate) type Callback = Arc<dyn Fn(u64, core::CopyOutcome) + Send + Sync>;

/// Where outcomes go: to a list that `poll` empties, unless something is connected.
struct Sink {
    callback: Mutex<Option<Callback>>,
    list: Mutex<OutcomeList>,
}

/// Outcomes nobody has polled; bounded, the oldest goes first.
struct OutcomeList {
    outcomes: VecDeque<(u64, core::CopyOutcome)>,
    max: usize,
    dropped: u64,
}

impl Sink {
    fn deliver(&self, job: u64, outcome: core::CopyOutcome) {
        let callback = self.callback.lock().clone();
        if let Some(callback) = callback {
            callback(job, outcome);
            return;
        }
        let mut list = self.list.lock();
        if list.outcomes.len() >= list.max {
            list.outcomes.pop_front();
            list.dropped += 1;
        }
        list.outcomes.push_back((job, outcome));
    }
}

type Load<'py> = (u64, Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);
type Window<'py> = (u64, Bound<'py, PyAny>, u64, u32);
type Outcome = (u64, &'static str, Option<Py<PyAny>>);

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct CopyQueue {
    pub(crate) inner: Arc<Queue>,
    sink: Arc<Sink>,
    pub(crate) home: Home,
}

impl CopyQueue {
    /// Sends every outcome from now on to `callback` and not to `poll`; `None` undoes it.
    pub(crate) fn connect(&self, callback: Option<Callback>) {
        *self.sink.callback.lock() = callback;
    }
}

#[pymethods]
impl CopyQueue {
    #[new]
    #[pyo3(signature = (device, planes, *, deadline=30.0, max_jobs=1024, max_outcomes=16384,
        copy_check=false))]
    #[expect(clippy::needless_pass_by_value, reason = "as Python gives it")]
    fn new(
        py: Python<'_>,
        device: AnyDevice<'_>,
        planes: &CopyPlanes,
        deadline: f64,
        max_jobs: usize,
        max_outcomes: usize,
        copy_check: bool,
    ) -> PyResult<Self> {
        if max_outcomes == 0 {
            let error = core::Error::config("max_outcomes", 0, "at least 1");
            return Err(to_py(py, &error));
        }
        let home = Home::here();
        let deadline = to_duration(py, Some(deadline))?.unwrap_or(Duration::MAX);
        let sink = Arc::new(Sink {
            callback: Mutex::new(None),
            list: Mutex::new(OutcomeList {
                outcomes: VecDeque::new(),
                max: max_outcomes,
                dropped: 0,
            }),
        });
        let to = sink.clone();
        let config = device::QueueConfig {
            deadline,
            max_jobs,
            copy_check,
            on_done: Box::new(move |job, outcome| to.deliver(job, outcome)),
        };
        let device = device.inner();
        let memory = planes.inner.clone();
        let inner = Arc::new(py.enter(home, || Queue::new(device, memory, config))?);
        exit::watch_copies(&inner);
        let queue = Self { inner, sink, home };
        queue.connect(None);
        Ok(queue)
    }

    #[pyo3(signature = (loads=Vec::new(), window=None))]
    fn start_step(
        &self,
        py: Python<'_>,
        loads: Vec<Load<'_>>,
        window: Option<Window<'_>>,
    ) -> PyResult<StepHandle> {
        let loads = loads.into_iter().map(|(job, kv, state)| {
            Ok(device::LoadJob {
                job,
                kv: kv_pieces(&kv)?,
                state: state_pieces(state.as_ref())?,
            })
        });
        let loads = loads.collect::<PyResult<_>>()?;
        let window = window.map(|(job, pieces, k0, width)| {
            Ok::<_, PyErr>(device::WindowJob {
                job,
                pieces: kv_pieces(&pieces)?,
                k0,
                width,
            })
        });
        let window = window.transpose()?;
        let inner = py.enter(self.home, || self.inner.start_step(loads, window))?;
        let home = self.home;
        Ok(StepHandle { inner, home })
    }

    fn record(&self, py: Python<'_>) -> PyResult<CopyTicket> {
        let inner = py.enter(self.home, || self.inner.record_compute())?;
        Ok(CopyTicket { inner })
    }

    #[pyo3(signature = (job, kv, state=None, *, after=None))]
    fn submit_store(
        &self,
        py: Python<'_>,
        job: u64,
        kv: &Bound<'_, PyAny>,
        state: Option<&Bound<'_, PyAny>>,
        after: Option<&CopyTicket>,
    ) -> PyResult<()> {
        let store = device::StoreJob {
            job,
            kv: kv_pieces(kv)?,
            state: state_pieces(state)?,
        };
        let after = after.map(|ticket| ticket.inner.clone());
        py.enter(self.home, || {
            let after = after.map_or_else(|| self.inner.record_compute(), Ok)?;
            self.inner.submit_store(store, after)
        })
    }

    fn cancel(&self, py: Python<'_>, job: u64) -> PyResult<bool> {
        py.enter(self.home, || Ok(self.inner.cancel(job)))
    }

    #[pyo3(signature = (deadline=None))]
    fn drain(&self, py: Python<'_>, deadline: Option<f64>) -> PyResult<()> {
        let deadline = to_duration(py, deadline)?.unwrap_or_else(|| self.inner.deadline());
        if self.drained(py, deadline)? {
            return Ok(());
        }
        py.enter(self.home, || self.inner.drain(Duration::ZERO))
    }

    #[pyo3(signature = (deadline=None))]
    fn shutdown(&self, py: Python<'_>, deadline: Option<f64>) -> PyResult<()> {
        let deadline = to_duration(py, deadline)?.unwrap_or_else(|| self.inner.deadline());
        self.inner.close();
        let drained = self.drained(py, deadline);
        py.enter(self.home, || {
            self.inner.shutdown_within(Duration::ZERO);
            Ok(())
        })?;
        drained.map(|_| ())
    }

    fn poll(&self, py: Python<'_>) -> PyResult<Vec<Outcome>> {
        let outcomes = py.enter(self.home, || {
            Ok(std::mem::take(&mut self.sink.list.lock().outcomes))
        })?;
        let shown = outcomes.into_iter().map(|(job, outcome)| match outcome {
            core::CopyOutcome::Done => (job, "done", None),
            core::CopyOutcome::Cancelled => (job, "cancelled", None),
            core::CopyOutcome::Failed(failure) => {
                let error = copy_error(py, &failure).into_value(py);
                (job, "failed", Some(error.into_any()))
            }
        });
        Ok(shown.collect())
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (stats, dropped) = py.enter(self.home, || {
            Ok((self.inner.stats(), self.sink.list.lock().dropped))
        })?;
        let dict = PyDict::new(py);
        let streams = [
            ("load", &stats.load),
            ("window", &stats.window),
            ("store", &stats.store),
        ];
        for (name, stream) in streams {
            dict.set_item(name, stream_dict(py, stream)?)?;
        }
        let counters = [
            ("steps", stats.steps),
            ("handover_ns", stats.handover_ns),
            ("handover_max_ns", stats.handover_max_ns),
            ("failures", stats.failures),
            ("cancels", stats.cancels),
            ("time_outs", stats.time_outs),
            ("unsettled", stats.unsettled),
            ("outcomes_dropped", dropped),
        ];
        for (name, value) in counters {
            dict.set_item(name, value)?;
        }
        dict.set_item("outstanding", stats.outstanding)?;
        dict.set_item("gate_wait_ns", stats.gate_wait_ns)?;
        Ok(dict)
    }
}

impl CopyQueue {
    /// Whether every job is terminal within `deadline`; Ctrl-C ends the wait.
    fn drained(&self, py: Python<'_>, deadline: Duration) -> PyResult<bool> {
        let drained = py.wait(self.home, Some(deadline), |slice| {
            Ok(self.inner.drain_for(slice).is_none().then_some(()))
        })?;
        Ok(drained.is_some())
    }
}

impl Drop for CopyQueue {
    fn drop(&mut self) {
        self.inner.shutdown_within(DROP_WAIT);
    }
}

fn stream_dict<'py>(py: Python<'py>, stream: &device::StreamStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let counters = [
        ("bytes", stream.bytes),
        ("jobs", stream.jobs),
        ("runs_before", stream.runs_before),
        ("runs_after", stream.runs_after),
        ("plain", stream.copies[0]),
        ("batch", stream.copies[1]),
        ("gather", stream.copies[2]),
        ("busy_ns", stream.busy_ns),
        ("in_flight", stream.in_flight),
    ];
    for (name, value) in counters {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

/// A point of the forward behind which a store may start.
#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct CopyTicket {
    inner: device::Ticket,
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct StepHandle {
    pub(crate) inner: device::StepHandle,
    pub(crate) home: Home,
}

#[pymethods]
impl StepHandle {
    fn before_layer(&self, py: Python<'_>, model_layer: usize) -> PyResult<()> {
        let passed = py.wait(self.home, Some(self.inner.patience()), |slice| {
            let passed = self.inner.before_layer_for(model_layer, slice)?;
            Ok(passed.then_some(()))
        })?;
        passed.ok_or_else(|| to_py(py, &self.inner.overdue(model_layer)))
    }

    fn after_layer(&self, py: Python<'_>, model_layer: usize) -> PyResult<()> {
        py.enter(self.home, || self.inner.after_layer(model_layer))
    }

    fn finish(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        let failed = py.wait(self.home, Some(self.inner.patience()), |slice| {
            Ok(self.inner.finish_for(slice))
        })?;
        failed.ok_or_else(|| to_py(py, &self.inner.overdue(0)))
    }

    fn release(&self, py: Python<'_>) -> PyResult<()> {
        py.enter(self.home, || {
            self.inner.release();
            Ok(())
        })
    }
}

/// Rows of `[pieces, columns]` uint32.
fn rows<const N: usize>(field: &'static str, array: &Bound<'_, PyAny>) -> PyResult<Vec<[u32; N]>> {
    let wrong = |found: String| {
        let expected = format!("a uint32 array [pieces, {N}]");
        invalid(array.py(), field, found, &expected)
    };
    let array: PyReadonlyArray2<'_, u32> = array
        .extract()
        .map_err(|_| wrong(array.get_type().to_string()))?;
    if array.shape()[1] != N {
        return Err(wrong(format!("{:?}", array.shape())));
    }
    let rows = array.as_array();
    let rows = rows.rows().into_iter();
    Ok(rows
        .map(|row| std::array::from_fn(|column| row[column]))
        .collect())
}

fn kv_pieces(array: &Bound<'_, PyAny>) -> PyResult<Vec<core::KvPiece>> {
    let piece = |[device_page, device_token, host_page, tokens]: [u32; 4]| core::KvPiece {
        device_page,
        device_token,
        host_page: core::HostPage(host_page),
        tokens,
    };
    Ok(rows("kv", array)?.into_iter().map(piece).collect())
}

fn state_pieces(array: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<core::StatePiece>> {
    let piece = |[device_slot, host_slot]: [u32; 2]| core::StatePiece {
        device_slot,
        host_slot,
    };
    let rows = array.map(|array| rows("state", array)).transpose()?;
    Ok(rows.unwrap_or_default().into_iter().map(piece).collect())
}
