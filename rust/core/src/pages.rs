//! Priority page allocator: hands out whole raw pages (HIGH) and windows of their layers (LOW).
//!
//! Owns the state, owner, fence and pins of every slot, and the indices to choose one in a time
//! that depends neither on the pool nor on its history. Knows nothing of tensors or copies. One
//! mutex; nothing is called out while it is held.
//!
//! Invariants (checked by [`PageAllocator::check`], which recounts every index):
//! - a raw page is free, or owned by one class until its last live or pending slot has left;
//! - a slot is handed out only if it is neither live nor pending; a live slot has one owner;
//! - a pending slot waits for a step that has not retired, or for a pin;
//! - state is a set and not a history: an alloc and a free of the same slots leave no trace.

mod bitset;
mod config;
mod dump;
mod entry;
mod pool;
mod release;
mod table;

pub use config::{Addressing, PageConfig};
pub use dump::{PageDump, PageRow};
pub use entry::PageEntry;

use crate::error::Result;
use crate::ids::Epoch;
use crate::request::PriorityClass;
use crate::sync::Mutex;
use table::Table;

/// Who holds a live slot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Owner {
    /// A request: in its block table.
    Request,
    /// A node of the prefix tree.
    Tree,
    /// A copy job that fills it or takes it away.
    Copy,
}

impl Owner {
    const COUNT: usize = 3;

    fn holds(self) -> &'static str {
        match self {
            Self::Request => "a request holds it",
            Self::Tree => "the tree holds it",
            Self::Copy => "a copy job holds it",
        }
    }
}

/// Counts of one class; live, pending and partial are logical pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClassStats {
    /// Most raw pages it may own.
    pub cap: u32,
    /// Raw pages it owns.
    pub used: u32,
    /// Live slots of requests.
    pub request: usize,
    /// Live slots of the tree.
    pub tree: usize,
    /// Live slots of copy jobs.
    pub copy: usize,
    /// Slots that wait for a step or a pin.
    pub pending: usize,
    /// Slots of owned pages that can be handed out.
    pub partial: usize,
}

/// Counts that were all true at one instant: `free + high.used + low.used == num_pages`, and
/// `request + tree + copy + pending + partial` of a class is `used` times its starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageStats {
    /// Raw pages of the pool.
    pub num_pages: u32,
    /// Raw pages that no class owns.
    pub free: u32,
    /// HIGH.
    pub high: ClassStats,
    /// LOW.
    pub low: ClassStats,
    /// Slots that a copy job reads.
    pub pinned: usize,
    /// Layers of a raw page that LOW cannot use.
    pub waste_layers: u32,
    /// Newest step known to have finished.
    pub retired: Epoch,
}

/// Pages of each item of a group call, and the step (1 to 5) that chose each.
pub type TracedPages = Vec<(Vec<PageEntry>, Vec<u8>)>;

/// Thread-safe pool of pages, shared by reference. Every call is atomic: an error changes nothing.
pub struct PageAllocator {
    config: PageConfig,
    table: Mutex<Table>,
}

