//! `Scheduler` for Python.

use std::sync::Arc;

use headrace_core as core;
use headrace_device::monotonic_ns;
use numpy::{IntoPyArray, PyArray1, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::convert;
use crate::copy::{CopyQueue, StepHandle};
use crate::door::{Door, Home, timeout as to_duration};
use crate::error::broken;
use crate::exit;
use crate::memory::MemoryConfig;
use crate::plan::StepPlan;
use crate::result::{RequestResult, RequestStatus};
use crate::sampling::SamplingSpec;
use crate::slots::SlotAllocator;

type Finished = Vec<(u64, &'static str)>;

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct Scheduler {
    inner: Arc<core::Scheduler>,
    /// Layers of a LOW page.
    width: u32,
    home: Home,
}

#[pymethods]
impl Scheduler {
    #[new]
    #[pyo3(signature = (slots, *, max_context, vocab_size, max_batch_tokens=512, max_waiting=4096,
        max_results=16384, policy="fcfs", memory=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords, one per limit")]
    fn new(
        py: Python<'_>,
        slots: &SlotAllocator,
        max_context: usize,
        vocab_size: u32,
        max_batch_tokens: usize,
        max_waiting: usize,
        max_results: usize,
        policy: &str,
        memory: Option<&MemoryConfig>,
    ) -> PyResult<Self> {
        let config = core::SchedulerConfig {
            max_batch_tokens,
            max_waiting,
            max_results,
            max_context,
            vocab_size,
            policy: convert::policy(py, policy)?,
            memory: memory
                .map(|memory| memory.inner.clone())
                .unwrap_or_default(),
        };
        let home = Home::here();
        let width = config
            .memory
            .pages
            .as_ref()
            .map_or(1, |pages| pages.slot_widths);
        let inner = Arc::new(py.enter(home, || core::Scheduler::new(config, &slots.inner))?);
        exit::watch(&inner);
        Ok(Self { inner, width, home })
    }

    #[pyo3(signature = (prompt, sampling, *, request_id=None, priority="high"))]
    fn submit(
        &self,
        prompt: &Bound<'_, PyAny>,
        sampling: &SamplingSpec,
        request_id: Option<&Bound<'_, PyAny>>,
        priority: &str,
    ) -> PyResult<u64> {
        let py = prompt.py();
        let spec = core::RequestSpec {
            id: request_id.map(convert::request_id).transpose()?,
            prompt: convert::tokens("prompt", prompt)?,
            sampling: sampling.inner.clone(),
            class: convert::class(py, priority)?,
        };
        let id = py.enter(self.home, || self.inner.submit(spec, monotonic_ns()))?;
        Ok(id.0)
    }

    #[pyo3(signature = (timeout=None))]
    fn next_plan(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<StepPlan>> {
        let timeout = to_duration(py, timeout)?;
        let plan = py.wait(self.home, timeout, |slice| {
            match self.inner.next_plan(slice, monotonic_ns)? {
                core::NextPlan::Plan(plan) => Ok(Some(plan)),
                core::NextPlan::TimedOut => Ok(None),
            }
        })?;
        plan.map(|plan| StepPlan::new(py, *plan)).transpose()
    }

    fn plan_ahead(&self, py: Python<'_>, plan: &StepPlan) -> PyResult<Option<StepPlan>> {
        let epoch = core::Epoch(plan.epoch);
        let ahead = py.enter(self.home, || self.inner.plan_ahead(epoch))?;
        ahead.map(|plan| StepPlan::new(py, plan)).transpose()
    }

    #[pyo3(signature = (plan, tokens, stops=None))]
    fn commit<'py>(
        &self,
        py: Python<'py>,
        plan: &StepPlan,
        tokens: &Bound<'_, PyArray1<i32>>,
        stops: Option<&Bound<'_, PyArray1<bool>>>,
    ) -> PyResult<(Finished, Bound<'py, PyArray1<bool>>)> {
        let tokens = tokens.try_readonly()?.as_array().to_vec();
        let stops = match stops {
            Some(stops) => stops.try_readonly()?.as_array().to_vec(),
            None => Vec::new(),
        };
        let epoch = core::Epoch(plan.epoch);
        let report = py.enter(self.home, || {
            self.inner.commit(epoch, &tokens, &stops, monotonic_ns())
        })?;
        let finished = report.finished.iter();
        let finished = finished
            .map(|(id, reason)| (id.0, reason.as_str()))
            .collect();
        Ok((finished, report.accepted.into_pyarray(py)))
    }

    /// From now on the queue tells this scheduler how copies ended.
    fn connect(&self, copies: &CopyQueue) {
        self.inner.stream_from(copies.inner.next_k());
        let scheduler = Arc::downgrade(&self.inner);
        copies.connect(Some(Arc::new(move |job, outcome| {
            if let Some(scheduler) = scheduler.upgrade() {
                scheduler.complete(job, outcome);
            }
        })));
    }

    /// Hands copies to the host that have become due to the queue; returns how many.
    fn start_stores(&self, py: Python<'_>, copies: &CopyQueue) -> PyResult<usize> {
        py.enter(self.home, || {
            let stores = self.inner.take_stores();
            let count = stores.len();
            for store in stores {
                let job = store.job;
                if let Err(error) = copies.store(store) {
                    self.inner.complete(job, CopyQueue::refused(job, &error));
                }
            }
            Ok(count)
        })
    }

    /// Hands the copies of a plan to the queue and returns the gates of its step.
    fn start_step(
        &self,
        py: Python<'_>,
        plan: &StepPlan,
        copies: &CopyQueue,
    ) -> PyResult<Option<StepHandle>> {
        let step = std::mem::take(&mut *plan.copies.lock());
        if step.is_empty() {
            return Ok(None);
        }
        let jobs: Vec<u64> = step
            .loads
            .iter()
            .map(|load| load.job)
            .chain(step.window.as_ref().map(|window| window.job))
            .collect();
        let width = self.width;
        let handle = py.enter(self.home, || {
            let started = copies.start(step, width);
            if let Err(error) = &started {
                for job in jobs {
                    self.inner.complete(job, CopyQueue::refused(job, error));
                }
            }
            started
        })?;
        Ok(Some(copies.handle(handle)))
    }

    fn memory_stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.enter(self.home, || Ok(self.inner.memory_stats()))?;
        memory_dict(py, &stats)
    }

    fn fail(&self, py: Python<'_>, plan: &StepPlan, message: &str) -> PyResult<Vec<u64>> {
        let epoch = core::Epoch(plan.epoch);
        let failed = py.enter(self.home, || {
            self.inner.fail(epoch, message, monotonic_ns())
        })?;
        Ok(failed.into_iter().map(|id| id.0).collect())
    }

    fn abort(&self, request_id: &Bound<'_, PyAny>) -> PyResult<bool> {
        let id = convert::request_id(request_id)?;
        let py = request_id.py();
        py.enter(self.home, || Ok(self.inner.abort(id, monotonic_ns())))
    }

    fn poll(&self, request_id: &Bound<'_, PyAny>) -> PyResult<RequestStatus> {
        let id = convert::request_id(request_id)?;
        let status = request_id.py().enter(self.home, || self.inner.poll(id))?;
        Ok(status.into())
    }

    #[pyo3(signature = (request_id, timeout=None))]
    fn wait(
        &self,
        request_id: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<Option<RequestResult>> {
        let id = convert::request_id(request_id)?;
        let py = request_id.py();
        let timeout = to_duration(py, timeout)?;
        let result = py.wait(self.home, timeout, |slice| {
            Ok(match self.inner.wait(id, slice)? {
                core::RequestStatus::Finished(result) => Some(result),
                core::RequestStatus::Live { .. } => None,
            })
        })?;
        Ok(result.map(|inner| RequestResult { inner }))
    }

    fn take_result(&self, request_id: &Bound<'_, PyAny>) -> PyResult<RequestResult> {
        let id = convert::request_id(request_id)?;
        let inner = request_id
            .py()
            .enter(self.home, || self.inner.take_result(id))?;
        Ok(RequestResult { inner })
    }

    #[pyo3(signature = (reason="closed by its owner", *, error=false))]
    fn close(&self, py: Python<'_>, reason: &str, error: bool) -> PyResult<()> {
        let finish = convert::close_reason(error);
        py.enter(self.home, || {
            self.inner.close(reason, finish, monotonic_ns());
            Ok(())
        })
    }

    #[getter]
    fn closed(&self, py: Python<'_>) -> PyResult<bool> {
        py.enter(self.home, || Ok(self.inner.is_closed()))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.enter(self.home, || Ok(self.inner.stats()))?;
        let dict = PyDict::new(py);
        let gauges = [
            ("waiting", stats.waiting),
            ("running", stats.running),
            ("results", stats.results),
        ];
        let counters = [
            ("results_dropped", stats.results_dropped),
            ("submitted", stats.submitted),
            ("finished_stop", stats.finished_stop),
            ("finished_length", stats.finished_length),
            ("finished_abort", stats.finished_abort),
            ("finished_error", stats.finished_error),
            ("steps", stats.steps),
            ("prompt_tokens", stats.prompt_tokens),
            ("cached_device_tokens", stats.cached_device_tokens),
            ("cached_host_tokens", stats.cached_host_tokens),
            ("cached_streamed_tokens", stats.cached_streamed_tokens),
            ("recomputed_tokens", stats.recomputed_tokens),
            ("preemptions", stats.preemptions),
            ("failed_copy_rows", stats.failed_copy_rows),
            ("deferred_rows", stats.deferred_rows),
            ("generated_tokens", stats.generated_tokens),
        ];
        for (name, value) in gauges {
            dict.set_item(name, value)?;
        }
        for (name, value) in counters {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let checked = py.enter(self.home, || Ok(self.inner.check()))?;
        checked.map_err(|what| broken(py, &what))
    }
}

fn class_dict<'py>(py: Python<'py>, class: &core::ClassStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("cap", class.cap)?;
    dict.set_item("used", class.used)?;
    let slots = [
        ("request", class.request),
        ("tree", class.tree),
        ("copy", class.copy),
        ("pending", class.pending),
        ("partial", class.partial),
    ];
    for (name, value) in slots {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

fn memory_dict<'py>(py: Python<'py>, stats: &core::MemoryStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let pages = stats.pages.as_ref().map(|pages| {
        let dict = PyDict::new(py);
        dict.set_item("total", pages.num_pages)?;
        dict.set_item("free", pages.free)?;
        dict.set_item("high", class_dict(py, &pages.high)?)?;
        dict.set_item("low", class_dict(py, &pages.low)?)?;
        Ok::<_, PyErr>(dict)
    });
    dict.set_item("pages", pages.transpose()?)?;
    let tree = stats
        .tree
        .as_ref()
        .map(|tree| crate::tiers::tree_dict(py, tree));
    dict.set_item("tree", tree.transpose()?)?;
    let gauges = [
        ("host_free", stats.host_free),
        ("host_total", stats.host_total),
        ("snapshots_free", stats.snapshots_free),
        ("snapshots_total", stats.snapshots_total),
        ("jobs", stats.jobs),
    ];
    for (name, value) in gauges {
        dict.set_item(name, value)?;
    }
    let counters = [
        ("copies_failed", stats.copies_failed),
        ("copies_abandoned", stats.copies_abandoned),
        ("stores_dropped", stats.stores_dropped),
        ("snapshots_skipped", stats.snapshots_skipped),
        ("parked", stats.parked),
        ("resumed", stats.resumed),
        ("streamed_pages", stats.streamed_pages),
        ("stream_overruns", stats.stream_overruns),
    ];
    for (name, value) in counters {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}
