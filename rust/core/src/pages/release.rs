//! The ways out of a slot: free, fences, pins, change of owner, and which pages to empty.
//!
//! Calls over many slots mark them first, so that a bad one is found, and a slot listed twice
//! too, before anything has changed; then each page changes once for all its marked slots.

use super::Owner;
use super::bitset::ones;
use super::entry::PageEntry;
use super::table::{FREE, NOT_LIVE, Place, Table};
use crate::error::{Error, Result};
use crate::ids::Epoch;
use crate::request::PriorityClass;

impl Table {
    pub(super) fn release_owned(
        &mut self,
        entries: &[PageEntry],
        owner: Owner,
        epoch: Epoch,
    ) -> Result<()> {
        self.mark(entries, owner, |_, _| None)?;
        for &entry in entries {
            let Some((raw, class, bits)) = self.take_marks(entry) else {
                continue;
            };
            let state = &mut self.classes[class as usize];
            state.live[owner as usize] -= bits.count_ones() as usize;
            let page = &mut self.pages[raw as usize];
            let waits = if epoch > self.retired {
                bits
            } else {
                bits & page.pinned
            };
            page.set_owner(bits, Owner::Request);
            if waits != 0 {
                page.live &= !waits;
                page.pending |= waits;
                state.pending += waits.count_ones() as usize;
                self.wait(raw, class, waits, epoch);
            }
            self.release(raw, class, bits & !waits);
        }
        Ok(())
    }

    /// Queues pending slots behind their step, or behind their pins if it has retired.
    fn wait(&mut self, raw: u32, class: PriorityClass, bits: u64, epoch: Epoch) {
        let (num_pages, width) = (self.config.num_pages, self.class(class).width);
        let entries = ones(bits).map(|at| PageEntry::encode(raw, at * width, class, num_pages));
        if epoch > self.retired {
            self.fenced.entry(epoch).or_default().extend(entries);
        } else {
            self.held.extend(entries.map(|entry| (entry, epoch)));
        }
    }

    /// Gives slots that nobody holds or waits for back to the class, or the page to the pool.
    fn release(&mut self, raw: u32, class: PriorityClass, bits: u64) {
        if bits == 0 {
            return;
        }
        let state = &mut self.classes[class as usize];
        let page = &mut self.pages[raw as usize];
        state.pending -= (page.pending & bits).count_ones() as usize;
        page.live &= !bits;
        page.pending &= !bits;
        if page.live | page.pending != 0 {
            let slots = state.partial.slots(raw) | bits;
            state.partial.set_slots(raw, slots);
            return;
        }
        state.partial.set_slots(raw, 0);
        page.class = None;
        state.used -= 1;
        self.free.insert(FREE, raw);
        self.num_free += 1;
    }

    pub(super) fn retire(&mut self, epoch: Epoch) {
        if epoch <= self.retired {
            return;
        }
        self.retired = epoch;
        while let Some(first) = self.fenced.first_entry()
            && *first.key() <= epoch
        {
            let (fence, entries) = first.remove_entry();
            for &entry in &entries {
                let (raw, bit) = self.slot(entry);
                if self.pages[raw].pinned & bit == 0 {
                    self.pages[raw].marked |= bit;
                } else {
                    self.held.insert(entry, fence);
                }
            }
            for &entry in &entries {
                if let Some((raw, class, bits)) = self.take_marks(entry) {
                    self.release(raw, class, bits);
                }
            }
        }
    }

    pub(super) fn transfer(&mut self, entries: &[PageEntry], from: Owner, to: Owner) -> Result<()> {
        let pinned = |pinned, bit| (pinned & bit != 0).then_some(PINNED);
        self.mark(entries, from, pinned)?;
        for &entry in entries {
            if let Some((raw, class, bits)) = self.take_marks(entry) {
                let count = bits.count_ones() as usize;
                self.pages[raw as usize].set_owner(bits, to);
                let state = self.class_mut(class);
                state.live[from as usize] -= count;
                state.live[to as usize] += count;
            }
        }
        Ok(())
    }

