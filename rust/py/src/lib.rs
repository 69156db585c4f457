//! `headrace._core`: the Rust core for Python. Translation only, one file per exposed class.

use pyo3::prelude::*;

mod bench;
mod convert;
mod copy;
mod cuda;
mod door;
mod error;
mod exit;
mod memory;
mod pages;
mod plan;
mod region;
mod result;
mod sampling;
mod scheduler;
mod slots;
mod tiers;
mod tree;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("CHUNK_ALIGN", headrace_core::CHUNK_ALIGN)?;
    module.add_class::<slots::SlotAllocator>()?;
    module.add_class::<pages::PageAllocator>()?;
    module.add_class::<sampling::SamplingSpec>()?;
    module.add_class::<plan::StepPlan>()?;
    module.add_class::<plan::SamplingRows>()?;
    module.add_class::<result::RequestResult>()?;
    module.add_class::<result::RequestStatus>()?;
    module.add_class::<memory::MemoryConfig>()?;
    module.add_class::<scheduler::Scheduler>()?;
    module.add_class::<region::Region>()?;
    module.add_class::<region::HostMemory>()?;
    module.add_class::<region::CopyPlanes>()?;
    module.add_class::<copy::CpuDevice>()?;
    module.add_class::<cuda::CudaDevice>()?;
    module.add_class::<cuda::EventWaiter>()?;
    module.add_class::<copy::CopyQueue>()?;
    module.add_class::<copy::CopyTicket>()?;
    module.add_class::<copy::StepHandle>()?;
    module.add_class::<tree::HostPages>()?;
    module.add_class::<tree::PrefixTree>()?;
    module.add_class::<tree::Lease>()?;
    module.add_class::<tree::StoreWant>()?;
    module.add_function(wrap_pyfunction!(plan::build_plan, module)?)?;
    module.add_function(wrap_pyfunction!(plan::decode_width, module)?)?;
    module.add_function(wrap_pyfunction!(bench::bench_core, module)?)?;
    error::errors(module.py())?;
    exit::register(module)
}
