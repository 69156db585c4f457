//! A step of the machine: the copies of its plan, its rows, its end.

use super::*;

impl Machine {
    /// Plans a step if none is in flight, then perhaps the one after it, then ends the oldest: it
    /// runs as late as it may. `fails` decides which copies of it fail. False if there was nothing
    /// to do.
    pub(super) fn step(&mut self, mut fails: impl FnMut() -> bool, how: How) -> bool {
        if self.flight.is_empty() {
            let plan = self.scheduler.try_plan();
            let stores = self.scheduler.take_stores();
            let Some(plan) = plan else {
                assert!(stores.is_empty(), "nobody asks for them without a step");
                return false;
            };
            self.stores.extend(stores);
            assert!(plan.token_sources.iter().all(|&source| source == -1));
            let garbage = self.run_copies(&plan, &mut fails);
            self.launched(plan, garbage);
        }
        if how.ahead && self.flight.len() == 1 {
            let ahead = self.scheduler.ahead(&self.flight[0].0);
            if let Some(plan) = ahead {
                assert!(plan.copies.is_empty() && plan.snapshots.is_empty());
                self.launched(plan, false);
            }
        }
        if let Some(back) = how.abort {
            self.abort(back);
        }
        self.end_step(how.broken, how.stops);
        true
    }

    /// Nothing that a row of `plan` writes is in reach of a row that flies for somebody else, nor
    /// the other way round.
    pub(super) fn launched(&mut self, plan: StepPlan, garbage: bool) {
        self.scheduler.check().unwrap();
        for (other, _) in &self.flight {
            for (one, two) in [(&plan, other), (other, &plan)] {
                for (id, slot, written, _) in places(one) {
                    for (other_id, other_slot, _, table) in places(two) {
                        let apart =
                            slot != other_slot && written.iter().all(|page| !table.contains(page));
                        assert!(id == other_id || apart, "{id} writes to {other_id}");
                    }
                }
            }
        }
        self.flight.push_back((plan, garbage));
    }

    /// Ends the oldest step in flight; bit i of `stops` ends its i-th sampled row.
    pub(super) fn end_step(&mut self, broken: bool, stops: u8) {
        let (plan, garbage) = self.flight.pop_front().unwrap();
        if let Some((newer, _)) = self.flight.front() {
            let stale = Err(Error::StalePlan { epoch: newer.epoch });
            assert_eq!(self.scheduler.fail(newer.epoch, "too early", 0), stale);
            assert!(self.scheduler.try_plan().is_none());
        }
        if broken {
            self.scheduler.fail(plan.epoch, "broken", 0).unwrap();
            self.latest = vec![0; plan.sample_rows.len()];
            for (_, garbage) in &mut self.flight {
                *garbage = true; // its rows run for nothing, behind a step that wrote nothing
            }
            self.stores.extend(self.scheduler.take_stores());
            self.scheduler.check().unwrap();
            return;
        }
        let tokens = self.run_rows(&plan, garbage);
        let stops: Vec<bool> = (0..tokens.len())
            .map(|i| stops >> (i % 8) & 1 == 1)
            .collect();
        let report = self
            .scheduler
            .commit(plan.epoch, &tokens, &stops, 0)
            .unwrap();
        for (i, &row) in plan.sample_rows.iter().enumerate() {
            if report.accepted[i] {
                let id = plan.request_ids[usize::try_from(row).unwrap()];
                let token = u32::try_from(tokens[i]).unwrap();
                self.known.get_mut(&id).unwrap().push(token);
            }
        }
        self.latest = tokens;
        self.stores.extend(self.scheduler.take_stores());
        self.scheduler.check().unwrap();
    }

