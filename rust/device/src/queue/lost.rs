//! Pages that a copy which never ended may still touch.
//!
//! The engine learns of them by an outcome that is not settled, but a job that names one of them
//! may be in the queue already: a LOW page is loaded again in every step. Such a job fails instead
//! of being submitted. Bounded by the number of pages there are.

use std::collections::BTreeSet;

use headrace_core::{CopyPlan, Direction};

/// A page or slot of one side: (is state, index).
type Place = (bool, u32);

#[derive(Default)]
pub(super) struct Lost {
    /// Read or written by a lost copy.
    device: BTreeSet<Place>,
    /// Written by a lost store.
    host_written: BTreeSet<Place>,
    /// Read by a lost load; reading them goes on.
    host_read: BTreeSet<Place>,
}

fn places(plan: &CopyPlan) -> impl Iterator<Item = (Place, Place)> + '_ {
    let (kv, state) = plan.pieces();
    let kv = kv
        .iter()
        .map(|p| ((false, p.device_page), (false, p.host_page.0)));
    let state = state
        .iter()
        .map(|p| ((true, p.device_slot), (true, p.host_slot)));
    kv.chain(state)
}

impl Lost {
    /// All pages of a job that was not seen to end.
    pub(super) fn add(&mut self, plan: &CopyPlan) {
        for (device, host) in places(plan) {
            self.device.insert(device);
            match plan.direction() {
                Direction::ToDevice => self.host_read.insert(host),
                Direction::ToHost => self.host_written.insert(host),
            };
        }
    }

    /// Whether a job would touch one of them.
    pub(super) fn blocks(&self, plan: &CopyPlan) -> bool {
        let to_host = plan.direction() == Direction::ToHost;
        !self.device.is_empty()
            && places(plan).any(|(device, host)| {
                self.device.contains(&device)
                    || self.host_written.contains(&host)
                    || (to_host && self.host_read.contains(&host))
            })
    }
}
