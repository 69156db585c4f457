//! `SlotAllocator` for Python.

use headrace_core as core;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::convert;
use crate::door::{Door, Home};
use crate::error::broken;

type DumpRow = (u32, u64, Option<u64>, Option<u64>);

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct SlotAllocator {
    pub(crate) inner: core::SlotAllocator,
    home: Home,
}

#[pymethods]
impl SlotAllocator {
    #[new]
    fn new(py: Python<'_>, total: u32) -> PyResult<Self> {
        let home = Home::here();
        let inner = py.enter(home, || core::SlotAllocator::new(total))?;
        Ok(Self { inner, home })
    }

    fn allocate(&self, request_id: &Bound<'_, PyAny>) -> PyResult<u32> {
        let id = convert::request_id(request_id)?;
        let py = request_id.py();
        Ok(py
            .enter(self.home, || self.inner.allocate(id))?
            .slot
            .index())
    }

    #[pyo3(signature = (request_id, fence=None))]
    fn free(&self, request_id: &Bound<'_, PyAny>, fence: Option<u64>) -> PyResult<u32> {
        let id = convert::request_id(request_id)?;
        let fence = fence.map(core::Epoch);
        let py = request_id.py();
        Ok(py.enter(self.home, || self.inner.free(id, fence))?.index())
    }

    fn retire(&self, py: Python<'_>, epoch: u64) -> PyResult<()> {
        py.enter(self.home, || {
            self.inner.retire(core::Epoch(epoch));
            Ok(())
        })
    }

    fn resize(&self, py: Python<'_>, total: u32) -> PyResult<()> {
        py.enter(self.home, || self.inner.resize(total))
    }

    fn slot_of(&self, request_id: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
        let id = convert::request_id(request_id)?;
        let slot = request_id
            .py()
            .enter(self.home, || Ok(self.inner.slot_of(id)))?;
        Ok(slot.map(core::SlotId::index))
    }

    fn grant_of(&self, request_id: &Bound<'_, PyAny>) -> PyResult<Option<(u32, u64)>> {
        let id = convert::request_id(request_id)?;
        let py = request_id.py();
        let grant = py.enter(self.home, || Ok(self.inner.grant_of(id)))?;
        Ok(grant.map(|grant| (grant.slot.index(), grant.generation)))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.enter(self.home, || Ok(self.inner.stats()))?;
        let dict = PyDict::new(py);
        dict.set_item("free", stats.free)?;
        dict.set_item("in_use", stats.in_use)?;
        dict.set_item("finishing", stats.finishing)?;
        dict.set_item("total", stats.total)?;
        Ok(dict)
    }

    fn dump(&self, py: Python<'_>) -> PyResult<Vec<DumpRow>> {
        py.enter(self.home, || Ok(self.inner.dump()))
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let checked = py.enter(self.home, || Ok(self.inner.check()))?;
        checked.map_err(|what| broken(py, &what))
    }
}