    /// Copies of the step, and whether one of them failed: rows that depend on it then read
    /// anything, and their tokens must not be taken.
    fn run_copies(&mut self, plan: &StepPlan, fails: &mut impl FnMut() -> bool) -> bool {
        let mut garbage = false;
        for load in &plan.copies.loads {
            if fails() {
                garbage = true;
                self.scheduler.complete(load.job, injected(load.job));
                continue;
            }
            for &piece in &load.kv {
                for layer in 0..self.setup.layers {
                    self.copy_in(piece, layer, false, 0);
                }
            }
            for &StatePiece {
                device_slot,
                host_slot,
            } in &load.state
            {
                let value = self.saved.get(&host_slot).copied().unwrap_or(0);
                self.state.insert(device_slot, value);
            }
            self.scheduler.complete(load.job, CopyOutcome::Done);
        }
        if let Some(window) = &plan.copies.window {
            let outcome = if fails() {
                garbage = true;
                injected(window.job)
            } else {
                CopyOutcome::Done
            };
            self.scheduler.complete(window.job, outcome);
        }
        garbage
    }

    fn run_rows(&mut self, plan: &StepPlan, garbage: bool) -> Vec<i32> {
        let rows = plan.request_ids.len();
        let at = |offsets: &[i64], row: usize| {
            usize::try_from(offsets[row]).unwrap()..usize::try_from(offsets[row + 1]).unwrap()
        };
        let page_tokens = if self.setup.pages.is_some() {
            PAGE
        } else {
            CONTEXT
        };
        let mut hashes = Vec::new();
        for row in 0..rows {
            let span = at(&plan.token_offsets, row);
            let known = &self.known[&plan.request_ids[row]];
            let start = usize::try_from(plan.starts[row]).unwrap();
            let token = |at: usize| match usize::try_from(plan.token_sources[at]) {
                Ok(source) => u32::try_from(self.latest[source]).unwrap(),
                Err(_) => u32::try_from(plan.token_ids[at]).unwrap(),
            };
            let mut tokens = known[..start].to_vec();
            tokens.extend(span.map(token));
            // The token of a row that runs for nothing became nobody's.
            let common = tokens.len().min(known.len());
            assert_eq!(
                tokens[..common],
                known[..common],
                "the row's tokens are its own"
            );
            hashes.push(prefixes(&tokens));
        }
        for layer in 0..self.setup.layers {
            if let Some(window) = &plan.copies.window {
                for &piece in &window.pieces.clone() {
                    self.copy_in(piece, layer, true, window.k0);
                }
            }
            for (row, hashes) in hashes.iter().enumerate() {
                let span = at(&plan.token_offsets, row);
                let table = &plan.block_tables[at(&plan.table_offsets, row)];
                let start = usize::try_from(plan.starts[row]).unwrap();
                for position in 0..start {
                    let entry = table[position / page_tokens];
                    let flat = self.flat(entry, layer, plan.stream_k0);
                    let offset = u32::try_from(position % page_tokens).unwrap();
                    let found = self.device.get(&(flat, offset)).copied();
                    let wanted = mix(hashes[position], u64::from(layer));
                    assert!(
                        garbage || found == Some(wanted),
                        "request {} layer {layer} position {position} of {start}, entry {entry:#x}",
                        plan.request_ids[row]
                    );
                }
                for (i, index) in span.enumerate() {
                    let position = start + i;
                    let page = u32::try_from(plan.token_pages[index]).unwrap();
                    assert_eq!(page, table[position / page_tokens]);
                    let flat = self.flat(page, layer, 0);
                    let offset = u32::try_from(position % page_tokens).unwrap();
                    let value = mix(hashes[position], u64::from(layer));
                    self.device.insert((flat, offset), value);
                }
            }
        }
        if self.setup.hybrid {
            for (row, hashes) in hashes.iter().enumerate() {
                let slot = u32::try_from(plan.slots[row]).unwrap();
                let start = usize::try_from(plan.starts[row]).unwrap();
                let before = self.state.get(&slot).copied();
                if start > 0 {
                    let wanted = Some(hashes[start - 1]);
                    assert!(
                        garbage || before == wanted,
                        "state of {}",
                        plan.request_ids[row]
                    );
                }
                self.state.insert(slot, *hashes.last().unwrap());
            }
            for &(slot, staging) in &plan.snapshots {
                self.state.insert(staging, self.state[&slot]);
            }
        }
        let sampled = plan.sample_rows.iter();
        sampled
            .map(|&row| {
                let hash = hashes[usize::try_from(row).unwrap()].last().unwrap();
                i32::try_from(next_token(*hash)).unwrap()
            })
            .collect()
    }
}
