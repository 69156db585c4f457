//! What the end of a copy changes.

use super::jobs::{Event, Job, Loading};
use super::sequence::{Place, Sequence};
use super::{Memory, NAMESPACE};
use crate::copy_job::CopyOutcome;
use crate::host::HostPage;
use crate::pages::{Owner, PageEntry};
use crate::request::{Key, PriorityClass};
use crate::tree::Lease;

impl Memory {
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
            return self.abandon(&ended, job);
        }
        let event = self.finish_job(job, ended, ok);
        self.sweep();
        // A node follows once its parent is stored.
        self.issue_stores();
        event
    }

    pub(super) fn finish_job(&mut self, job: u64, ended: Job, ok: bool) -> Option<Event> {
        match ended {
            Job::Load(Loading {
                tree,
                private,
                parked: (hosts, snapshot),
            }) => {
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
                let freed = self
                    .tree
                    .as_ref()
                    .and_then(|own| own.end_snapshot(tree, ok));
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
                self.publish_slot(&prefix, first_page, &host, snapshot, ok);
                Some(Event::SlotRead { key })
            }
        }
    }

    /// Ends a job whose copy never ended, without giving back what the copy may still touch. The
    /// request and the tree are told that it failed.
    pub(super) fn abandon(&mut self, ended: &Job, job: u64) -> Option<Event> {
        match ended {
            Job::Load(Loading {
                tree: Some((id, _)),
                ..
            }) => {
                if let Some(own) = &self.tree {
                    own.end_load(*id, false);
                }
                None
            }
            Job::Store { tree, .. } => {
                if let Some(own) = &self.tree {
                    own.end_store(*tree, false);
                }
                None
            }
            Job::Snapshot { tree, .. } => {
                if let Some(own) = &self.tree {
                    own.end_snapshot(*tree, false);
                }
                None
            }
            Job::Park {
                key, reads_slot, ..
            } => {
                // What it may still read there does no harm to the next owner of the slot.
                if *reads_slot {
                    self.slot_read(*key);
                }
                Some(Event::Parked {
                    key: *key,
                    job,
                    ok: false,
                })
            }
            Job::StoreSlot { key, .. } => {
                self.slot_read(*key);
                Some(Event::SlotRead { key: *key })
            }
            // The page stays where it is and is read there; it can never be stored.
            Job::Seal { .. }
            | Job::Load(Loading { tree: None, .. })
            | Job::Window { .. }
            | Job::Abandoned => None,
        }
    }

    /// With nothing live and nothing under way: whatever is not free is the tree's.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn check_idle(&self) -> std::result::Result<(), String> {
        let tree = self
            .tree
            .as_ref()
            .map(crate::tree::PrefixTree::stats)
            .unwrap_or_default();
        let pages = self.pages.as_ref().map(crate::pages::PageAllocator::stats);
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
        let free = (
            self.host.free_count(),
            self.snapshots.free_count(),
            self.staging.free_count(),
        );
        Err(format!(
            "{} jobs, {} slots read, free {free:?}, {pages:?}, {tree:?}",
            self.jobs.len(),
            self.slot_reads.len()
        ))
    }

    pub(super) fn slot_read(&mut self, key: Key) {
        if let Some(count) = self.slot_reads.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.slot_reads.remove(&key);
            }
        }
    }

    pub(super) fn publish_slot(
        &mut self,
        prefix: &[u32],
        first_page: usize,
        host: &[HostPage],
        snapshot: Option<(u32, u32)>,
        ok: bool,
    ) {
        if let Some((staging, _)) = snapshot {
            self.free_staging(staging);
        }
        let slot = snapshot.map(|(_, slot)| slot);
        let Some(tree) = self.tree.as_ref().filter(|_| ok) else {
            self.free_host(host);
            self.free_snapshots(slot.as_slice());
            return;
        };
        // Refused if the pages before it were evicted meanwhile.
        match tree.insert_host(NAMESPACE, prefix, first_page, host, PriorityClass::High) {
            Ok(duplicates) => self.free_host(&duplicates),
            Err(_) => self.free_host(host),
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
}
