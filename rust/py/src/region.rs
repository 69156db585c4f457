//! Memory of the copy queue for Python: `Region`, `HostMemory`, `CopyPlanes`.

use std::sync::Arc;

use headrace_core as core;
use headrace_device as device;
use numpy::PyArray1;
use numpy::ndarray::ArrayView1;
use pyo3::prelude::*;

use crate::door::{Door, Home};
use crate::error::to_py;

/// A range of addresses that keeps its owner (a tensor, usually) alive.
#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct Region {
    inner: device::Region,
}

#[pymethods]
impl Region {
    #[new]
    #[pyo3(signature = (data_ptr, nbytes, owner, *, cuda=None))]
    fn new(
        py: Python<'_>,
        data_ptr: u64,
        nbytes: u64,
        owner: Py<PyAny>,
        cuda: Option<u32>,
    ) -> PyResult<Self> {
        if data_ptr == 0 && nbytes > 0 {
            let error = core::Error::config("data_ptr", 0, "the address of the owner's memory");
            return Err(to_py(py, &error));
        }
        let space = cuda.map_or(device::Space::Host, device::Space::Cuda);
        #[expect(unsafe_code, reason = "addresses of tensors come as integers")]
        // SAFETY: the caller states that `owner` keeps `nbytes` bytes at `data_ptr` allocated and
        // writable, as tensors do; `owner` is held as long as the region or a copy lives.
        let inner = unsafe { device::Region::from_raw(data_ptr, nbytes, space, Arc::new(owner)) };
        Ok(Self { inner })
    }

    #[getter]
    fn data_ptr(&self) -> u64 {
        self.inner.address()
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.bytes()
    }
}

/// A budget of host memory, mapped at its exact size.
#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct HostMemory {
    pub(crate) inner: device::HostMemory,
}

#[pymethods]
impl HostMemory {
    #[new]
    #[pyo3(signature = (nbytes, *, touch_threads=0))]
    fn new(py: Python<'_>, nbytes: u64, touch_threads: usize) -> PyResult<Self> {
        let inner = py.enter(Home::here(), || {
            let memory = device::HostMemory::new(nbytes)?;
            if touch_threads > 0 {
                memory.touch(touch_threads);
            }
            Ok(memory)
        })?;
        Ok(Self { inner })
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.bytes()
    }

    #[pyo3(signature = (offset=0, nbytes=None))]
    fn region(&self, py: Python<'_>, offset: u64, nbytes: Option<u64>) -> PyResult<Region> {
        let bytes = nbytes.unwrap_or_else(|| self.inner.bytes().saturating_sub(offset));
        let inner = self.inner.region().slice(offset, bytes);
        let inner = inner.map_err(|error| to_py(py, &error))?;
        Ok(Region { inner })
    }

    #[pyo3(signature = (offset=0, nbytes=None))]
    fn array<'py>(
        slf: &Bound<'py, Self>,
        offset: u64,
        nbytes: Option<u64>,
    ) -> PyResult<Bound<'py, PyArray1<u8>>> {
        let py = slf.py();
        let region = slf.get().region(py, offset, nbytes)?.inner;
        let too_large = |_| {
            to_py(
                py,
                &core::Error::config("nbytes", region.bytes(), "an address"),
            )
        };
        let len = usize::try_from(region.bytes()).map_err(too_large)?;
        let address = usize::try_from(region.address()).map_err(too_large)?;
        #[expect(unsafe_code, reason = "a view of memory that numpy did not allocate")]
        // SAFETY: the range lies inside the mapping (`slice`), which lives as long as `slf`, the base
        // object of the array. Copies write it beside Python: as with any tensor, whoever reads
        // waits for them.
        unsafe {
            let pointer = std::ptr::with_exposed_provenance::<u8>(address);
            let view = ArrayView1::from_shape_ptr(len, pointer);
            Ok(PyArray1::borrow_from_array(&view, slf.clone().into_any()))
        }
    }
}

/// (name, bytes, layer stride, page or slot stride, device region, host region).
type Plane<'py> = (
    String,
    u64,
    u64,
    u64,
    PyRef<'py, Region>,
    PyRef<'py, Region>,
);

/// Registry of planes with their memory.
#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct CopyPlanes {
    pub(crate) inner: Arc<device::CopyMemory>,
}

#[pymethods]
impl CopyPlanes {
    #[new]
    #[pyo3(signature = (model_layers, *, pages=0, page_tokens=0, host_pages=0, host_page_tokens=None,
        kv_planes=Vec::new(), slots=0, snapshots=0, state_planes=Vec::new()))]
    #[expect(
        clippy::too_many_arguments,
        clippy::needless_pass_by_value,
        reason = "keywords, one per field, as Python gives them"
    )]
    fn new(
        py: Python<'_>,
        model_layers: Vec<String>,
        pages: u32,
        page_tokens: u32,
        host_pages: u32,
        host_page_tokens: Option<u32>,
        kv_planes: Vec<Plane<'_>>,
        slots: u32,
        snapshots: u32,
        state_planes: Vec<Plane<'_>>,
    ) -> PyResult<Self> {
        let (layers, kv_layers, state_layers) =
            layer_kinds(&model_layers).map_err(|error| to_py(py, &error))?;
        let kv = core::KvShape {
            layers: kv_layers,
            pages,
            page_tokens,
            host_pages,
            host_page_tokens: host_page_tokens.unwrap_or(page_tokens),
        };
        let state = core::StateShape {
            layers: state_layers,
            slots,
            snapshots,
        };
        let regions = kv_planes.iter().chain(&state_planes);
        let (on_device, on_host) = regions
            .map(|plane| (plane.4.inner.clone(), plane.5.inner.clone()))
            .unzip();
        let kv_planes = kv_planes.into_iter().map(|plane| core::KvPlane {
            name: plane.0,
            token_bytes: plane.1,
            layer_stride: plane.2,
            page_stride: plane.3,
        });
        let state_planes = state_planes.into_iter().map(|plane| core::StatePlane {
            name: plane.0,
            bytes: plane.1,
            layer_stride: plane.2,
            slot_stride: plane.3,
        });
        let (kv_planes, state_planes) = (kv_planes.collect(), state_planes.collect());
        let planes = core::Planes::new(kv, kv_planes, state, state_planes, layers);
        let memory = planes.and_then(|planes| device::CopyMemory::new(planes, on_device, on_host));
        let inner = Arc::new(memory.map_err(|error| to_py(py, &error))?);
        Ok(Self { inner })
    }

    #[getter]
    fn names(&self) -> Vec<String> {
        let planes = self.inner.planes();
        let names = (0..planes.len()).map(|plane| planes.name(plane).to_owned());
        names.collect()
    }

    #[getter]
    fn kv_layers(&self) -> u32 {
        self.inner.planes().kv_shape().layers
    }
}

fn layer_kinds(names: &[String]) -> core::Result<(Vec<core::LayerKind>, u32, u32)> {
    let (mut kv, mut state) = (0, 0);
    let next = |count: &mut u32| {
        *count += 1;
        *count - 1
    };
    let kinds = names.iter().map(|name| match name.as_str() {
        "kv" => Ok(core::LayerKind::Kv(next(&mut kv))),
        "state" => Ok(core::LayerKind::State(next(&mut state))),
        _ => Err(core::Error::config(
            "model_layers",
            name,
            "'kv' or 'state' for every layer",
        )),
    });
    let kinds = kinds.collect::<core::Result<_>>()?;
    Ok((kinds, kv, state))
}
