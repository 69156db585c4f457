//! What requests have computed becomes reusable: pages go to the tree, and copies of pages and
//! states to the host.

use super::jobs::{Job, StoreCopy};
use super::sequence::{Place, Sequence};
use super::{Memory, STORE_PAGES};
use crate::copy_plan::{KvPiece, StatePiece};
use crate::host::HostPage;
use crate::ids::SlotId;
use crate::pages::{Owner, PageEntry};
use crate::request::{Key, PriorityClass};

impl Memory {
    /// Where the state of a request should be saved at the end of a chunk that goes from `from` to
    /// at most `to`; the chunk should end there.
    pub(crate) fn snapshot_cut(&self, prompt: usize, from: usize, to: usize) -> Option<usize> {
        if !self.config.hybrid || self.tree.is_none() || self.config.snapshots == 0 {
            return None;
        }
        let interval = self.config.snapshot_interval as usize;
        let last = self.last_cut(prompt);
        let next = (from / interval + 1) * interval;
        let cut = if next < last { next } else { last };
        (cut > from && cut <= to).then_some(cut)
    }

    /// Where the last state of a prompt is saved: at least its last token is computed.
    fn last_cut(&self, prompt: usize) -> usize {
        (prompt - 1) / self.page * self.page
    }

    /// The state slot of a buffer for the state of a request at `cut`, the end of this step's chunk;
    /// `None` if none is free. One buffer is kept for the last states of prompts, without which all
    /// that comes after an earlier one is computed again.
    pub(crate) fn stage_snapshot(&mut self, prompt: usize, cut: usize) -> Option<u32> {
        let kept = usize::from(cut < self.last_cut(prompt) && self.staging.total() > 1);
        let staging = if self.staging.free_count() > kept {
            self.staging.alloc(1).and_then(|one| one.first().copied())
        } else {
            None
        };
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

    pub(super) fn publish(&mut self, seq: &mut Sequence, prompt: &[u32], computed: usize) {
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

    pub(super) fn save_snapshot(&mut self, seq: &Sequence, position: usize, staging: u32) {
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

    pub(super) fn skip_snapshot(&mut self, slot: Option<u32>, staging: u32) {
        self.counters.snapshots_skipped += 1;
        self.free_snapshots(slot.as_slice());
        self.free_staging(staging);
    }

    pub(super) fn push_store(&mut self, job: u64, kv: Vec<KvPiece>, state: Option<(u32, u32)>) {
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
    pub(super) fn store_slot(
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

    /// Starts the stores the tree wants, but for those that would break a promise.
    pub(super) fn issue_stores(&mut self) {
        let mut held_back = Vec::new();
        loop {
            let evictable = self.available();
            let Some(want) = self
                .tree
                .as_ref()
                .and_then(|tree| tree.next_store(STORE_PAGES))
            else {
                break;
            };
            let left = self.available();
            if !want.leaving && left < evictable && left < self.promised {
                held_back.push(want);
                continue;
            }
            let pages = want.pages.clone();
            let host = self.alloc_host(pages.len());
            let Some(tree) = &self.tree else { break };
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
        if let Some(tree) = self.tree.as_ref().filter(|_| !held_back.is_empty()) {
            self.held_back = true;
            for want in held_back {
                tree.begin_store(want, Vec::new());
            }
        }
    }

    /// Starts for the host what a LOW request has filled and the tree does not hold.
    pub(super) fn seal(&mut self, key: Key, seq: &mut Sequence, computed: usize) {
        let from = self.leased(seq);
        for at in 0..(computed / self.page).saturating_sub(from) {
            let Some(&Place::High(page)) = seq.tail.get(at) else {
                continue;
            };
            let Some(&[host]) = self
                .alloc_host(1)
                .as_deref()
                .and_then(|one| one.first_chunk())
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
}
