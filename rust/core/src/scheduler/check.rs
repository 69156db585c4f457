//! What must hold between any two calls, counted anew.

use super::state::State;
use crate::slots::SlotAllocator;

/// Nodes of the prefix tree that an idle scheduler recounts at a time.
const IDLE_NODES: usize = 32;

impl State {
    /// Recounts a part of the prefix tree when nothing else is to be done. Says what does not agree.
    pub(super) fn check_idle(&self) -> Option<String> {
        let idle = self.keys.is_empty() && self.in_flight.is_empty();
        let checked = idle.then(|| self.memory.check_some(IDLE_NODES))?;
        checked
            .err()
            .map(|what| format!("invariant broken: {what}"))
    }

    pub(super) fn check(&self, slots: &SlotAllocator) -> std::result::Result<(), String> {
        slots.check()?;
        self.memory.check()?;
        self.check_in_flight(slots)?;
        if self.keys.len() != self.waiting.len() + self.running.len() {
            return Err(format!(
                "{} live ids, {} waiting + {} running",
                self.keys.len(),
                self.waiting.len(),
                self.running.len()
            ));
        }
        for (key, request) in self.waiting.iter().chain(&self.running) {
            let id = request.id.0;
            if self.keys.get(&request.id) != Some(key) {
                return Err(format!("request {id} is not at its key"));
            }
            if self.results.get(request.id).is_some() {
                return Err(format!("request {id} is live and has a result"));
            }
            let running = self.running.contains_key(key);
            if running != request.slot.is_some()
                || (running && slots.slot_of(request.id) != request.slot)
            {
                return Err(format!(
                    "request {id}: running {running}, slot {:?}",
                    request.slot
                ));
            }
            // One that was preempted computes its tokens again.
            let most = match request.generated.len() {
                0 => request.prompt.len() - 1,
                n => request.prompt.len() + n - 1,
            };
            if request.computed > most || (!running && request.computed != 0) {
                return Err(format!(
                    "request {id}: {} tokens computed of {most}",
                    request.computed
                ));
            }
            let account = &request.account;
            let cached = account.cached.device + account.cached.host + account.cached.streamed;
            if account.computed_prompt + cached != account.covered {
                return Err(format!(
                    "request {id}: {} computed and {cached} cached are not {}",
                    account.computed_prompt, account.covered
                ));
            }
        }
        if let Some(key) = self
            .held_slots
            .keys()
            .find(|&&key| !self.memory.reads_slot(key))
        {
            return Err(format!("slot of request {key:?} is held for nothing"));
        }
        Ok(())
    }

    /// The steps in flight follow one another, the later one has no request that the earlier one has
    /// not, and nobody else can be given what a row of either writes.
    fn check_in_flight(&self, slots: &SlotAllocator) -> std::result::Result<(), String> {
        let epochs: Vec<u64> = self.in_flight.iter().map(|step| step.epoch.0).collect();
        let last = self.last_epoch.0;
        match epochs[..] {
            [] => return Ok(()),
            [only] if only == last => {}
            [older, newer] if older + 1 == newer && newer == last => {}
            _ => return Err(format!("steps {epochs:?} in flight, the last is {last}")),
        }
        let held = slots.dump();
        for step in &self.in_flight {
            for row in &step.rows {
                let (id, slot, epoch) = (row.id.0, row.slot.index(), step.epoch.0);
                let first = self.in_flight.front();
                if first.is_some_and(|first| first.rows.iter().all(|other| other.key != row.key)) {
                    return Err(format!(
                        "request {id} begins in step {epoch}, planned ahead"
                    ));
                }
                let holder = held.iter().find(|&&(index, ..)| index == slot);
                let safe = holder.is_some_and(|&(_, _, holder, fence)| {
                    holder == Some(id) && fence.is_none_or(|fence| fence >= epoch)
                });
                if !safe {
                    return Err(format!(
                        "slot {slot} of request {id} in step {epoch}: {holder:?}"
                    ));
                }
                if row.page.is_some_and(|page| !self.memory.holds(page)) {
                    return Err(format!("page {:?} of step {epoch} is free", row.page));
                }
            }
        }
        Ok(())
    }
}
