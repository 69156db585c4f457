//! What the queue tells of jobs, and what becomes of their pages.

use super::*;

impl Trace {
    pub(super) fn receive(&mut self) -> std::result::Result<(), String> {
        let outcomes = std::mem::take(&mut *self.delivered.lock().unwrap());
        for (job, outcome) in outcomes {
            let times = self.ended.entry(job).or_default();
            *times += 1;
            if *times > 1 {
                return Err(format!("job {job} ended twice"));
            }
            let Some(lease) = self.leases.remove(&job) else {
                return Err(format!("job {job} has no lease"));
            };
            if self.cancelled.contains(&job) && outcome != CopyOutcome::Cancelled {
                return Err(format!("job {job} was cancelled and ended as {outcome:?}"));
            }
            if outcome == CopyOutcome::Cancelled && self.sim.has_copied(job) {
                return Err(format!("job {job} was cancelled after it was submitted"));
            }
            let settled = match &outcome {
                CopyOutcome::Done => {
                    self.coverage.done += 1;
                    true
                }
                CopyOutcome::Cancelled => {
                    self.coverage.cancelled += 1;
                    true
                }
                CopyOutcome::Failed(failure) => {
                    self.coverage.failed += 1;
                    self.coverage.unsettled += u64::from(!failure.settled);
                    if failure.job != job {
                        return Err(format!("job {job} ended as {failure}"));
                    }
                    failure.settled
                }
            };
            self.end_lease(lease, outcome == CopyOutcome::Done, settled);
        }
        Ok(())
    }

    fn end_lease(&mut self, lease: Lease, done: bool, settled: bool) {
        let unpin = |host: &mut Host| match host {
            _ if !settled => *host = Host::Quarantined,
            Host::Valid { loads, .. } => *loads = loads.saturating_sub(1),
            _ => {}
        };
        let arrived = |content, fence| match done {
            true => Place::Valid { content, stores: 0 },
            false if settled => Place::Free { fence },
            false => Place::Quarantined,
        };
        match lease {
            Lease::Load {
                page,
                from,
                content,
                state,
                step,
            } => {
                unpin(&mut self.host[from]);
                self.pages[page] = arrived(content, step);
                if let Some((slot, snapshot, content)) = state {
                    unpin(&mut self.snapshots[snapshot]);
                    // A state that a step has updated holds what that step wrote.
                    if self.slots[slot] == Place::Loading {
                        self.slots[slot] = arrived(content, step);
                    } else if !done {
                        self.slots[slot] = Place::Quarantined;
                    }
                }
            }
            Lease::Window { pieces } => {
                for (flat, from, _) in pieces {
                    unpin(&mut self.host[from]);
                    if !settled {
                        self.low[(flat / PAGES / self.width) as usize] = Place::Quarantined;
                    }
                }
            }
            Lease::Store {
                page,
                to,
                content,
                state,
            } => {
                let place = |place: &mut Place| match place {
                    _ if !settled => *place = Place::Quarantined,
                    Place::Valid { stores, .. } => *stores = stores.saturating_sub(1),
                    _ => {}
                };
                let published = |content| match done {
                    true => Host::Valid { content, loads: 0 },
                    false if settled => Host::Empty,
                    false => Host::Quarantined,
                };
                place(&mut self.pages[page]);
                self.host[to] = published(content);
                if let Some((slot, snapshot, content)) = state {
                    place(&mut self.slots[slot]);
                    self.snapshots[snapshot] = published(content);
                }
            }
        }
    }
}
