//! The layers of a step, its end, and the stores behind it.

use super::*;

impl Trace {
    /// The next layer: its gate, its kernel, its release.
    pub(super) fn forward_on(&mut self) -> bool {
        let Some(mut forward) = self.forward.take() else {
            return false;
        };
        let layer = forward.layer;
        if !forward.passed && !self.slips(Slip::SecondPath) {
            let passed = forward.handle.before_layer_for(layer, Duration::ZERO);
            if !passed.unwrap() {
                self.forward = Some(forward);
                return false;
            }
        }
        if self.slips(Slip::ReleaseBeforeReader) {
            forward.handle.after_layer(layer).unwrap();
            if !forward.passed {
                forward.passed = true;
                self.forward = Some(forward);
                return true;
            }
        }
        forward.passed = false;
        self.sim.launch(self.kernel(&forward));
        // An abandoned forward: the handle is dropped half way.
        let dropped = layer > 0 && self.chance(40);
        if !dropped {
            forward.handle.after_layer(layer).unwrap();
            forward.layer += 1;
            if forward.layer < MODEL.len() {
                self.forward = Some(forward);
                return true;
            }
        }
        self.end_step(forward, dropped);
        true
    }

    fn kernel(&self, forward: &Forward) -> Kernel {
        let layer = MODEL[forward.layer];
        let mut kernel = Kernel {
            name: format!("step {}, {layer:?}", self.retires.len() - 1),
            cost_ns: 1,
            ..Kernel::default()
        };
        let bytes = u64::from(TOKENS) * CELL;
        let pages = u64::from(PAGES);
        match layer {
            LayerKind::Kv(layer) => {
                for plane in 0..KV_PLANES {
                    for &(page, content, job) in &forward.reads {
                        kernel.reads.push(Read {
                            address: page_address(DEVICE, plane, pages, layer, page as u64),
                            bytes,
                            version: version(content, plane, layer),
                            job,
                        });
                    }
                    if let Some((low, k0, job)) = &forward.window {
                        let k = k0 + u64::from(layer);
                        let buffer = u32::try_from(k % u64::from(self.width)).unwrap();
                        for &(flat, content) in low {
                            let flat = u64::from(flat);
                            kernel.reads.push(Read {
                                address: page_address(DEVICE, plane, pages, buffer, flat),
                                bytes,
                                version: version(content, plane, layer),
                                job: Some(*job),
                            });
                        }
                    }
                    if let Some((page, content)) = forward.tail {
                        kernel.writes.push(Write {
                            address: page_address(DEVICE, plane, pages, layer, page as u64),
                            bytes,
                            version: version(content, plane, layer),
                        });
                    }
                }
            }
            LayerKind::State(layer) => {
                for &(slot, content, job) in &forward.states {
                    kernel.reads.push(Read {
                        address: slot_address(DEVICE, SLOTS, layer, slot),
                        bytes: CELL,
                        version: version(content, STATE, layer),
                        job,
                    });
                }
                if let Some((slot, content)) = forward.update {
                    kernel.writes.push(Write {
                        address: slot_address(DEVICE, SLOTS, layer, slot),
                        bytes: CELL,
                        version: version(content, STATE, layer),
                    });
                }
            }
        }
        kernel
    }

    fn end_step(&mut self, forward: Forward, dropped: bool) {
        let step = self.retires.len() - 1;
        let ticket = self.queue.record_compute().unwrap();
        self.retires[step] = Some(ticket.clone());
        if dropped {
            drop(forward.handle);
            // Half of its layers were not written.
            if let Some((page, _)) = forward.tail {
                self.pages[page] = Place::Free { fence: step };
            }
            if let Some((slot, _)) = forward.update {
                self.slots[slot] = Place::Free { fence: step };
            }
            return;
        }
        forward.handle.release();
        self.finishing.push(forward.handle);
        if let Some((slot, content)) = forward.update {
            self.slots[slot] = Place::Valid { content, stores: 0 };
        }
        let ticket = self.early_ticket.take().unwrap_or(ticket);
        if let Some((page, content)) = forward.tail {
            self.store(page, content, forward.update, ticket);
        }
    }

    fn store(
        &mut self,
        page: usize,
        content: Content,
        update: Option<(usize, Content)>,
        after: Ticket,
    ) {
        let usable = |host: &Host| match host {
            Host::Empty => true,
            Host::Quarantined => self.slips(Slip::ReuseUnsettled),
            Host::Valid { .. } | Host::Storing { .. } => false,
        };
        let Some(to) = self.host.iter().rposition(usable) else {
            return;
        };
        let snapshot = self.snapshots.iter().position(|s| *s == Host::Empty);
        let state = update.zip(snapshot);
        let state = state.map(|((slot, content), snapshot)| (slot, snapshot, content));
        let job = self.job();
        self.host[to] = Host::Storing { content };
        if let Place::Valid { stores, .. } = &mut self.pages[page] {
            *stores += 1;
        }
        if let Some((slot, snapshot, content)) = state {
            self.snapshots[snapshot] = Host::Storing { content };
            if let Place::Valid { stores, .. } = &mut self.slots[slot] {
                *stores += 1;
            }
        }
        let store = StoreJob {
            job,
            kv: vec![piece(page, to)],
            state: state
                .iter()
                .map(|&(slot, snapshot, _)| state_piece(slot, snapshot))
                .collect(),
        };
        self.queue.submit_store(store, after).unwrap();
        self.leases.insert(
            job,
            Lease::Store {
                page,
                to,
                content,
                state,
            },
        );
        self.coverage.stores += 1;
    }
}
