//! What a step begins with: loads, a window, a tail for new tokens.

use super::*;

impl Trace {
    pub(super) fn start(&mut self) {
        let step = self.retires.len();
        self.retires.push(None);
        let mut reads = Vec::new();
        let mut states = Vec::new();
        for page in 0..HIGH_PAGES {
            if let Place::Valid { content, .. } = self.pages[page] {
                reads.push((page, content, None));
            }
        }
        for slot in 0..SLOTS {
            if let Place::Valid { content, .. } = self.slots[slot] {
                states.push((slot, content, None));
            }
        }
        let mut loads = Vec::new();
        for _ in 0..self.draw(3) {
            loads.extend(self.new_load(step, &mut reads, &mut states));
        }
        let window = if self.chance(4) {
            None
        } else {
            self.new_window()
        };
        let tail = self.new_tail(&mut reads);
        let update = states.iter().find(|(slot, ..)| match self.slots[*slot] {
            Place::Valid { stores, .. } => stores == 0,
            _ => false,
        });
        let update = update.map(|&(slot, ..)| slot);
        let update = update.map(|slot| (slot, self.content()));
        let queued = window.as_ref().map(|(job, _)| job.clone());
        let handle = self.queue.start_step(loads, queued).unwrap();
        let window = window.map(|(job, contents)| (contents, job.k0, job.job));
        self.forward = Some(Forward {
            handle,
            reads,
            states,
            window,
            tail,
            update,
            layer: 0,
            passed: false,
        });
        if self.slips(Slip::TicketBeforeWriter) {
            self.early_ticket = self.queue.record_compute().ok();
        }
    }

    fn pick_host(&mut self) -> Option<(usize, Content)> {
        let early = self.slips(Slip::LoadBeforePublished);
        let hosts = self.host.iter().enumerate();
        let valid = hosts.filter_map(|(page, host)| match host {
            Host::Valid { content, .. } => Some((page, *content)),
            Host::Storing { content } if early => Some((page, *content)),
            _ => None,
        });
        let valid: Vec<_> = valid.collect();
        if valid.is_empty() {
            return None;
        }
        let at = self.draw(u32::try_from(valid.len()).unwrap()) as usize;
        Some(valid[at])
    }

    fn pin_host(&mut self, page: usize) {
        if let Host::Valid { loads, .. } = &mut self.host[page] {
            *loads += 1;
        }
    }

    fn new_load(
        &mut self,
        step: usize,
        reads: &mut Vec<(usize, Content, Option<u64>)>,
        states: &mut Vec<(usize, Content, Option<u64>)>,
    ) -> Option<LoadJob> {
        let page = self.free_page()?;
        let (from, content) = self.pick_host()?;
        let job = self.job();
        self.pages[page] = Place::Loading;
        self.pin_host(from);
        reads.push((page, content, Some(job)));
        let slot = (0..SLOTS).find(|&slot| self.is_free(self.slots[slot]));
        let snapshot = self
            .snapshots
            .iter()
            .position(|s| matches!(s, Host::Valid { .. }));
        let mut state = None;
        if let (Some(slot), Some(snapshot)) = (slot, snapshot)
            && let Host::Valid { content, loads } = &mut self.snapshots[snapshot]
        {
            *loads += 1;
            state = Some((slot, snapshot, *content));
            states.push((slot, *content, Some(job)));
            self.slots[slot] = Place::Loading;
            self.coverage.states += 1;
        }
        self.leases.insert(
            job,
            Lease::Load {
                page,
                from,
                content,
                state,
                step,
            },
        );
        Some(LoadJob {
            job,
            kv: vec![piece(page, from)],
            state: state
                .iter()
                .map(|&(slot, snapshot, _)| state_piece(slot, snapshot))
                .collect(),
        })
    }

    fn new_window(&mut self) -> Option<(WindowJob, Vec<(u32, Content)>)> {
        let mut pieces = Vec::new();
        let starts = (KV_LAYERS / self.width) as usize;
        for start in 0..starts {
            // LOW pages live on from step to step; only one that was lost is left out.
            if self.low[start] == Place::Quarantined && !self.slips(Slip::ReuseUnsettled) {
                continue;
            }
            if start > 0 && self.chance(2) {
                continue;
            }
            let (from, content) = self.pick_host()?;
            let raw = PAGES - 1;
            let flat = raw + u32::try_from(start).unwrap() * self.width * PAGES;
            pieces.push((flat, from, content));
        }
        if pieces.is_empty() {
            return None;
        }
        let job = self.job();
        for &(_, from, _) in &pieces {
            self.pin_host(from);
        }
        let k0 = self.next_k;
        self.next_k += u64::from(KV_LAYERS);
        let kv = pieces
            .iter()
            .map(|&(flat, from, _)| piece(flat as usize, from));
        let window = WindowJob {
            job,
            pieces: kv.collect(),
            k0,
            width: self.width,
        };
        let contents = pieces
            .iter()
            .map(|&(flat, _, content)| (flat, content))
            .collect();
        self.leases.insert(job, Lease::Window { pieces });
        self.coverage.windows += 1;
        Some((window, contents))
    }

    /// A page for new tokens: a fresh one, or one that is rewritten.
    fn new_tail(
        &mut self,
        reads: &mut Vec<(usize, Content, Option<u64>)>,
    ) -> Option<(usize, Content)> {
        let writable = (0..HIGH_PAGES).find(|&page| match self.pages[page] {
            Place::Valid { stores, .. } => stores == 0 || self.slips(Slip::WriteUnderStore),
            _ => false,
        });
        let rewrite = writable.filter(|_| self.chance(2) || self.slips(Slip::WriteUnderStore));
        let page = rewrite.or_else(|| self.free_page())?;
        reads.retain(|&(read, ..)| read != page);
        let content = self.content();
        let stores = match self.pages[page] {
            Place::Valid { stores, .. } => stores,
            _ => 0,
        };
        self.pages[page] = Place::Valid { content, stores };
        Some((page, content))
    }
}