    pub(super) fn pin(&mut self, entries: &[PageEntry]) -> Result<()> {
        for (index, &entry) in entries.iter().enumerate() {
            if let Err(error) = self.pin_one(index, entry) {
                for &entry in &entries[..index] {
                    self.unpin_one(entry);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn pin_one(&mut self, index: usize, entry: PageEntry) -> Result<()> {
        let (raw, bit) = self.place(index, entry)?;
        if self.pages[raw].live & bit == 0 {
            return Err(self.fault(index, entry, NOT_LIVE));
        }
        let pins = self.pins.get(&entry).copied().unwrap_or(0).checked_add(1);
        let pins = pins.ok_or_else(|| self.fault(index, entry, "it has 2^32 - 1 pins"))?;
        self.pins.insert(entry, pins);
        self.pages[raw].pinned |= bit;
        Ok(())
    }

    pub(super) fn unpin(&mut self, entries: &[PageEntry]) -> Result<()> {
        for (index, &entry) in entries.iter().enumerate() {
            if !self.unpin_one(entry) {
                let fault = self.place(index, entry).err();
                for &entry in &entries[..index] {
                    let (raw, bit) = self.slot(entry);
                    self.pages[raw].pinned |= bit;
                    *self.pins.entry(entry).or_insert(0) += 1;
                }
                return Err(fault.unwrap_or_else(|| self.fault(index, entry, "it is not pinned")));
            }
        }
        // Only now can nothing fail, so only now slots leave.
        for &entry in entries {
            if !self.pins.contains_key(&entry) && self.held.remove(&entry).is_some() {
                let (raw, bit) = self.slot(entry);
                self.pages[raw].marked |= bit;
                if let Some((raw, class, bits)) = self.take_marks(entry) {
                    self.release(raw, class, bits);
                }
            }
        }
        Ok(())
    }

    /// Takes one pin off; false if there is none.
    fn unpin_one(&mut self, entry: PageEntry) -> bool {
        let Some(pins) = self.pins.get_mut(&entry) else {
            return false;
        };
        *pins -= 1;
        if *pins == 0 {
            self.pins.remove(&entry);
            let (raw, bit) = self.slot(entry);
            self.pages[raw].pinned &= !bit;
        }
        true
    }

    /// LOW pages with the fewest live slots, ties to the smallest id, none with a slot that a copy
    /// job holds or reads.
    pub(super) fn reclaim_plan(&self, k: u32) -> Result<Vec<u32>> {
        let mut pages: Vec<(u32, u32)> = (0u32..)
            .zip(&self.pages)
            .filter(|(_, page)| page.class == Some(PriorityClass::Low))
            .filter(|(_, page)| page.copy | page.pinned == 0)
            .map(|(raw, page)| (page.live.count_ones(), raw))
            .collect();
        let needed = k as usize;
        if needed > pages.len() {
            return Err(Error::OutOfPages {
                needed,
                free: pages.len(),
                evictable: 0,
                item: None,
            });
        }
        pages.sort_unstable();
        pages.truncate(needed);
        Ok(pages.into_iter().map(|(_, raw)| raw).collect())
    }

    /// Marks live slots of `owner`, or none and says which is the first bad one. `refuse` is given
    /// the pinned slots of the page and the bit of the slot.
    fn mark(
        &mut self,
        entries: &[PageEntry],
        owner: Owner,
        refuse: impl Fn(u64, u64) -> Option<&'static str>,
    ) -> Result<()> {
        for (index, &entry) in entries.iter().enumerate() {
            let marked = self.place(index, entry).and_then(|(raw, bit)| {
                let page = &mut self.pages[raw];
                let fault = if page.live & bit == 0 {
                    Some(NOT_LIVE)
                } else if page.marked & bit != 0 {
                    Some("it is listed twice")
                } else if page.owner(bit) != owner {
                    Some(page.owner(bit).holds())
                } else {
                    refuse(page.pinned, bit)
                };
                page.marked |= bit;
                fault.map_or(Ok(()), |fault| Err(self.fault(index, entry, fault)))
            });
            if let Err(error) = marked {
                for &entry in &entries[..=index] {
                    let raw = entry.raw(self.config.num_pages);
                    self.pages[raw as usize].marked = 0;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// The marks of the page of `entry`, which has none afterwards.
    fn take_marks(&mut self, entry: PageEntry) -> Option<(u32, PriorityClass, u64)> {
        let raw = entry.raw(self.config.num_pages);
        let bits = std::mem::take(&mut self.pages[raw as usize].marked);
        (bits != 0).then(|| (raw, entry.class(), bits))
    }

    /// Place of an entry known to be good.
    fn slot(&self, entry: PageEntry) -> Place {
        let raw = entry.raw(self.config.num_pages);
        let start = entry.start(self.config.num_pages);
        (raw as usize, 1 << (start / self.class(entry.class()).width))
    }
}

const PINNED: &str = "a copy job reads it";
