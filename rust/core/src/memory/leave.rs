//! Requests that leave the running set: for good, to be computed again, or parked in the host tier
//! until they resume.

use super::admission::{is_loading, usable};
use super::config::Preemption;
use super::jobs::{Job, Loading};
use super::sequence::{Parked, Place, Sequence};
use super::{Admitted, Ask, Hit, Memory, NAMESPACE};
use crate::copy_plan::{KvPiece, StatePiece};
use crate::ids::SlotId;
use crate::pages::{Owner, PageEntry};
use crate::request::{Key, PriorityClass};
use crate::tree::Lease;

impl Memory {
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

    pub(super) fn drop_parked(&mut self, seq: &mut Sequence) {
        let Some(parked) = seq.parked.take() else {
            return;
        };
        match parked.job.and_then(|job| self.jobs.get_mut(&job)) {
            Some(Job::Park { orphan, .. }) => {
                // The job still writes there.
                *orphan = true;
                seq.tail
                    .retain(|place| !matches!(place, Place::Parked { .. }));
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

    pub(super) fn park(
        &mut self,
        key: Key,
        slot: SlotId,
        seq: &mut Sequence,
        computed: usize,
    ) -> bool {
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
    pub(super) fn resume(
        &mut self,
        ask: &Ask<'_>,
        seq: &mut Sequence,
        parked: Parked,
    ) -> Option<Admitted> {
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
        if low {
            self.make_room_on(lease.as_ref());
        }
        let path = self.path(lease.as_ref());
        let (resident, load) = if low {
            (parked.prefix, 0)
        } else {
            usable(&path)
        };
        if resident + load < parked.prefix {
            drop(lease);
            self.sweep();
            return is_loading(&path).then_some(Admitted::No);
        }
        let own = seq
            .tail
            .iter()
            .filter(|place| matches!(place, Place::Parked { .. }))
            .count();
        let room = self.available();
        // A full last page needs another one to go on.
        let next = usize::from(parked.tokens.is_multiple_of(self.page));
        if room < load + own + next || (!low && !self.has_room(ask, resident, room)) {
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
            let loading = Loading {
                tree: Some((started.id, pages)),
                ..Loading::default()
            };
            self.push_load(seq, loading, kv, None);
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
            let loading = Loading {
                private,
                parked: (hosts, parked.snapshot),
                ..Loading::default()
            };
            self.push_load(seq, loading, kv, state);
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
}
