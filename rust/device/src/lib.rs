//! What the engine needs of the machine: the clock, host memory, copy devices, and the copy queue
//! with its worker. `headrace-core` never reads time itself, it is handed in.
//!
//! Lock order: a step of the queue -> the queue's desk -> a device; in practice each is taken
//! alone.
#![deny(unsafe_code)]

mod clock;
mod cpu;
#[cfg(not(loom))]
mod cuda;
mod device;
mod host;
mod queue;
mod regions;
pub mod sim;

pub use clock::{Deadline, monotonic_ns};
pub use cpu::{CpuDevice, Injection};
#[cfg(not(loom))]
pub use cuda::{CudaConfig, CudaDevice, EventWaiter};
pub use device::{
    Device, Fault, LayerCopy, Progress, Stream, Sums, Ticket, Transfer, Waker, Word, word_reached,
};
pub use host::{HostMemory, PLANE_ALIGN};
pub use queue::{
    CopyQueue, LoadJob, OnDone, QueueConfig, QueueStats, StepHandle, StoreJob, StreamStats,
    WindowJob,
};
pub use regions::{CopyMemory, Region, Space};
