//! LOW requests: what they stream, and the device pages they stream through.
//!
//! A window page holds nothing of value between steps, so it can be taken away between any two of
//! them. Tokens that a LOW request computes go to HIGH pages until these are full and stored.

use std::collections::BTreeMap;

use super::jobs::{Job, WindowCopy};
use super::sequence::{Place, Sequence};
use super::{Ask, Hit, Memory};
use crate::host::HostPage;
use crate::pages::{Owner, PageEntry};
use crate::request::PriorityClass;
use crate::tree::{Lease, NodeState};

/// HIGH pages a LOW request needs at least to go on: the one it writes to, and the one after.
const LOW_TAIL: usize = 2;

/// What a step may still stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamLeft {
    pages: usize,
    /// Whether nothing streams yet in this step.
    first: bool,
    /// Whether no HIGH row runs in this step.
    alone: bool,
}

/// Whether a LOW request can run in a step.
pub(crate) enum Windows {
    /// It can.
    Open,
    /// The link has no time for what it streams.
    OverBudget,
    /// There are no pages for its windows.
    NoPages,
}

impl Memory {
    pub(super) fn admit_low(&mut self, ask: &Ask<'_>, seq: &mut Sequence) -> Option<Hit> {
        let room = self.available();
        if room < LOW_TAIL {
            return None;
        }
        let lease = self.matched(ask.prompt, usize::MAX, seq.class);
        self.make_room_on(lease.as_ref());
        let path = self.path(lease.as_ref());
        let resident = path
            .iter()
            .take_while(|page| page.device.is_some() && page.state != NodeState::Low)
            .count();
        self.join_loads(seq, lease.as_ref());
        seq.lease = lease;
        seq.touch();
        Some(Hit {
            device: resident * self.page,
            host: 0,
            streamed: (path.len() - resident) * self.page,
        })
    }

