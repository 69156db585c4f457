//! Slots, pages, prefix tree, scheduler, step plans and copy plans: pure and synchronous, no Python,
//! no GPU, no clock, no I/O.
//!
//! Lock order: scheduler -> slots, scheduler -> tree -> pages -> host pages. Nothing here calls out
//! while it holds a lock.
#![forbid(unsafe_code)]

mod copy_job;
mod copy_plan;
mod error;
mod host;
mod ids;
pub mod memory;
mod pages;
mod plan;
mod request;
mod sampling;
pub mod scheduler;
mod slots;
#[doc(hidden)]
pub mod sync;
pub mod tree;

pub use copy_job::{CopyFailure, CopyOutcome};
pub use copy_plan::{
    CopyPlan, Direction, KvPiece, KvPlane, KvShape, LayerKind, Mechanism, PlanKind, Planes, Run,
    StatePiece, StatePlane, StateShape, Thresholds,
};
pub use error::{Error, Result};
pub use host::{HostPage, HostPages};
pub use ids::{Epoch, RequestId, SlotId};
pub use memory::{
    Admission, Hit, LoadCopy, MemoryConfig, MemoryStats, Preemption, StepCopies, StoreCopy,
    StreamBudget, WindowCopy,
};
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
pub use tree::{Lease, PrefixTree, TreeConfig};