impl PageAllocator {
    /// A pool of free pages. Fails with [`Error::Config`](crate::Error::Config).
    pub fn new(config: PageConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self {
            table: Mutex::new(Table::new(&config)),
            config,
        })
    }

    /// The geometry, and the caps at construction.
    pub fn config(&self) -> &PageConfig {
        &self.config
    }

    /// `n` pages for a request. `preferred_start` is the start of the request's first LOW page;
    /// without one the start with most slots is home.
    ///
    /// Fails with `OutOfPages`, or `InvalidRequest` for a start that the class does not have.
    /// Time is linear in `n` and depends on nothing else.
    pub fn alloc(
        &self,
        n: usize,
        class: PriorityClass,
        preferred_start: Option<u32>,
    ) -> Result<Vec<PageEntry>> {
        self.table.lock().alloc((n, preferred_start), class, |_| ())
    }

    /// [`alloc`](Self::alloc) for the (n, preferred start) of each request of a batch, all or
    /// nothing. They share the slots of the pages that the call opens. An `OutOfPages` names the
    /// item.
    pub fn alloc_many(
        &self,
        items: &[(usize, Option<u32>)],
        class: PriorityClass,
    ) -> Result<Vec<Vec<PageEntry>>> {
        self.table.lock().alloc_many(items, class, |_, _| ())
    }

    /// [`alloc_many`](Self::alloc_many) that also tells how each page was chosen. For tests.
    pub fn alloc_traced(
        &self,
        items: &[(usize, Option<u32>)],
        class: PriorityClass,
    ) -> Result<TracedPages> {
        let mut steps = vec![Vec::new(); items.len()];
        let trace = |item: usize, step| steps[item].push(step);
        let pages = self.table.lock().alloc_many(items, class, trace)?;
        Ok(pages.into_iter().zip(steps).collect())
    }

    /// Takes pages from `owner`. They can be handed out again once step `epoch` has retired and
    /// nobody has them pinned; at once if both hold now.
    ///
    /// Fails with `PageState` for the first page that is not live, not of `owner`, or listed
    /// twice.
    pub fn free(&self, pages: &[PageEntry], owner: Owner, epoch: Epoch) -> Result<()> {
        self.table.lock().release_owned(pages, owner, epoch)
    }

    /// Hands pages from one owner to another; the fence travels with the caller. Fails with
    /// `PageState` as [`free`](Self::free) does, and for a pinned page.
    pub fn transfer(&self, pages: &[PageEntry], from: Owner, to: Owner) -> Result<()> {
        self.table.lock().transfer(pages, from, to)
    }

    /// Step `epoch` and all before it touch no page any more. A smaller epoch than before is
    /// ignored. Time is linear in the pages that are released.
    pub fn retire(&self, epoch: Epoch) {
        self.table.lock().retire(epoch);
    }

    /// One more copy job reads each of these live pages (a page listed twice has two more pins).
    /// Fails with `PageState`.
    pub fn pin(&self, pages: &[PageEntry]) -> Result<()> {
        self.table.lock().pin(pages)
    }

    /// Undoes a [`pin`](Self::pin). The last pin of a page that was freed meanwhile lets it go.
    /// Fails with `PageState` for a page without a pin.
    pub fn unpin(&self, pages: &[PageEntry]) -> Result<()> {
        self.table.lock().unpin(pages)
    }

    /// Most raw pages the class may own. Below what it owns nothing is taken away, but it opens no
    /// page. Fails with `Config` above the number of pages.
    pub fn set_cap(&self, class: PriorityClass, cap: u32) -> Result<()> {
        let field = match class {
            PriorityClass::High => "cap_high",
            PriorityClass::Low => "cap_low",
        };
        self.config.check_cap(field, cap)?;
        self.table.lock().class_mut(class).cap = cap;
        Ok(())
    }

    /// The `k` LOW raw pages to empty so that they become free: fewest live slots first, ties to
    /// the smallest id, none with a slot held or pinned by a copy job. Changes nothing.
    ///
    /// Fails with `OutOfPages` (`free`: how many there are). Time is linear in the pool.
    pub fn reclaim_plan(&self, k: u32) -> Result<Vec<u32>> {
        self.table.lock().reclaim_plan(k)
    }

    /// Pages that one call can get now; with strict addressing, at the best start.
    pub fn available(&self, class: PriorityClass) -> usize {
        self.table.lock().available(class)
    }

    /// The entry of a slot. Fails with `PageState` if the class has no such slot; `index` is its
    /// position in the caller's list, for the error.
    pub fn entry(
        &self,
        index: usize,
        raw: u32,
        start: u32,
        class: PriorityClass,
    ) -> Result<PageEntry> {
        self.config.entry(index, raw, start, class)
    }

    /// Entries of the slots (`pages[k]`, `starts[k]`), by the class that owns each raw page now.
    /// Fails with `PageState` for the first that this class does not have.
    pub fn entries(&self, pages: &[u32], starts: &[u32]) -> Result<Vec<PageEntry>> {
        self.table.lock().entries(pages, starts)
    }

    /// Whether somebody holds the slot of an entry, or a step or a pin keeps it from being handed out.
    /// False for an entry the pool does not have.
    pub fn is_held(&self, page: PageEntry) -> bool {
        self.table.lock().is_held(page)
    }

    /// Counts by state and owner.
    pub fn stats(&self) -> PageStats {
        self.table.lock().stats()
    }

    /// The whole state. Two allocators are equal iff their dumps are.
    pub fn dump(&self) -> PageDump {
        self.table.lock().dump()
    }

    /// An allocator with the state of `dump`. Fails with `Config` if that is not the dump of any.
    pub fn restore(dump: &PageDump) -> Result<Self> {
        let table = Table::restore(dump)?;
        Ok(Self {
            config: table.config.clone(),
            table: Mutex::new(table),
        })
    }

    /// 64 bits of the whole state, the same in every process. Time is linear in the pool.
    pub fn digest(&self) -> u64 {
        self.table.lock().digest()
    }

    /// Recounts every index from the states of the slots. The error says what does not agree.
    pub fn check(&self) -> std::result::Result<(), String> {
        self.table.lock().check()
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
