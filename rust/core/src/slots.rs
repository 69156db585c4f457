//! Slot allocator: which request owns which fixed place of the KV cache.
//!
//! A table may be shared: every user of it (a scheduler, or a caller that drives the engine by
//! hand) has a view of its own, with its own request ids and its own epochs, and can neither free
//! nor fence the slots of another.
//!
//! Owns: the state of every slot. Knows nothing of tensors or queues. One mutex, no lock is taken
//! inside it.
//!
//! Invariants (checked by [`SlotAllocator::check`]):
//! - (user, request) -> slot is injective and slot -> (user, request) its inverse;
//!   free + in use + finishing = n;
//! - the free set holds exactly the slots that are `Free`;
//! - a finishing slot becomes free only when the step of its user it is fenced by has retired.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::{Epoch, RequestId, SlotId};
use crate::sync::Mutex;

/// Largest table: the slot index travels as an i32 to kernels.
const MAX_SLOTS: u32 = 1 << 20;
const WORD_BITS: u32 = u64::BITS;

/// Index of a user of the table.
type User = usize;

/// A request of one user.
type Tenant = (User, RequestId);

/// Who holds a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotState {
    /// Nobody; in the free set.
    Free,
    /// `tenant` may read and write it.
    InUse { tenant: Tenant },
    /// Freed by `tenant`, but its user's step `fence` may still touch it.
    Finishing { tenant: Tenant, fence: Epoch },
}

/// A slot handed to a request. The generation tells this tenancy from every earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotGrant {
    /// Which slot.
    pub slot: SlotId,
    /// Raised at every allocation of the slot.
    pub generation: u64,
}

/// Counts that were all true at one instant; they add up to `total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotStats {
    /// Slots nobody holds.
    pub free: u32,
    /// Slots owned by a request.
    pub in_use: u32,
    /// Freed slots that wait for a step to retire.
    pub finishing: u32,
    /// All slots.
    pub total: u32,
}

/// Thread-safe view of a table request id -> slot. The smallest free slot is handed out first.
pub struct SlotAllocator {
    table: Arc<Mutex<Table>>,
    user: User,
}

struct Table {
    states: Vec<SlotState>,
    /// Of every slot there ever was; at least as long as `states`.
    generations: Vec<u64>,
    /// Bit i % 64 of word i / 64 is set iff slot i is free.
    free_bits: Vec<u64>,
    by_tenant: BTreeMap<Tenant, SlotId>,
    finishing: Vec<SlotId>,
    /// Newest retired epoch of each user.
    retired: Vec<Epoch>,
}

impl SlotAllocator {
    /// A table of `total` free slots. Fails with [`Error::Config`] for 0 or more than 2^20.
    pub fn new(total: u32) -> Result<Self> {
        let mut table = Table {
            states: Vec::new(),
            generations: Vec::new(),
            free_bits: Vec::new(),
            by_tenant: BTreeMap::new(),
            finishing: Vec::new(),
            retired: vec![Epoch(0)],
        };
        table.resize(total)?;
        Ok(Self {
            table: Arc::new(Mutex::new(table)),
            user: 0,
        })
    }

    /// A view of the same slots for another user, with ids and epochs of its own.
    #[must_use]
    pub fn share(&self) -> Self {
        let mut table = self.table.lock();
        table.retired.push(Epoch(0));
        Self {
            table: self.table.clone(),
            user: table.retired.len() - 1,
        }
    }

    /// Gives `request` the smallest free slot.
    ///
    /// Fails with `DuplicateRequest` if it has one (in use or finishing), `OutOfSlots` if none is
    /// free.
    pub fn allocate(&self, request: RequestId) -> Result<SlotGrant> {
        self.table.lock().allocate((self.user, request))
    }

