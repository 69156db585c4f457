//! Copies the memory asks for, and what it does when one of them ends.

use crate::copy_plan::{KvPiece, StatePiece};
use crate::host::HostPage;
use crate::pages::PageEntry;
use crate::request::Key;

/// Host to device, all layers, behind a gate per layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadCopy {
    /// Name of the job.
    pub job: u64,
    /// KV of pages.
    pub kv: Vec<KvPiece>,
    /// States of linear-attention layers.
    pub state: Vec<StatePiece>,
}

/// Host to the windows of the LOW rows of a step, layer by layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowCopy {
    /// Name of the job.
    pub job: u64,
    /// One per distinct LOW page.
    pub pieces: Vec<KvPiece>,
    /// Running number of the first streamed layer.
    pub k0: u64,
}

/// Device to host, after the step that wrote the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreCopy {
    /// Name of the job.
    pub job: u64,
    /// KV of pages.
    pub kv: Vec<KvPiece>,
    /// States of linear-attention layers.
    pub state: Vec<StatePiece>,
}

/// Copies a step waits for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepCopies {
    /// Load-backs, in row order.
    pub loads: Vec<LoadCopy>,
    /// Window loads of the LOW rows.
    pub window: Option<WindowCopy>,
}

impl StepCopies {
    /// Whether there is nothing to copy.
    pub fn is_empty(&self) -> bool {
        self.loads.is_empty() && self.window.is_none()
    }
}

/// What a load owns until it ends.
#[derive(Default)]
pub(super) struct Loading {
    /// Number the tree gave it, and the pages that will be the tree's.
    pub(super) tree: Option<(u64, Vec<PageEntry>)>,
    /// Private pages of a resumed request; pinned.
    pub(super) private: Vec<PageEntry>,
    /// Host pages, and snapshot, that the request was parked in; freed at the end.
    pub(super) parked: (Vec<HostPage>, Option<u32>),
}

/// A job that has not ended, and what it owns.
pub(super) enum Job {
    /// Host to device; the row that waits for it is in the same step.
    Load(Loading),
    /// Into the windows of a step; pinned.
    Window { pages: Vec<PageEntry> },
    /// Pages of a node; pinned.
    Store { tree: u64, pages: Vec<PageEntry> },
    /// A full page of a LOW request. `key` is its request, `index` the page's number in it.
    Seal {
        key: Key,
        index: usize,
        page: PageEntry,
        host: HostPage,
    },
    /// Private pages and state of a preempted request.
    Park {
        key: Key,
        pages: Vec<PageEntry>,
        host: Vec<HostPage>,
        snapshot: Option<u32>,
        reads_slot: bool,
        /// The request ended meanwhile: the host side goes with the job.
        orphan: bool,
    },
    /// A snapshot of the tree, from a staging buffer.
    Snapshot { tree: u64, staging: u32 },
    /// Pages of a slot, and perhaps the state at their end.
    StoreSlot {
        key: Key,
        prefix: Vec<u32>,
        first_page: usize,
        host: Vec<HostPage>,
        /// (staging buffer, host snapshot)
        snapshot: Option<(u32, u32)>,
    },
    /// A copy that never ended; what it named is lost to the pools.
    Abandoned,
}

/// What the end of a job means to a request that may be gone.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The page is in host memory (or not, if the store failed).
    Sealed {
        key: Key,
        index: usize,
        page: PageEntry,
        host: HostPage,
        ok: bool,
    },
    /// The parked state is complete, or lost.
    Parked { key: Key, job: u64, ok: bool },
    /// A job that read the request's slot is over.
    SlotRead { key: Key },
}
