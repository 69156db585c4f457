//! KV memory of a scheduler: device pages, host pages, prefix tree, and the copies between them.
//!
//! Owns the three allocators and every copy that has not ended. The scheduler's mutex guards it and
//! all calls come from there; lock order scheduler -> tree -> pages -> host. Nothing here waits:
//! what a copy will change is done when its outcome is handed in ([`Memory::settle`]).
//!
//! Invariants (checked by [`Memory::check`]):
//! - a device page is owned by one request, the tree or one job; those of jobs are named in `jobs`;
//! - a host page or snapshot is free, in the tree, in one request, or in one job;
//! - a LOW page holds nothing of value between steps: its bytes are in its host page.

mod admission;
mod config;
mod jobs;
mod leave;
mod publish;
mod sequence;
mod settle;
mod stats;
mod windows;

use std::collections::BTreeMap;

use crate::error::Result;
use crate::host::{HostPage, HostPages};
use crate::ids::{Epoch, SlotId};
use crate::pages::{Owner, PageAllocator, PageEntry};
use crate::request::{Key, PriorityClass};
use crate::tree::{Evicted, Lease, Namespace, PrefixTree, TreeConfig};

pub use config::{Admission, MemoryConfig, Preemption, StreamBudget};
pub use jobs::{LoadCopy, StepCopies, StoreCopy, WindowCopy};
pub use stats::MemoryStats;

pub(crate) use jobs::Event;
use jobs::Job;
use sequence::Place;
pub(crate) use sequence::Sequence;
pub(crate) use windows::Windows;

/// One engine serves one model in one KV format, so its tree has one namespace.
const NAMESPACE: Namespace = Namespace(0);
/// Pages of one store of the tree; longer nodes take several.
const STORE_PAGES: usize = 1024;

/// Where the prompt of an admitted request already is, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hit {
    /// On the device.
    pub device: usize,
    /// Loaded back from the host.
    pub host: usize,
    /// Streamed from the host, layer by layer.
    pub streamed: usize,
}

/// A waiting request that would start now.
pub(crate) struct Ask<'a> {
    pub(crate) slot: SlotId,
    pub(crate) prompt: &'a [u32],
    /// What it may come to hold, and what the others may.
    pub(crate) demand: Demand,
    pub(crate) running: &'a [Demand],
}

/// What a HIGH request holds and may come to hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand {
    /// Pages held.
    pub(crate) held: usize,
    /// Tokens it will have held at its worst, and as predicted.
    pub(crate) worst: usize,
    /// See `worst`.
    pub(crate) predicted: usize,
    /// Tokens held now, the prompt counted in full.
    pub(crate) tokens: usize,
}

/// The answer to an [`Ask`].
pub(crate) enum Admitted {
    /// Not now.
    No,
    /// With so many tokens in place, of which `hit` were found in the tree.
    Yes { hit: Hit, computed: usize },
}

pub(crate) struct Memory {
    config: MemoryConfig,
    page: usize,
    pages: Option<PageAllocator>,
    host: HostPages,
    tree: Option<PrefixTree>,
    snapshots: HostPages,
    staging: HostPages,
    jobs: BTreeMap<u64, Job>,
    next_job: u64,
    /// Copies of the plan that is being formed.
    step: StepCopies,
    stores: Vec<StoreCopy>,
    /// Pages that running requests may still take (`Reserve`), out of those that are free or can be
    /// evicted, or more than that. No store is started that would keep one of them from being
    /// evicted, unless eviction asks for the store.
    promised: usize,
    /// Whether a store waits for that.
    held_back: bool,
    slot_reads: BTreeMap<Key, u32>,
    /// Running number of the next streamed layer.
    next_k: u64,
    fence: Epoch,
    counters: MemoryStats,
}

impl Memory {
    pub(crate) fn new(config: MemoryConfig) -> Result<Self> {
        config.validate()?;
        let tiered = config.host_pages > 0;
        let tree = (config.prefix_cache && (tiered || config.pages.is_some()))
            .then(|| {
                PrefixTree::new(TreeConfig {
                    page_size: config.page_size,
                    snapshots: config.hybrid,
                    device_tier: config.pages.is_some(),
                    policy: if tiered {
                        config.policy
                    } else {
                        crate::tree::WritePolicy::None
                    },
                    ..TreeConfig::default()
                })
            })
            .transpose()?;
        Ok(Self {
            page: config.page_size as usize,
            pages: config.pages.clone().map(PageAllocator::new).transpose()?,
            host: HostPages::new(config.host_pages)?,
            tree,
            snapshots: HostPages::new(config.snapshots)?,
            staging: HostPages::new(config.staging)?,
            jobs: BTreeMap::new(),
            next_job: 1,
            step: StepCopies::default(),
            stores: Vec::new(),
            promised: 0,
            held_back: false,
            slot_reads: BTreeMap::new(),
            next_k: 0,
            fence: Epoch(0),
            counters: MemoryStats::default(),
            config,
        })
    }

    pub(crate) fn config(&self) -> &MemoryConfig {
        &self.config
    }

