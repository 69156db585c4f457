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

mod config;
mod jobs;
mod sequence;
mod stats;
mod windows;

use std::collections::BTreeMap;

use crate::copy_job::CopyOutcome;
use crate::copy_plan::{KvPiece, StatePiece};
use crate::error::Result;
use crate::host::{HostPage, HostPages};
use crate::ids::{Epoch, SlotId};
use crate::pages::{Owner, PageAllocator, PageEntry};
use crate::request::{Key, PriorityClass};
use crate::tree::{Evicted, Lease, Namespace, NodeState, PrefixTree, TreeConfig, TreePage};

pub use config::{Admission, MemoryConfig, Preemption, StreamBudget};
pub use jobs::{LoadCopy, StepCopies, StoreCopy, WindowCopy};
pub use stats::MemoryStats;

pub(crate) use jobs::Event;
use jobs::Job;
pub(crate) use sequence::Sequence;
use sequence::{Parked, Place};

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

    // ---- steps ----------------------------------------------------------------------------

    /// A plan was handed out: what is freed from now on may still be touched by it.
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

    /// Stores to start once the step that is in flight, if any, has ended.
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

    /// Whether copies are under way whose end gives device pages back.
    pub(crate) fn pages_coming(&self) -> bool {
        let mut jobs = self.jobs.values();
        jobs.any(|job| matches!(job, Job::Park { .. } | Job::Seal { .. }))
            || self.tree.as_ref().is_some_and(PrefixTree::pages_coming)
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

    // ---- pages ----------------------------------------------------------------------------

    fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page)
    }

    /// HIGH pages that could be had now, those of unlocked cached prefixes included.
    pub(crate) fn available(&self) -> usize {
        let pages = self.pages.as_ref();
        let free = pages.map_or(0, |pages| pages.available(PriorityClass::High));
        free + self.tree.as_ref().map_or(0, PrefixTree::evictable_device)
    }

    fn alloc_high(&mut self, n: usize) -> Option<Vec<PageEntry>> {
        let pages = self.pages.as_ref()?;
        let free = pages.available(PriorityClass::High);
        if free < n {
            let evicted = self.tree.as_ref()?.evict_device(n - free);
            self.release(evicted);
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
            self.release(evicted);
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
    fn release(&mut self, evicted: Evicted) {
        self.free_pages(&evicted.device, Owner::Tree);
        self.free_host(&evicted.host);
        self.free_snapshots(&evicted.snapshots);
    }

    fn sweep(&mut self) {
        if let Some(tree) = &self.tree {
            let garbage = tree.take_garbage();
            self.release(garbage);
        }
    }

    // ---- admission ------------------------------------------------------------------------

    /// Takes what a waiting request needs to start: its cached prefix, and the pages into which
    /// the host part of it, or its own parked pages, will be loaded. Nothing is taken for `No`.
    pub(crate) fn admit(&mut self, ask: &Ask<'_>, seq: &mut Sequence) -> Admitted {
        if seq.parked.is_some_and(|parked| parked.job.is_some()) {
            return Admitted::No; // its own pages are still on their way to the host
        }
        if let Some(parked) = seq.parked {
            match self.resume(ask, seq, parked) {
                Some(admitted) => return admitted,
                None => self.drop_parked(seq), // its prefix is gone: computed again
            }
        }
        let hit = if !self.is_paged() {
            Some(self.admit_slot(ask, seq))
        } else if seq.class == PriorityClass::Low {
            self.admit_low(ask, seq)
        } else {
            self.admit_high(ask, seq)
        };
        let Some(hit) = hit else {
            return Admitted::No;
        };
        let computed = hit.device + hit.host + hit.streamed;
        if computed > 0 {
            self.restore_snapshot(ask.slot, seq);
        }
        Admitted::Yes {
            hit,
            computed,
        }
    }

    fn matched(&self, prompt: &[u32], limit: usize, class: PriorityClass) -> Option<Lease> {
        let tree = self.tree.as_ref()?;
        Some(tree.match_prefix(NAMESPACE, prompt, limit, class))
    }

    fn path(&self, lease: Option<&Lease>) -> Vec<TreePage> {
        match (&self.tree, lease) {
            (Some(tree), Some(lease)) => tree.pages(lease),
            _ => Vec::new(),
        }
    }

    fn admit_slot(&mut self, ask: &Ask<'_>, seq: &mut Sequence) -> Hit {
        let Some(lease) = self.matched(ask.prompt, usize::MAX, seq.class) else {
            return Hit::default();
        };
        let path = self.path(Some(&lease));
        if path.len() < self.config.load_back_threshold as usize || path.is_empty() {
            return Hit::default();
        }
        let tokens = self.config.page_size;
        let kv = (0u32..)
            .zip(&path)
            .filter_map(|(at, page)| {
                Some(KvPiece {
                    device_page: ask.slot.index(),
                    device_token: at * tokens,
                    host_page: page.host?,
                    tokens,
                })
            })
            .collect();
        seq.stored = path.len();
        seq.lease = Some(lease);
        let job = self.new_job(Job::Load {
            tree: None,
            private: Vec::new(),
            parked: (Vec::new(), None),
        });
        seq.loads.push(job);
        self.step.loads.push(LoadCopy {
            job,
            kv,
            state: Vec::new(),
        });
        Hit {
            host: path.len() * self.page,
            ..Hit::default()
        }
    }

    fn admit_high(&mut self, ask: &Ask<'_>, seq: &mut Sequence) -> Option<Hit> {
        let mut lease = self.matched(ask.prompt, usize::MAX, seq.class);
        let (mut resident, mut load) = usable(&self.path(lease.as_ref()));
        // One page beyond what is loaded, so that the request makes progress.
        let wanted = load.min(self.available().saturating_sub(1));
        load = if wanted < self.config.load_back_threshold as usize {
            0
        } else {
            wanted
        };
        if let (Some(tree), Some(whole)) = (&self.tree, &mut lease)
            && (resident + load) * self.page < whole.len()
        {
            tree.shorten(whole, (resident + load) * self.page);
            (resident, load) = usable(&self.path(lease.as_ref()));
        }
        let room = self.available();
        if room < load + 1
            || !self.has_room(ask, resident, room)
            || (load > 0 && self.is_loading(lease.as_ref()))
        {
            drop(lease);
            self.sweep();
            return None;
        }
        let pages = self.alloc_high(load)?;
        if let (Some(tree), Some(lease)) = (&self.tree, &lease)
            && load > 0
        {
            let started = tree.begin_load(lease, &pages);
            self.transfer(&pages, Owner::Request, Owner::Copy);
            let kv = self.pieces(started.copies.iter().copied());
            self.push_load(seq, Some((started.id, pages)), kv);
        }
        self.join_loads(seq, lease.as_ref());
        seq.lease = lease;
        seq.touch();
        Some(Hit {
            device: resident * self.page,
            host: load * self.page,
            streamed: 0,
        })
    }

    /// Whether a part of the path is on its way to the device: what comes after it can be loaded
    /// only once it is there, as a load that fails must not leave a page without those before it.
    fn is_loading(&self, lease: Option<&Lease>) -> bool {
        let path = self.path(lease);
        path.iter().any(|page| page.state == NodeState::Loading)
    }

    /// Whether the running requests and this one can all go on, by the admission mode.
    fn has_room(&self, ask: &Ask<'_>, resident: usize, room: usize) -> bool {
        if ask.running.is_empty() {
            return true;
        }
        match self.config.admission {
            Admission::Reserve => {
                let own = self.pages_for(ask.demand.worst).saturating_sub(resident);
                self.owed(ask.running) + own <= room
            }
            Admission::Estimate { .. } => {
                let held: usize = ask.running.iter().map(|other| other.held).sum();
                let mut all = ask.running.to_vec();
                all.push(ask.demand);
                self.future_peak(&mut all) <= room + held + resident
            }
        }
    }

    /// Pages that running requests may still come to need.
    pub(crate) fn owed(&self, running: &[Demand]) -> usize {
        let owed = |one: &Demand| self.pages_for(one.worst).saturating_sub(one.held);
        running.iter().map(owed).sum()
    }

    /// Most pages held at once, if each request ends when predicted. At the end of the one that
    /// needs the i-th fewest further tokens, all that need more have grown by as many.
    fn future_peak(&self, all: &mut [Demand]) -> usize {
        let left = |one: &Demand| one.predicted.saturating_sub(one.tokens);
        all.sort_by_key(|one| std::cmp::Reverse(left(one)));
        (1..=all.len())
            .map(|alive| {
                let grown = left(&all[alive - 1]);
                let pages = all[..alive].iter().map(|one| self.pages_for(one.tokens + grown));
                pages.sum()
            })
            .max()
            .unwrap_or(0)
    }

    fn push_load(
        &mut self,
        seq: &mut Sequence,
        tree: Option<(u64, Vec<PageEntry>)>,
        kv: Vec<KvPiece>,
    ) {
        let job = self.new_job(Job::Load {
            tree,
            private: Vec::new(),
            parked: (Vec::new(), None),
        });
        seq.loads.push(job);
        self.step.loads.push(LoadCopy {
            job,
            kv,
            state: Vec::new(),
        });
    }

    /// A row whose prefix another row of the step is loading depends on that load too.
    fn join_loads(&self, seq: &mut Sequence, lease: Option<&Lease>) {
        let path = self.path(lease);
        if path.iter().any(|page| page.state == NodeState::Loading) {
            let loads = self.step.loads.iter().map(|load| load.job);
            let others: Vec<u64> = loads.filter(|job| !seq.loads.contains(job)).collect();
            seq.loads.extend(others);
        }
    }

    fn restore_snapshot(&mut self, slot: SlotId, seq: &mut Sequence) {
        let snapshot = seq.lease.as_ref().and_then(Lease::snapshot);
        let Some((_, host_slot)) = snapshot.filter(|_| self.config.hybrid) else {
            return;
        };
        let piece = StatePiece {
            device_slot: slot.index(),
            host_slot,
        };
        self.push_load(seq, None, Vec::new());
        if let Some(load) = self.step.loads.last_mut() {
            load.state.push(piece);
        }
    }

    fn pieces(&self, copies: impl Iterator<Item = (HostPage, PageEntry)>) -> Vec<KvPiece> {
        let tokens = self.config.page_size;
        copies
            .map(|(host_page, page)| KvPiece {
                device_page: page.base(),
                device_token: 0,
                host_page,
                tokens,
            })
            .collect()
    }

    // ---- growing --------------------------------------------------------------------------

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
        let missing = self.pages_for(tokens).saturating_sub(self.held(seq));
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
        if self.is_paged() { self.page } else { max_context }
    }

    // ---- publishing -----------------------------------------------------------------------

    /// Where the state of a request should be saved at the end of a chunk that goes from `from` to
    /// at most `to`; the chunk should end there.
    pub(crate) fn snapshot_cut(&self, prompt: usize, from: usize, to: usize) -> Option<usize> {
        if !self.config.hybrid || self.tree.is_none() || self.config.snapshots == 0 {
            return None;
        }
        let interval = self.config.snapshot_interval as usize;
        let last = (prompt - 1) / self.page * self.page;
        let next = (from / interval + 1) * interval;
        let cut = if next < last { next } else { last };
        (cut > from && cut <= to).then_some(cut)
    }

    /// The state slot of a buffer for the state of a request at the end of this step's chunk; `None` if there is no
    /// use for one, or none is free.
    pub(crate) fn stage_snapshot(&mut self) -> Option<u32> {
        let staging = self.staging.alloc(1).and_then(|one| one.first().copied());
        if staging.is_none() {
            self.counters.snapshots_skipped += 1;
        }
        staging.map(|slot| self.config.state_slots + slot.0)
    }

    pub(crate) fn unstage(&mut self, staging: u32) {
        self.free_staging(staging);
    }

    /// A request has computed `computed` tokens: full pages of its prompt become the tree's, full
    /// pages of a LOW request start for the host. `staging` holds its state at `computed`.
    pub(crate) fn computed(
        &mut self,
        key: Key,
        slot: SlotId,
        seq: &mut Sequence,
        prompt: &[u32],
        computed: usize,
        staging: Option<u32>,
    ) {
        seq.loads.clear();
        if self.is_paged() {
            self.publish_sealed(seq, prompt);
            self.publish(seq, prompt, computed);
            if let Some(staging) = staging {
                self.save_snapshot(seq, computed, staging);
            }
            if seq.class == PriorityClass::Low {
                self.seal(key, seq, computed);
            }
        } else {
            seq.lease = None;
            self.store_slot(key, slot, seq, prompt, computed, staging);
        }
        self.sweep();
        self.issue_stores();
    }

    fn publish(&mut self, seq: &mut Sequence, prompt: &[u32], computed: usize) {
        let from = self.leased(seq);
        let full = computed.min(prompt.len()) / self.page;
        let (Some(tree), Some(lease)) = (&self.tree, &mut seq.lease) else {
            return;
        };
        let ready = seq.tail.iter().take(full.saturating_sub(from));
        let pages: Vec<PageEntry> = ready
            .map_while(|place| match *place {
                Place::High(page) => Some(page),
                _ => None,
            })
            .collect();
        if !pages.is_empty() {
            let tokens = &prompt[from * self.page..(from + pages.len()) * self.page];
            if let Some(allocator) = &self.pages {
                let done = allocator.transfer(&pages, Owner::Request, Owner::Tree);
                debug_assert!(done.is_ok(), "{done:?}");
            }
            let inserted = tree.insert(lease, tokens, &pages, seq.class);
            let back: Vec<PageEntry> = inserted.duplicates.iter().map(|&(_, own, _)| own).collect();
            seq.tail.drain(..inserted.covered);
            seq.touch();
            self.free_pages(&back, Owner::Tree);
            self.transfer(&pages[inserted.covered..], Owner::Tree, Owner::Request);
        }
        if seq.class == PriorityClass::Low
            && let (Some(tree), Some(lease)) = (&self.tree, &seq.lease)
        {
            tree.request_store(lease);
        }
    }

    /// Full pages of the prompt of a LOW request that are in host memory become the tree's, where
    /// the tree ends on the host: no page of the device can follow there.
    fn publish_sealed(&mut self, seq: &mut Sequence, prompt: &[u32]) {
        let from = self.leased(seq);
        let full = (prompt.len() / self.page).saturating_sub(from);
        let sealed = seq.tail.iter().take(full).map_while(|place| match *place {
            Place::Low { host, window } => Some((host, window)),
            _ => None,
        });
        let (hosts, windows): (Vec<HostPage>, Vec<Option<PageEntry>>) = sealed.unzip();
        let (Some(tree), Some(lease)) = (&self.tree, &mut seq.lease) else {
            return;
        };
        if hosts.is_empty() {
            return;
        }
        let tokens = &prompt[from * self.page..(from + hosts.len()) * self.page];
        let (covered, unused) = tree.extend_host(lease, tokens, &hosts, seq.class);
        seq.tail.drain(..covered);
        seq.touch();
        // Those the tree had already; what it does not cover stays the request's.
        let kept = hosts.len() - covered;
        let back = &unused[..unused.len() - kept];
        let windows: Vec<PageEntry> = windows[..covered].iter().copied().flatten().collect();
        self.free_host(back);
        self.free_pages(&windows, Owner::Request);
    }

    fn save_snapshot(&mut self, seq: &Sequence, position: usize, staging: u32) {
        let slot = self.alloc_snapshot();
        let (Some(tree), Some(lease), Some(slot)) = (&self.tree, &seq.lease, slot) else {
            self.skip_snapshot(slot, staging);
            return;
        };
        // Refused where there is one, or where the pages before it are not the tree's.
        match tree.begin_snapshot(lease, position, slot) {
            Ok(id) => {
                let job = self.new_job(Job::Snapshot { tree: id, staging });
                self.push_store(job, Vec::new(), Some((staging, slot)));
            }
            Err(_) => self.skip_snapshot(Some(slot), staging),
        }
    }

    fn skip_snapshot(&mut self, slot: Option<u32>, staging: u32) {
        self.counters.snapshots_skipped += 1;
        self.free_snapshots(slot.as_slice());
        self.free_staging(staging);
    }

    fn push_store(&mut self, job: u64, kv: Vec<KvPiece>, state: Option<(u32, u32)>) {
        let state = state.map(|(device_slot, host_slot)| StatePiece {
            device_slot,
            host_slot,
        });
        self.stores.push(StoreCopy {
            job,
            kv,
            state: state.into_iter().collect(),
        });
    }

    /// Copies sealed pages of a slot to the host; they become matchable once they are there.
    fn store_slot(
        &mut self,
        key: Key,
        slot: SlotId,
        seq: &mut Sequence,
        prompt: &[u32],
        computed: usize,
        staging: Option<u32>,
    ) {
        let full = computed.min(prompt.len()) / self.page;
        let first_page = seq.stored;
        let host = if self.tree.is_some() && full > first_page {
            self.alloc_host(full - first_page)
        } else {
            None
        };
        let Some(host) = host else {
            if self.tree.is_some() && full > first_page {
                self.counters.stores_dropped += (full - first_page) as u64;
            }
            if let Some(staging) = staging {
                self.skip_snapshot(None, staging);
            }
            return;
        };
        let snapshot = match (staging, staging.and_then(|_| self.alloc_snapshot())) {
            (Some(staging), Some(slot)) => Some((staging, slot)),
            (Some(staging), None) => {
                self.skip_snapshot(None, staging);
                None
            }
            _ => None,
        };
        seq.stored = full;
        let tokens = self.config.page_size;
        let first_token = u32::try_from(first_page).unwrap_or(u32::MAX) * tokens;
        let kv = (0u32..)
            .zip(&host)
            .map(|(at, &host_page)| KvPiece {
                device_page: slot.index(),
                device_token: first_token + at * tokens,
                host_page,
                tokens,
            })
            .collect();
        let job = self.new_job(Job::StoreSlot {
            key,
            prefix: prompt[..full * self.page].to_vec(),
            first_page,
            host,
            snapshot,
        });
        *self.slot_reads.entry(key).or_default() += 1;
        self.push_store(job, kv, snapshot);
    }

    /// Starts the stores the tree wants.
    fn issue_stores(&mut self) {
        loop {
            let Some(want) = self.tree.as_ref().and_then(|tree| tree.next_store(STORE_PAGES))
            else {
                return;
            };
            let pages = want.pages.clone();
            let host = self.alloc_host(pages.len());
            let Some(tree) = &self.tree else { return };
            let Some(host) = host else {
                self.counters.stores_dropped += pages.len() as u64;
                tree.drop_store(want);
                continue;
            };
            let kv = self.pieces(host.iter().copied().zip(pages.iter().copied()));
            let id = tree.begin_store(want, host);
            self.pin(&pages, true);
            let job = self.new_job(Job::Store { tree: id, pages });
            self.push_store(job, kv, None);
        }
    }

    /// Starts for the host what a LOW request has filled and the tree does not hold.
    fn seal(&mut self, key: Key, seq: &mut Sequence, computed: usize) {
        let from = self.leased(seq);
        for at in 0..(computed / self.page).saturating_sub(from) {
            let Some(&Place::High(page)) = seq.tail.get(at) else {
                continue;
            };
            let Some(&[host]) = self.alloc_host(1).as_deref().and_then(|one| one.first_chunk())
            else {
                return; // stays on the device until the host has room
            };
            self.transfer(&[page], Owner::Request, Owner::Copy);
            let kv = self.pieces(std::iter::once((host, page)));
            let job = self.new_job(Job::Seal {
                key,
                index: from + at,
                page,
                host,
            });
            self.push_store(job, kv, None);
            seq.tail[at] = Place::Sealing { page, host };
        }
    }

    // ---- leaving --------------------------------------------------------------------------

    /// Gives back everything a request holds.
    pub(crate) fn drop_sequence(&mut self, seq: &mut Sequence) {
        self.drop_parked(seq);
        for place in std::mem::take(&mut seq.tail) {
            match place {
                Place::High(page) => self.free_pages(&[page], Owner::Request),
                Place::Sealing { .. } => {} // the job's
                Place::Low { host, window } => {
                    self.free_host(&[host]);
                    self.free_pages(window.as_slice(), Owner::Request);
                }
                Place::Parked { host, .. } => self.free_host(&[host]),
            }
        }
        seq.lease = None;
        seq.reset();
        self.sweep();
    }

    fn drop_parked(&mut self, seq: &mut Sequence) {
        let Some(parked) = seq.parked.take() else {
            return;
        };
        match parked.job.and_then(|job| self.jobs.get_mut(&job)) {
            Some(Job::Park { orphan, .. }) => {
                // The job still writes there.
                *orphan = true;
                seq.tail.retain(|place| !matches!(place, Place::Parked { .. }));
            }
            _ => self.free_snapshots(parked.snapshot.as_slice()),
        }
        for place in std::mem::take(&mut seq.tail) {
            if let Place::Parked { host, .. } | Place::Low { host, window: None } = place {
                self.free_host(&[host]);
            }
        }
    }

    /// Preempts a request of `computed` tokens. Parks its pages in the host tier if it is set so
    /// and there is room, drops them otherwise. True if they are parked.
    pub(crate) fn preempt(
        &mut self,
        key: Key,
        slot: SlotId,
        seq: &mut Sequence,
        computed: usize,
    ) -> bool {
        let parked = self.config.preemption == Preemption::Park
            && self.is_paged()
            && computed > 0
            && self.park(key, slot, seq, computed);
        if !parked {
            self.drop_sequence(seq);
        }
        parked
    }

    fn park(&mut self, key: Key, slot: SlotId, seq: &mut Sequence, computed: usize) -> bool {
        let prefix = self.leased(seq);
        let used = self.pages_for(computed).saturating_sub(prefix);
        let sealing = |place: &Place| matches!(place, Place::Sealing { .. });
        if !seq.loads.is_empty() || seq.parked.is_some() || seq.tail.iter().any(sealing) {
            return false; // rather recomputed than waited for
        }
        let high = |place: &Place| match *place {
            Place::High(page) => Some(page),
            _ => None,
        };
        let pages: Vec<PageEntry> = seq.tail.iter().take(used).filter_map(high).collect();
        let Some(host) = self.alloc_host(pages.len()) else {
            return false;
        };
        let snapshot = if self.config.hybrid {
            let Some(snapshot) = self.alloc_snapshot() else {
                self.free_host(&host);
                return false;
            };
            Some(snapshot)
        } else {
            None
        };
        let beyond: Vec<PageEntry> = seq.tail.iter().skip(used).filter_map(high).collect();
        self.free_pages(&beyond, Owner::Request);
        seq.tail.truncate(used);
        let mut hosts = host.iter().copied();
        let mut kv = Vec::with_capacity(pages.len());
        for (at, place) in seq.tail.iter_mut().enumerate() {
            match *place {
                Place::High(page) => {
                    let Some(host) = hosts.next() else { break };
                    let left = computed - (prefix + at) * self.page;
                    let tokens = u32::try_from(left.min(self.page)).unwrap_or(u32::MAX);
                    kv.push(KvPiece {
                        device_page: page.base(),
                        device_token: 0,
                        host_page: host,
                        tokens,
                    });
                    *place = Place::Parked { host, tokens };
                }
                Place::Low { host, window } => {
                    *place = Place::Low { host, window: None };
                    self.free_pages(window.as_slice(), Owner::Request);
                }
                Place::Sealing { .. } | Place::Parked { .. } => {}
            }
        }
        self.transfer(&pages, Owner::Request, Owner::Copy);
        let reads_slot = snapshot.is_some();
        // All of it may be in the tree already.
        let job = (reads_slot || !kv.is_empty()).then(|| {
            self.new_job(Job::Park {
                key,
                pages,
                host,
                snapshot,
                reads_slot,
                orphan: false,
            })
        });
        if reads_slot {
            *self.slot_reads.entry(key).or_default() += 1;
        }
        if let Some(job) = job {
            self.push_store(job, kv, snapshot.map(|host_slot| (slot.index(), host_slot)));
        }
        seq.parked = Some(Parked {
            prefix,
            tokens: computed,
            snapshot,
            job,
        });
        seq.lease = None;
        seq.touch();
        self.sweep();
        self.counters.parked += 1;
        true
    }

    /// Brings a parked request back. `None` if the prefix it shared is not cached any more.
    fn resume(&mut self, ask: &Ask<'_>, seq: &mut Sequence, parked: Parked) -> Option<Admitted> {
        let tree = self.tree.as_ref();
        let lease = tree.map(|tree| {
            let tokens = &ask.prompt[..parked.prefix * self.page];
            tree.match_kv(NAMESPACE, tokens, seq.class)
        });
        if lease.as_ref().map_or(0, Lease::len) < parked.prefix * self.page {
            drop(lease);
            self.sweep();
            return None;
        }
        let low = seq.class == PriorityClass::Low;
        let (resident, load) = if low {
            (parked.prefix, 0)
        } else {
            usable(&self.path(lease.as_ref()))
        };
        if resident + load < parked.prefix {
            drop(lease);
            self.sweep();
            return None;
        }
        let own = seq.tail.iter().filter(|place| matches!(place, Place::Parked { .. })).count();
        let room = self.available();
        // A full last page needs another one to go on.
        let next = usize::from(parked.tokens.is_multiple_of(self.page));
        if room < load + own + next
            || (!low && !self.has_room(ask, resident, room))
            || (load > 0 && self.is_loading(lease.as_ref()))
        {
            drop(lease);
            self.sweep();
            return Some(Admitted::No);
        }
        let Some(mut pages) = self.alloc_high(load + own) else {
            drop(lease);
            self.sweep();
            return Some(Admitted::No);
        };
        let private = pages.split_off(load);
        if let (Some(tree), Some(lease)) = (&self.tree, &lease)
            && load > 0
        {
            let started = tree.begin_load(lease, &pages);
            self.transfer(&pages, Owner::Request, Owner::Copy);
            let kv = self.pieces(started.copies.iter().copied());
            self.push_load(seq, Some((started.id, pages)), kv);
        }
        self.join_loads(seq, lease.as_ref());
        let mut kv = Vec::with_capacity(own);
        let mut hosts = Vec::with_capacity(own);
        let mut fresh = private.iter();
        for place in &mut seq.tail {
            if let Place::Parked { host, tokens } = *place
                && let Some(&page) = fresh.next()
            {
                kv.push(KvPiece {
                    device_page: page.base(),
                    device_token: 0,
                    host_page: host,
                    tokens,
                });
                hosts.push(host);
                *place = Place::High(page);
            }
        }
        // The pages stay the request's, but nobody may have them before the copy is over.
        self.pin(&private, true);
        let state = parked.snapshot.map(|host_slot| StatePiece {
            device_slot: ask.slot.index(),
            host_slot,
        });
        if state.is_some() || !kv.is_empty() {
            let job = self.new_job(Job::Load {
                tree: None,
                private,
                parked: (hosts, parked.snapshot),
            });
            seq.loads.push(job);
            self.step.loads.push(LoadCopy {
                job,
                kv,
                state: state.into_iter().collect(),
            });
        }
        seq.parked = None;
        seq.lease = lease;
        seq.touch();
        self.counters.resumed += 1;
        Some(Admitted::Yes {
            hit: Hit::default(),
            computed: parked.tokens,
        })
    }

    // ---- ends of copies -------------------------------------------------------------------

    /// Applies the end of a job. An unknown job changes nothing: its outcome was told before.
    pub(crate) fn settle(&mut self, job: u64, outcome: &CopyOutcome) -> Option<Event> {
        let ended = self.jobs.remove(&job)?;
        let ok = *outcome == CopyOutcome::Done;
        if !ok {
            self.counters.copies_failed += 1;
        }
        if let CopyOutcome::Failed(failure) = outcome
            && !failure.settled
        {
            // It may still read and write: nothing of it is ever handed out again.
            self.counters.copies_abandoned += 1;
            self.jobs.insert(job, Job::Abandoned);
            return self.abandon(ended, job);
        }
        let event = self.finish_job(job, ended, ok);
        self.sweep();
        event
    }

    fn finish_job(&mut self, job: u64, ended: Job, ok: bool) -> Option<Event> {
        match ended {
            Job::Load {
                tree,
                private,
                parked: (hosts, snapshot),
            } => {
                if let (Some(own), Some((id, pages))) = (&self.tree, tree) {
                    let failed = own.end_load(id, ok);
                    if ok {
                        self.transfer(&pages, Owner::Copy, Owner::Tree);
                    } else {
                        self.free_pages(&failed, Owner::Copy);
                    }
                }
                self.pin(&private, false);
                self.free_host(&hosts);
                self.free_snapshots(snapshot.as_slice());
                None
            }
            Job::Window { pages } => {
                self.pin(&pages, false);
                None
            }
            Job::Store { tree, pages } => {
                self.pin(&pages, false);
                let failed = self.tree.as_ref().map(|own| own.end_store(tree, ok));
                self.free_host(&failed.unwrap_or_default());
                None
            }
            Job::Seal {
                key,
                index,
                page,
                host,
            } => Some(Event::Sealed {
                key,
                index,
                page,
                host,
                ok,
            }),
            Job::Abandoned => None,
            Job::Park {
                key,
                pages,
                host,
                snapshot,
                reads_slot,
                orphan,
            } => {
                self.free_pages(&pages, Owner::Copy);
                if reads_slot {
                    self.slot_read(key);
                }
                if orphan || !ok {
                    self.free_host(&host);
                    self.free_snapshots(snapshot.as_slice());
                }
                Some(Event::Parked { key, job, ok })
            }
            Job::Snapshot { tree, staging } => {
                self.free_staging(staging);
                let freed = self.tree.as_ref().and_then(|own| own.end_snapshot(tree, ok));
                self.free_snapshots(freed.as_slice());
                None
            }
            Job::StoreSlot {
                key,
                prefix,
                first_page,
                host,
                snapshot,
            } => {
                self.slot_read(key);
                self.publish_slot(&prefix, first_page, host, snapshot, ok);
                Some(Event::SlotRead { key })
            }
        }
    }

    /// Ends a job whose copy never ended, without giving back what the copy may still touch. The
    /// request and the tree are told that it failed.
    fn abandon(&mut self, ended: Job, job: u64) -> Option<Event> {
        match ended {
            Job::Load {
                tree: Some((id, _)),
                ..
            } => {
                if let Some(own) = &self.tree {
                    own.end_load(id, false);
                }
                None
            }
            Job::Store { tree, .. } => {
                if let Some(own) = &self.tree {
                    own.end_store(tree, false);
                }
                None
            }
            Job::Snapshot { tree, .. } => {
                if let Some(own) = &self.tree {
                    own.end_snapshot(tree, false);
                }
                None
            }
            Job::Park {
                key, reads_slot, ..
            } => {
                // What it may still read there does no harm to the next owner of the slot.
                if reads_slot {
                    self.slot_read(key);
                }
                Some(Event::Parked {
                    key,
                    job,
                    ok: false,
                })
            }
            Job::StoreSlot { key, .. } => {
                self.slot_read(key);
                Some(Event::SlotRead { key })
            }
            // The page stays where it is and is read there; it can never be stored.
            Job::Seal { .. }
            | Job::Load { tree: None, .. }
            | Job::Window { .. }
            | Job::Abandoned => None,
        }
    }

    /// With nothing live and nothing under way: whatever is not free is the tree's.
    #[cfg(test)]
    pub(crate) fn check_idle(&self) -> std::result::Result<(), String> {
        let tree = self.tree.as_ref().map(PrefixTree::stats).unwrap_or_default();
        let pages = self.pages.as_ref().map(PageAllocator::stats);
        let device = pages.is_none_or(|pages| {
            let high = pages.high;
            let low = pages.low;
            high.request + high.copy + high.pending + low.used as usize + pages.pinned == 0
                && high.tree == tree.full_pages
        });
        let host = self.host.free_count() + tree.host_pages == self.host.total();
        let snapshots = self.snapshots.free_count() + tree.snapshots == self.snapshots.total();
        let staging = self.staging.free_count() == self.staging.total();
        if self.jobs.is_empty()
            && self.slot_reads.is_empty()
            && tree.leases + tree.jobs == 0
            && device
            && host
            && snapshots
            && staging
        {
            return Ok(());
        }
        let free = (self.host.free_count(), self.snapshots.free_count(), self.staging.free_count());
        Err(format!(
            "{} jobs, {} slots read, free {free:?}, {pages:?}, {tree:?}",
            self.jobs.len(),
            self.slot_reads.len()
        ))
    }

    fn slot_read(&mut self, key: Key) {
        if let Some(count) = self.slot_reads.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.slot_reads.remove(&key);
            }
        }
    }

    fn publish_slot(
        &mut self,
        prefix: &[u32],
        first_page: usize,
        host: Vec<HostPage>,
        snapshot: Option<(u32, u32)>,
        ok: bool,
    ) {
        if let Some((staging, _)) = snapshot {
            self.free_staging(staging);
        }
        let slot = snapshot.map(|(_, slot)| slot);
        let Some(tree) = self.tree.as_ref().filter(|_| ok) else {
            self.free_host(&host);
            self.free_snapshots(slot.as_slice());
            return;
        };
        // Refused if the pages before it were evicted meanwhile.
        match tree.insert_host(NAMESPACE, prefix, first_page, &host, PriorityClass::High) {
            Ok(duplicates) => self.free_host(&duplicates),
            Err(_) => self.free_host(&host),
        }
        let Some(slot) = slot else { return };
        let Some(tree) = &self.tree else { return };
        let lease = tree.match_kv(NAMESPACE, prefix, PriorityClass::High);
        let begun = if lease.len() == prefix.len() {
            tree.begin_snapshot(&lease, prefix.len(), slot).ok()
        } else {
            None
        };
        let back = match begun {
            Some(id) => tree.end_snapshot(id, true),
            None => Some(slot),
        };
        drop(lease);
        self.free_snapshots(back.as_slice());
    }

    /// Applies the end of a seal to its request, `None` if that is gone.
    pub(crate) fn sealed(
        &mut self,
        seq: Option<&mut Sequence>,
        index: usize,
        page: PageEntry,
        host: HostPage,
        ok: bool,
    ) {
        let place = seq.and_then(|seq| {
            let at = index.checked_sub(seq.lease.as_ref().map_or(0, Lease::len) / self.page)?;
            seq.touch();
            let place = seq.tail.get_mut(at)?;
            (*place == Place::Sealing { page, host }).then_some(place)
        });
        match place {
            Some(place) if ok => {
                *place = Place::Low { host, window: None };
                self.free_pages(&[page], Owner::Copy);
            }
            Some(place) => {
                *place = Place::High(page);
                self.transfer(&[page], Owner::Copy, Owner::Request);
                self.free_host(&[host]);
            }
            None => {
                self.free_pages(&[page], Owner::Copy);
                self.free_host(&[host]);
            }
        }
    }

    /// Applies the end of a park to its request: what is lost is computed again.
    pub(crate) fn parked(&mut self, seq: &mut Sequence, job: u64, ok: bool) -> bool {
        let Some(parked) = seq.parked.as_mut().filter(|parked| parked.job == Some(job)) else {
            return true;
        };
        parked.job = None;
        if ok {
            return true;
        }
        // The job has freed the host side of what it wrote.
        seq.parked = None;
        let tail = std::mem::take(&mut seq.tail);
        for place in tail {
            if let Place::Low { host, .. } = place {
                self.free_host(&[host]);
            }
        }
        seq.reset();
        false
    }

    // ---- counts ---------------------------------------------------------------------------

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

/// Pages at the start of a path that are on the device or about to be, and the pages after them
/// that could be loaded.
fn usable(path: &[TreePage]) -> (usize, usize) {
    let resident = path
        .iter()
        .take_while(|page| {
            matches!(
                page.state,
                NodeState::Full | NodeState::Backing | NodeState::Loading
            )
        })
        .count();
    let load = path[resident..]
        .iter()
        .take_while(|page| page.state == NodeState::Host)
        .count();
    (resident, load)
}