    /// Takes the slot from `request`. With a fence it is free once that step has retired, without
    /// one, or with one that has retired, at once. Fails with `UnknownRequest` if `request` has no
    /// slot in use.
    pub fn free(&self, request: RequestId, fence: Option<Epoch>) -> Result<SlotId> {
        self.table.lock().free((self.user, request), fence)
    }

    /// Step `epoch`, and all before it, will touch no slot any more.
    pub fn retire(&self, epoch: Epoch) {
        self.table.lock().retire(self.user, epoch);
    }

    /// Changes the number of slots. Fails with `Config` for 0, more than 2^20, or when a slot that
    /// would go is not free.
    pub fn resize(&self, total: u32) -> Result<()> {
        self.table.lock().resize(total)
    }

    /// What `request` was granted, while it has it in use.
    pub fn grant_of(&self, request: RequestId) -> Option<SlotGrant> {
        let table = self.table.lock();
        let slot = *table.by_tenant.get(&(self.user, request))?;
        let in_use = matches!(table.states[slot.position()], SlotState::InUse { .. });
        in_use.then(|| SlotGrant {
            slot,
            generation: table.generations[slot.position()],
        })
    }

    /// The slot `request` has in use.
    pub fn slot_of(&self, request: RequestId) -> Option<SlotId> {
        self.grant_of(request).map(|grant| grant.slot)
    }

    /// Counts by state.
    pub fn stats(&self) -> SlotStats {
        self.table.lock().stats()
    }

    /// The state of every slot as (slot, generation, request, fence).
    pub fn dump(&self) -> Vec<(u32, u64, Option<u64>, Option<u64>)> {
        let table = self.table.lock();
        let states = table.states.iter().zip(&table.generations);
        (0..)
            .zip(states)
            .map(|(index, (state, &generation))| match *state {
                SlotState::Free => (index, generation, None, None),
                SlotState::InUse { tenant: (_, id) } => (index, generation, Some(id.0), None),
                SlotState::Finishing {
                    tenant: (_, id),
                    fence,
                } => (index, generation, Some(id.0), Some(fence.0)),
            })
            .collect()
    }

    /// Recounts everything from the per-slot states. The error says what does not agree.
    pub fn check(&self) -> std::result::Result<(), String> {
        self.table.lock().check()
    }
}

impl Table {
    fn allocate(&mut self, tenant: Tenant) -> Result<SlotGrant> {
        if self.by_tenant.contains_key(&tenant) {
            return Err(Error::DuplicateRequest { id: tenant.1 });
        }
        let Some(slot) = self.smallest_free() else {
            return Err(Error::OutOfSlots {
                needed: 1,
                free: 0,
                total: self.total(),
            });
        };
        self.set_free_bit(slot, false);
        self.states[slot.position()] = SlotState::InUse { tenant };
        self.by_tenant.insert(tenant, slot);
        let generation = &mut self.generations[slot.position()];
        *generation += 1;
        Ok(SlotGrant {
            slot,
            generation: *generation,
        })
    }

    fn free(&mut self, tenant: Tenant, fence: Option<Epoch>) -> Result<SlotId> {
        let unknown = Error::UnknownRequest { id: tenant.1 };
        let Some(&slot) = self.by_tenant.get(&tenant) else {
            return Err(unknown);
        };
        if !matches!(self.states[slot.position()], SlotState::InUse { .. }) {
            return Err(unknown);
        }
        match fence.filter(|&fence| fence > self.retired[tenant.0]) {
            Some(fence) => {
                self.states[slot.position()] = SlotState::Finishing { tenant, fence };
                self.finishing.push(slot);
            }
            None => self.release(slot, tenant),
        }
        Ok(slot)
    }

    fn retire(&mut self, user: User, epoch: Epoch) {
        if epoch <= self.retired[user] {
            return;
        }
        self.retired[user] = epoch;
        let finishing = std::mem::take(&mut self.finishing);
        for slot in finishing {
            match self.states[slot.position()] {
                SlotState::Finishing { tenant, fence } if tenant.0 == user && fence <= epoch => {
                    self.release(slot, tenant);
                }
                _ => self.finishing.push(slot),
            }
        }
    }

