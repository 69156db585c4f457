//! Slots, scheduler and step plans: pure and synchronous, no Python, no GPU, no clock, no I/O.
//!
//! Lock order: scheduler -> slots, scheduler -> pages. Nothing here calls out while it holds a lock.
#![forbid(unsafe_code)]

mod error;
mod ids;
mod pages;
mod plan;
mod request;
mod sampling;
pub mod scheduler;
mod slots;
mod sync;

pub use error::{Error, Result};
pub use ids::{Epoch, RequestId, SlotId};
pub use pages::{
    Addressing, ClassStats, Owner, PageAllocator, PageConfig, PageDump, PageEntry, PageRow,
    PageStats, TracedPages,
};
pub use plan::{PlanBuilder, RowInput, SampleInput, SamplingRows, StepPlan, decode_width};
pub use request::{
    FinishReason, Phase, PriorityClass, RequestResult, RequestSpec, RequestStatus, Stamps,
};
pub use sampling::{SamplingSpec, uniform};
pub use scheduler::{
    CHUNK_ALIGN, CommitReport, NextPlan, Policy, Scheduler, SchedulerConfig, SchedulerStats,
};
pub use slots::{SlotAllocator, SlotGrant, SlotStats};