    pub(crate) fn is_paged(&self) -> bool {
        self.pages.is_some()
    }

    /// Whether LOW requests stream instead of holding their pages.
    pub(crate) fn streams(&self) -> bool {
        self.is_paged() && self.config.host_pages > 0
    }

    pub(crate) fn class_of(&self, class: PriorityClass) -> PriorityClass {
        if self.streams() {
            class
        } else {
            PriorityClass::High
        }
    }

    /// A plan was handed out: what is freed from now on may still be touched by it, also if a step
    /// before it is in flight too.
    pub(crate) fn launched(&mut self, epoch: Epoch) {
        self.fence = epoch;
    }

    pub(crate) fn retired(&mut self, epoch: Epoch) {
        if let Some(pages) = &self.pages {
            pages.retire(epoch);
        }
    }

    /// Whether copies wait for the next plan.
    pub(crate) fn has_step(&self) -> bool {
        !self.step.is_empty()
    }

    /// Copies the plan that is handed out now has to wait for.
    pub(crate) fn take_step(&mut self) -> StepCopies {
        std::mem::take(&mut self.step)
    }

    /// Whether stores wait for being started.
    pub(crate) fn has_stores(&self) -> bool {
        !self.stores.is_empty()
    }

    /// Stores to start once the step that was in flight when they became due, if any, has ended: one
    /// planned ahead writes nothing that they read.
    pub(crate) fn take_stores(&mut self) -> Vec<StoreCopy> {
        std::mem::take(&mut self.stores)
    }

    pub(crate) fn is_live(&self, job: u64) -> bool {
        self.jobs.contains_key(&job)
    }

    /// Whether copies are under way that will give something back.
    pub(crate) fn copies_under_way(&self) -> bool {
        self.jobs.values().any(|job| !matches!(job, Job::Abandoned))
    }

    /// Whether copies are under way whose end gives device pages back, or lets them be evicted.
    pub(crate) fn pages_coming(&self) -> bool {
        let gives = |job: &Job| match job {
            Job::Park { .. } | Job::Seal { .. } => true,
            // Of a request that may be gone: its pages follow once they are not written any more.
            Job::Load(loading) => !loading.private.is_empty(),
            _ => false,
        };
        self.jobs.values().any(gives) || self.tree.as_ref().is_some_and(PrefixTree::pages_coming)
    }

    /// Whether stores wait until running requests are owed less.
    pub(crate) fn holds_back(&self) -> bool {
        self.held_back
    }

    /// Says what running requests may still take, and starts the stores that waited for less.
    pub(crate) fn promise(&mut self, pages: usize) {
        self.promised = pages;
        self.held_back = false;
        self.issue_stores();
    }

    pub(crate) fn reads_slot(&self, key: Key) -> bool {
        self.slot_reads.contains_key(&key)
    }

    fn new_job(&mut self, job: Job) -> u64 {
        let id = self.next_job;
        self.next_job += 1;
        self.jobs.insert(id, job);
        id
    }

    fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page)
    }

    /// HIGH pages that are free now: to be had also while a step is in flight, behind which the page
    /// of a cached prefix would have to wait.
    pub(crate) fn free(&self) -> usize {
        let pages = self.pages.as_ref();
        pages.map_or(0, |pages| pages.available(PriorityClass::High))
    }

    /// Pages a request lacks for `tokens` tokens; none with fixed slots.
    pub(crate) fn missing(&self, seq: &Sequence, tokens: usize) -> usize {
        if self.is_paged() {
            self.pages_for(tokens).saturating_sub(self.held(seq))
        } else {
            0
        }
    }

    /// HIGH pages that could be had now, those of unlocked cached prefixes included.
    pub(crate) fn available(&self) -> usize {
        self.free() + self.tree.as_ref().map_or(0, PrefixTree::evictable_device)
    }

    fn alloc_high(&mut self, n: usize) -> Option<Vec<PageEntry>> {
        let pages = self.pages.as_ref()?;
        let free = pages.available(PriorityClass::High);
        if free < n {
            let evicted = self.tree.as_ref()?.evict_device(n - free);
            self.release(&evicted);
            self.issue_stores();
            self.sweep(); // what could not be stored is gone
        }
        let pages = self.pages.as_ref()?;
        pages.alloc(n, PriorityClass::High, None).ok()
    }

    fn alloc_host(&mut self, n: usize) -> Option<Vec<HostPage>> {
        let free = self.host.free_count();
        if free < n {
            let tree = self.tree.as_ref()?;
            if tree.evictable_host() < n - free {
                return None;
            }
            let evicted = tree.evict_host(n - free);
            self.release(&evicted);
        }
        self.host.alloc(n)
    }

    fn alloc_snapshot(&mut self) -> Option<u32> {
        if self.snapshots.free_count() == 0 {
            let evicted = self.tree.as_ref()?.evict_snapshot(1);
            self.free_snapshots(&evicted);
        }
        self.snapshots.alloc(1)?.first().map(|slot| slot.0)
    }

    fn free_pages(&self, freed: &[PageEntry], owner: Owner) {
        if freed.is_empty() {
            return;
        }
        if let Some(pages) = &self.pages {
            let done = pages.free(freed, owner, self.fence);
            debug_assert!(done.is_ok(), "{done:?}");
        }
    }

    fn transfer(&self, moved: &[PageEntry], from: Owner, to: Owner) {
        if let Some(pages) = self.pages.as_ref().filter(|_| !moved.is_empty()) {
            let done = pages.transfer(moved, from, to);
            debug_assert!(done.is_ok(), "{done:?}");
        }
    }

    fn pin(&self, pinned: &[PageEntry], pin: bool) {
        if let Some(pages) = self.pages.as_ref().filter(|_| !pinned.is_empty()) {
            let done = if pin {
                pages.pin(pinned)
            } else {
                pages.unpin(pinned)
            };
            debug_assert!(done.is_ok(), "{done:?}");
        }
    }

    fn free_host(&self, freed: &[HostPage]) {
        if !freed.is_empty() {
            let done = self.host.free(freed);
            debug_assert!(done.is_ok(), "{done:?}");
        }
    }

    fn free_snapshots(&self, freed: &[u32]) {
        let freed: Vec<HostPage> = freed.iter().map(|&slot| HostPage(slot)).collect();
        if !freed.is_empty() {
            let done = self.snapshots.free(&freed);
            debug_assert!(done.is_ok(), "{done:?}");
        }
    }

    fn free_staging(&self, staging: u32) {
        let buffer = staging - self.config.state_slots;
        let done = self.staging.free(&[HostPage(buffer)]);
        debug_assert!(done.is_ok(), "{done:?}");
    }

    /// What the tree has given up goes back to the allocators.
    fn release(&mut self, evicted: &Evicted) {
        self.free_pages(&evicted.device, Owner::Tree);
        self.free_host(&evicted.host);
        self.free_snapshots(&evicted.snapshots);
    }

    fn sweep(&mut self) {
        if let Some(tree) = &self.tree {
            let garbage = tree.take_garbage();
            self.release(&garbage);
        }
    }

    /// Pages a request holds or shares.
    pub(crate) fn held(&self, seq: &Sequence) -> usize {
        self.leased(seq) + seq.tail.len()
    }

    fn leased(&self, seq: &Sequence) -> usize {
        seq.lease.as_ref().map_or(0, Lease::len) / self.page
    }

    /// Gives a request pages up to `tokens` tokens as far as there are any, keeping `headroom`
    /// pages free, and says how many tokens it has room for. Fixed slots always have room.
    pub(crate) fn grow(&mut self, seq: &mut Sequence, tokens: usize, headroom: usize) -> usize {
        if !self.is_paged() {
            return tokens;
        }
        let missing = self.missing(seq, tokens);
        let n = missing.min(self.available().saturating_sub(headroom));
        if n > 0
            && let Some(pages) = self.alloc_high(n)
        {
            seq.tail.extend(pages.into_iter().map(Place::High));
            seq.touch();
        }
        tokens.min(self.held(seq) * self.page)
    }

    /// Brings the block table of a request up to date.
    pub(crate) fn set_table(&self, seq: &mut Sequence, slot: SlotId) {
        if !self.is_paged() {
            if seq.table().is_empty() {
                seq.table_mut().push(slot.index());
            }
            return;
        }
        // The tree may move pages that only LOW requests read.
        if !seq.is_stale() && seq.class == PriorityClass::High {
            return;
        }
        let path = self.path(seq.lease.as_ref());
        let shared = path.iter().filter_map(|page| page.device);
        let own = seq.tail.iter().filter_map(|place| match *place {
            Place::High(page) | Place::Sealing { page, .. } => Some(page),
            Place::Low { window, .. } => window,
            Place::Parked { .. } => None,
        });
        let table: Vec<u32> = shared.chain(own).map(|page| page.0).collect();
        debug_assert_eq!(table.len(), self.held(seq), "a page without a place");
        *seq.table_mut() = table;
        seq.fresh();
    }

    /// Tokens per table entry.
    pub(crate) fn table_tokens(&self, max_context: usize) -> usize {
        if self.is_paged() {
            self.page
        } else {
            max_context
        }
    }

    /// Whether a page is not free to be handed out.
    pub(crate) fn holds(&self, page: u32) -> bool {
        let pages = self.pages.as_ref();
        pages.is_none_or(|pages| pages.is_held(PageEntry(page)))
    }

    /// Recounts the next `nodes` nodes of the tree.
    pub(crate) fn check_some(&self, nodes: usize) -> std::result::Result<(), String> {
        match &self.tree {
            Some(tree) => tree.check_some(nodes),
            None => Ok(()),
        }
    }

    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        if let Some(pages) = &self.pages {
            pages.check()?;
        }
        if let Some(tree) = &self.tree {
            tree.check()?;
        }
        self.host.check()?;
        self.snapshots.check()?;
        self.staging.check()
    }
}