    fn release(&mut self, slot: SlotId, tenant: Tenant) {
        self.states[slot.position()] = SlotState::Free;
        self.by_tenant.remove(&tenant);
        self.set_free_bit(slot, true);
    }

    fn resize(&mut self, total: u32) -> Result<()> {
        if total == 0 || total > MAX_SLOTS {
            let expected = format!("between 1 and {MAX_SLOTS} slots");
            return Err(Error::config("slots", total, expected));
        }
        let keep = total as usize;
        let busy = |&i: &usize| self.states[i] != SlotState::Free;
        if let Some(busy) = (keep..self.states.len()).rfind(busy) {
            let expected = format!("slot {busy} is not free, so at least {} slots", busy + 1);
            return Err(Error::config("slots", total, expected));
        }
        let old = self.states.len();
        self.states.resize(keep, SlotState::Free);
        // Never cut: a slot that comes back must not repeat a generation.
        self.generations.resize(keep.max(self.generations.len()), 0);
        self.free_bits.resize(keep.div_ceil(WORD_BITS as usize), 0);
        for index in old.min(keep)..self.free_bits.len() * WORD_BITS as usize {
            let bit = 1 << (index % WORD_BITS as usize);
            let word = &mut self.free_bits[index / WORD_BITS as usize];
            *word = if index < keep {
                *word | bit
            } else {
                *word & !bit
            };
        }
        Ok(())
    }

    fn smallest_free(&self) -> Option<SlotId> {
        let (word, bits) = (0u32..)
            .zip(&self.free_bits)
            .find(|&(_, &bits)| bits != 0)?;
        SlotId::new(word * WORD_BITS + bits.trailing_zeros())
    }

    fn set_free_bit(&mut self, slot: SlotId, free: bool) {
        let bit = 1u64 << (slot.index() % WORD_BITS);
        let word = &mut self.free_bits[(slot.index() / WORD_BITS) as usize];
        *word = if free { *word | bit } else { *word & !bit };
    }

    fn total(&self) -> u32 {
        u32::try_from(self.states.len()).unwrap_or(u32::MAX)
    }

    fn stats(&self) -> SlotStats {
        let free = self.free_bits.iter().map(|word| word.count_ones()).sum();
        let finishing = u32::try_from(self.finishing.len()).unwrap_or(u32::MAX);
        let total = self.total();
        SlotStats {
            free,
            finishing,
            in_use: total - free - finishing,
            total,
        }
    }

    fn check(&self) -> std::result::Result<(), String> {
        let mut held = 0;
        for (index, state) in self.states.iter().enumerate() {
            let bit = self.free_bits[index / WORD_BITS as usize] >> (index % WORD_BITS as usize);
            if (bit & 1 == 1) != (*state == SlotState::Free) {
                return Err(format!("slot {index}: free bit {} for {state:?}", bit & 1));
            }
            let (SlotState::InUse { tenant } | SlotState::Finishing { tenant, .. }) = *state else {
                continue;
            };
            held += 1;
            if self.by_tenant.get(&tenant).map(|slot| slot.position()) != Some(index) {
                return Err(format!(
                    "slot {index}: request {} points elsewhere",
                    tenant.1.0
                ));
            }
            if let SlotState::Finishing { fence, .. } = *state
                && (fence <= self.retired[tenant.0]
                    || !self.finishing.iter().any(|s| s.position() == index))
            {
                return Err(format!("slot {index}: finishing behind a retired step"));
            }
        }
        let stats = self.stats();
        if held != self.by_tenant.len()
            || held != (stats.in_use + stats.finishing) as usize
            || stats.free as usize + held != self.states.len()
        {
            return Err(format!("{held} slots held, but {stats:?}"));
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