    /// What the LOW rows of a step may stream beside `rows` HIGH rows, of which prefill computes
    /// `tokens` tokens. A pure function of the plan so far.
    pub(crate) fn stream_budget(&self, rows: usize, tokens: usize) -> StreamLeft {
        let stream = &self.config.stream;
        let ms = if rows == 0 {
            stream.low_step_ms
        } else {
            #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
            let (rows, tokens) = (rows as f64, tokens as f64);
            let high = stream.high_ms_base
                + stream.high_ms_per_row * rows
                + stream.high_ms_per_token * tokens;
            high * stream.rho
        };
        let loads: usize = self.step.loads.iter().map(|load| load.kv.len()).sum();
        let bytes = stream.eta * stream.bytes_per_ms * ms;
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a positive count; it saturates"
        )]
        let pages = (bytes / self.config.page_bytes.max(1) as f64) as usize;
        StreamLeft {
            pages: pages.saturating_sub(loads),
            first: true,
            alone: rows == 0,
        }
    }

    /// Makes a LOW request ready to run in this step: all it does not hold in HIGH pages has a
    /// window page.
    pub(crate) fn open_windows(&mut self, seq: &mut Sequence, left: &mut StreamLeft) -> Windows {
        let streamed = self.streamed(seq);
        // Alone it may take what it needs; beside HIGH rows it waits for its turn, but not for ever.
        let patient = seq.waited < self.config.stream.low_max_wait_steps;
        let overruns = streamed > left.pages;
        if overruns && !(left.first && (left.alone || !patient)) {
            return Windows::OverBudget;
        }
        if !self.fill_windows(seq) {
            return Windows::NoPages;
        }
        if overruns {
            self.counters.stream_overruns += 1;
        }
        left.pages = left.pages.saturating_sub(streamed);
        left.first = false;
        seq.waited = 0;
        Windows::Open
    }

    /// Pages of the path that only LOW requests read and that are safe in host memory leave the
    /// device. To be done for all LOW requests before the first of them opens its windows.
    pub(crate) fn demote_for(&mut self, seq: &Sequence) {
        self.demote(seq.lease.as_ref());
    }

    /// As `demote`; what has no host copy yet is on its way to get one.
    pub(super) fn make_room_on(&mut self, lease: Option<&Lease>) {
        self.demote(lease);
        if let (Some(tree), Some(lease)) = (&self.tree, lease) {
            tree.request_store(lease);
        }
        self.issue_stores();
    }

    pub(super) fn demote(&mut self, lease: Option<&Lease>) {
        if let (Some(tree), Some(lease)) = (&self.tree, lease) {
            let freed = tree.demote(lease);
            self.free_pages(&freed, Owner::Tree);
        }
    }

    /// Pages a request streams in each step.
    fn streamed(&self, seq: &Sequence) -> usize {
        let path = self.path(seq.lease.as_ref());
        let shared = path
            .iter()
            .filter(|page| matches!(page.state, NodeState::Host | NodeState::Low));
        let own = seq
            .tail
            .iter()
            .filter(|place| matches!(place, Place::Low { .. }));
        shared.count() + own.count()
    }

    fn fill_windows(&mut self, seq: &mut Sequence) -> bool {
        let mut shared = 0;
        if let (Some(tree), Some(lease)) = (&self.tree, &seq.lease) {
            tree.window_hold(lease);
            shared = tree.window_missing(lease);
        }
        let own = seq
            .tail
            .iter()
            .filter(|place| matches!(place, Place::Low { window: None, .. }))
            .count();
        if shared + own == 0 {
            return true;
        }
        self.evict_for_windows(shared + own);
        let Some(allocator) = &self.pages else {
            return false;
        };
        let Ok(mut pages) = allocator.alloc(shared + own, PriorityClass::Low, seq.home) else {
            return false;
        };
        let num_pages = allocator.config().num_pages;
        seq.home = seq.home.or(pages.first().map(|page| page.start(num_pages)));
        let private = pages.split_off(shared);
        self.transfer(&pages, Owner::Request, Owner::Tree);
        if let (Some(tree), Some(lease)) = (&self.tree, &seq.lease)
            && shared > 0
        {
            tree.give_window(lease, &pages);
        }
        let mut fresh = private.into_iter();
        for place in &mut seq.tail {
            if let Place::Low { window, .. } = place
                && window.is_none()
            {
                *window = fresh.next();
            }
        }
        true
    }

    /// Gives up cached pages for `n` LOW pages, if that is what they lack.
    fn evict_for_windows(&mut self, n: usize) {
        let (Some(pages), Some(tree)) = (&self.pages, &self.tree) else {
            return;
        };
        let missing = n.saturating_sub(pages.available(PriorityClass::Low));
        let raw = missing.div_ceil(pages.config().starts(PriorityClass::Low) as usize);
        let stats = pages.stats();
        let mine = (stats.low.cap - stats.low.used.min(stats.low.cap)) as usize;
        // Beyond its share of the pool no free page would help.
        if raw == 0 || stats.free as usize + raw > mine || tree.evictable_device() < raw {
            return;
        }
        let evicted = tree.evict_device(raw);
        self.release(&evicted);
        self.issue_stores();
        self.sweep();
    }

    /// Takes the window pages of a request that does not run in this step. True if it had any.
    pub(crate) fn close_windows(&mut self, seq: &mut Sequence) -> bool {
        let mut taken = Vec::new();
        for place in &mut seq.tail {
            if let Place::Low { window, .. } = place {
                taken.extend(window.take());
            }
        }
        self.free_pages(&taken, Owner::Request);
        let mut any = !taken.is_empty();
        if let (Some(tree), Some(lease)) = (&self.tree, &seq.lease) {
            let before = tree.window_missing(lease);
            tree.window_release(lease);
            any |= tree.window_missing(lease) > before;
        }
        seq.home = None;
        self.sweep();
        any
    }

    /// The one window load of a step: every LOW page of its rows once, and the running number of
    /// its first layer. The rows depend on the job.
    pub(crate) fn plan_windows(&mut self, rows: &mut [&mut Sequence]) {
        let mut copies: BTreeMap<PageEntry, HostPage> = BTreeMap::new();
        for seq in rows.iter() {
            for page in self.path(seq.lease.as_ref()) {
                if let (NodeState::Low, Some(device), Some(host)) =
                    (page.state, page.device, page.host)
                {
                    copies.insert(device, host);
                }
            }
            for place in &seq.tail {
                if let Place::Low {
                    host,
                    window: Some(window),
                } = *place
                {
                    copies.insert(window, host);
                }
            }
        }
        let layers = self
            .pages
            .as_ref()
            .map_or(0, |pages| pages.config().num_layers);
        if copies.is_empty() || layers == 0 {
            return;
        }
        // In order of the host pages, so that neighbours merge.
        let mut ordered: Vec<(HostPage, PageEntry)> = copies
            .into_iter()
            .map(|(page, host)| (host, page))
            .collect();
        ordered.sort_unstable();
        let pages: Vec<PageEntry> = ordered.iter().map(|&(_, page)| page).collect();
        self.pin(&pages, true);
        let pieces = self.pieces(ordered.into_iter());
        self.counters.streamed_pages += pieces.len() as u64;
        let job = self.new_job(Job::Window { pages });
        for seq in rows.iter_mut() {
            seq.loads.push(job);
        }
        self.step.window = Some(WindowCopy {
            job,
            pieces,
            k0: self.next_k,
        });
        self.next_k += u64::from(layers);
    }

    pub(crate) fn stream_from(&mut self, k: u64) {
        self.next_k = self.next_k.max(k);
    }

    /// Running number of the first streamed layer of the step being formed.
    pub(crate) fn step_k0(&self) -> u64 {
        self.step.window.as_ref().map_or(0, |window| window.k0)
    }
}
