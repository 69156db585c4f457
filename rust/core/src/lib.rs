//! Slots, scheduler, prefix tree and step plans: pure and synchronous, no Python, no GPU, no clock, no I/O.
//!
//! Lock order: scheduler -> slots; scheduler -> tree -> host pages. Nothing here calls out while it holds a lock.
#![forbid(unsafe_code)]

mod error;
mod host;
mod ids;
mod pages {
    pub(crate) mod entry;
}
mod plan;
mod request;
mod sampling;
pub mod scheduler;
mod slots;
mod sync;
pub mod tree;

pub use error::{Error, Result};
pub use host::{HostPage, HostPages};
pub use ids::{Epoch, RequestId, SlotId};
pub use pages::entry::PageEntry;
pub use plan::{PlanBuilder, RowInput, SampleInput, SamplingRows, StepPlan, decode_width};
pub use request::{
    FinishReason, Phase, PriorityClass, RequestResult, RequestSpec, RequestStatus, Stamps,
};
pub use sampling::{SamplingSpec, uniform};
pub use scheduler::{
    CHUNK_ALIGN, CommitReport, NextPlan, Policy, Scheduler, SchedulerConfig, SchedulerStats,
};
pub use slots::{SlotAllocator, SlotGrant, SlotStats};
pub use tree::{Lease, PrefixTree, TreeConfig};
