//! Whether a waiting request may start, and what it takes along: its cached prefix, and pages into
//! which the host part of it is loaded.

use super::config::Admission;
use super::jobs::{Job, LoadCopy, Loading};
use super::sequence::Sequence;
use super::{Admitted, Ask, Demand, Hit, Memory, NAMESPACE};
use crate::copy_plan::{KvPiece, StatePiece};
use crate::host::HostPage;
use crate::ids::SlotId;
use crate::pages::{Owner, PageEntry};
use crate::request::PriorityClass;
use crate::tree::{Lease, NodeState, TreePage};

impl Memory {
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
        Admitted::Yes { hit, computed }
    }

    pub(super) fn matched(
        &self,
        prompt: &[u32],
        limit: usize,
        class: PriorityClass,
    ) -> Option<Lease> {
        let tree = self.tree.as_ref()?;
        Some(tree.match_prefix(NAMESPACE, prompt, limit, class))
    }

    pub(super) fn path(&self, lease: Option<&Lease>) -> Vec<TreePage> {
        match (&self.tree, lease) {
            (Some(tree), Some(lease)) => tree.pages(lease),
            _ => Vec::new(),
        }
    }

    pub(super) fn admit_slot(&mut self, ask: &Ask<'_>, seq: &mut Sequence) -> Hit {
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
        self.push_load(seq, Loading::default(), kv, None);
        Hit {
            host: path.len() * self.page,
            ..Hit::default()
        }
    }

    pub(super) fn admit_high(&mut self, ask: &Ask<'_>, seq: &mut Sequence) -> Option<Hit> {
        let mut lease = self.matched(ask.prompt, usize::MAX, seq.class);
        let path = self.path(lease.as_ref());
        let (mut resident, mut load) = usable(&path);
        if is_loading(&path) && resident < path.len() {
            // What comes after it can be loaded in the next step, and need not be computed.
            drop(lease);
            self.sweep();
            return None;
        }
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
        if room < load + 1 || !self.has_room(ask, resident, room) {
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
            let loading = Loading {
                tree: Some((started.id, pages)),
                ..Loading::default()
            };
            self.push_load(seq, loading, kv, None);
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

    /// Whether the running requests and this one can all go on, by the admission mode.
    pub(super) fn has_room(&mut self, ask: &Ask<'_>, resident: usize, room: usize) -> bool {
        match self.config.admission {
            Admission::Reserve => {
                let own = self.pages_for(ask.demand.worst).saturating_sub(resident);
                let owed = self.owed(ask.running) + own;
                let fits = ask.running.is_empty() || owed <= room;
                if fits {
                    self.promised = owed;
                }
                fits
            }
            Admission::Estimate { .. } if ask.running.is_empty() => true,
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
    pub(super) fn future_peak(&self, all: &mut [Demand]) -> usize {
        let left = |one: &Demand| one.predicted.saturating_sub(one.tokens);
        all.sort_by_key(|one| std::cmp::Reverse(left(one)));
        (1..=all.len())
            .map(|alive| {
                let grown = left(&all[alive - 1]);
                let pages = all[..alive]
                    .iter()
                    .map(|one| self.pages_for(one.tokens + grown));
                pages.sum()
            })
            .max()
            .unwrap_or(0)
    }

    /// Adds a load to the step; the row of `seq` depends on it.
    pub(super) fn push_load(
        &mut self,
        seq: &mut Sequence,
        loading: Loading,
        kv: Vec<KvPiece>,
        state: Option<StatePiece>,
    ) {
        let job = self.new_job(Job::Load(loading));
        seq.loads.push(job);
        self.step.loads.push(LoadCopy {
            job,
            kv,
            state: state.into_iter().collect(),
        });
    }

    /// A row whose prefix another row of the step is loading depends on that load too.
    pub(super) fn join_loads(&self, seq: &mut Sequence, lease: Option<&Lease>) {
        let path = self.path(lease);
        if is_loading(&path) {
            let loads = self.step.loads.iter().map(|load| load.job);
            let others: Vec<u64> = loads.filter(|job| !seq.loads.contains(job)).collect();
            seq.loads.extend(others);
        }
    }

    pub(super) fn restore_snapshot(&mut self, slot: SlotId, seq: &mut Sequence) {
        let snapshot = seq.lease.as_ref().and_then(Lease::snapshot);
        let Some((_, host_slot)) = snapshot.filter(|_| self.config.hybrid) else {
            return;
        };
        let piece = StatePiece {
            device_slot: slot.index(),
            host_slot,
        };
        self.push_load(seq, Loading::default(), Vec::new(), Some(piece));
    }

    pub(super) fn pieces(
        &self,
        copies: impl Iterator<Item = (HostPage, PageEntry)>,
    ) -> Vec<KvPiece> {
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
}

/// Pages at the start of a path that are on the device or about to be, and the pages after them
/// that could be loaded. None can be while a load of another request is not over: its pages come
/// before them.
pub(super) fn usable(path: &[TreePage]) -> (usize, usize) {
    let resident = path
        .iter()
        .take_while(|page| {
            matches!(
                page.state,
                NodeState::Full | NodeState::Backing | NodeState::Loading
            )
        })
        .count();
    if is_loading(path) {
        return (resident, 0);
    }
    let load = path[resident..]
        .iter()
        .take_while(|page| page.state == NodeState::Host)
        .count();
    (resident, load)
}

pub(super) fn is_loading(path: &[TreePage]) -> bool {
    path.iter().any(|page| page.state == NodeState::Loading)
}
