//! What one request holds: a locked path of the prefix tree, then pages of its own.

use crate::host::HostPage;
use crate::pages::PageEntry;
use crate::request::PriorityClass;
use crate::tree::Lease;

/// A page of a request that is not the tree's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// On the device, all layers.
    High(PageEntry),
    /// Full, of a LOW request, and on its way to the host; the store job owns both.
    Sealing {
        /// Still read from here.
        page: PageEntry,
        /// Being filled.
        host: HostPage,
    },
    /// In host memory, and in a window of the device while the request runs.
    Low {
        /// All layers.
        host: HostPage,
        /// Holds nothing of value between steps.
        window: Option<PageEntry>,
    },
    /// In host memory until the request resumes.
    Parked {
        /// All layers.
        host: HostPage,
        /// Valid tokens of the page.
        tokens: u32,
    },
}

/// State of a preempted request in the host tier.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parked {
    /// Pages of the prompt that were the tree's; they must be found there again.
    pub(super) prefix: usize,
    /// Tokens computed.
    pub(super) tokens: usize,
    /// Host snapshot of a hybrid request, at exactly `tokens`.
    pub(super) snapshot: Option<u32>,
    /// Store job, until it is done.
    pub(super) job: Option<u64>,
}

/// Everything of the KV memory that one request holds.
///
/// Pages in order: those of `lease`, then `tail`. With fixed slots `lease` is held only while its
/// pages are copied into the slot and `tail` is empty.
#[derive(Default)]
pub(crate) struct Sequence {
    pub(super) class: PriorityClass,
    pub(super) lease: Option<Lease>,
    pub(super) tail: Vec<Place>,
    pub(super) parked: Option<Parked>,
    /// Fixed slots: pages of the prompt that are stored, being stored or came from the host.
    pub(super) stored: usize,
    /// Load jobs that the rows of this step depend on.
    pub(crate) loads: Vec<u64>,
    /// Start of the first LOW page; the others prefer it.
    pub(super) home: Option<u32>,
    /// Steps in which a LOW request was deferred since it last ran.
    pub(crate) waited: u32,
    table: Vec<u32>,
    stale: bool,
}

impl Sequence {
    pub(crate) fn new(class: PriorityClass) -> Self {
        Self {
            class,
            stale: true,
            ..Self::default()
        }
    }

    /// Block-table entries of all pages, as of the last [`Sequence::set_table`].
    pub(crate) fn table(&self) -> &[u32] {
        &self.table
    }

    pub(super) fn table_mut(&mut self) -> &mut Vec<u32> {
        &mut self.table
    }

    pub(super) fn touch(&mut self) {
        self.stale = true;
    }

    pub(super) fn is_stale(&self) -> bool {
        self.stale
    }

    pub(super) fn fresh(&mut self) {
        self.stale = false;
    }

    /// Drops what a former stay in the running set left.
    pub(super) fn reset(&mut self) {
        self.tail.clear();
        self.table.clear();
        self.loads.clear();
        self.home = None;
        self.stored = 0;
        self.waited = 0;
        self.stale = true;
    }
}
