//! The slots of one class that can be handed out now, found by start and best fit.
//!
//! Raw pages are kept in groups of eight, a cache line of masks. A group is in set (m, i) iff one
//! of its pages has m slots in the pool, one of them with start index i; so the sets, which are
//! searched and changed at random, are an eighth of what they would be page by page and stay in a
//! core's own cache. Invariants: `counts[i]` == pages with slot i; bit m - 1 of `nonempty[i]` is
//! set iff set (m, i) is not empty.

use super::bitset::{IdSets, ones};

const GROUP: u32 = 8;

/// Masks of eight neighbouring pages, one cache line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(align(64))]
struct Masks([u64; GROUP as usize]);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pool {
    masks: Vec<Masks>,
    /// Bits set in each of the masks.
    sizes: Vec<[u8; GROUP as usize]>,
    groups: IdSets,
    counts: Vec<u32>,
    nonempty: Vec<u64>,
    total: usize,
}

impl Pool {
    pub(super) fn new(num_pages: u32, starts: u32) -> Self {
        let groups = num_pages.div_ceil(GROUP);
        let starts = starts as usize;
        Self {
            masks: vec![Masks::default(); groups as usize],
            sizes: vec![[0; GROUP as usize]; groups as usize],
            groups: IdSets::new(groups, starts * starts),
            counts: vec![0; starts],
            nonempty: vec![0; starts],
            total: 0,
        }
    }

    /// Bytes of a pool, but for what does not grow with the pages.
    pub(super) fn size_bytes(num_pages: u32, starts: u32) -> u128 {
        let groups = num_pages.div_ceil(GROUP);
        let group = size_of::<Masks>() + GROUP as usize;
        u128::from(groups) * group as u128 + IdSets::size_bytes(groups, starts * starts)
    }

    /// Slots in the pool.
    pub(super) fn total(&self) -> usize {
        self.total
    }

    /// Slots with start index `start`.
    pub(super) fn count(&self, start: u32) -> u32 {
        self.counts[start as usize]
    }

    /// The start index with the most slots, ties to the smallest.
    pub(super) fn most(&self) -> u32 {
        most(self.counts.iter().copied())
    }

    /// Takes the slot of `start` from the raw page with the fewest slots, ties to the smallest id.
    pub(super) fn take_best_fit(&mut self, start: u32) -> Option<u32> {
        let nonempty = self.nonempty[start as usize];
        if nonempty == 0 {
            return None;
        }
        let size = nonempty.trailing_zeros() + 1;
        let group = self.groups.first(self.set(size, start))?;
        let masks = self.masks[group as usize].0;
        let sizes = self.sizes[group as usize];
        let fits = |at: &usize| u32::from(sizes[*at]) == size && masks[*at] >> start & 1 == 1;
        let at = (0..GROUP as usize).find(fits)?;
        let raw = group * GROUP + u32::try_from(at).ok()?;
        self.set_slots(raw, masks[at] & !(1 << start));
        Some(raw)
    }

    /// The slots of a raw page in the pool.
    pub(super) fn slots(&self, raw: u32) -> u64 {
        self.masks[(raw / GROUP) as usize].0[(raw % GROUP) as usize]
    }

    pub(super) fn set_slots(&mut self, raw: u32, slots: u64) {
        let (group, at) = (raw / GROUP, (raw % GROUP) as usize);
        let masks = &mut self.masks[group as usize].0;
        let sizes = &mut self.sizes[group as usize];
        let (before, size_before) = (masks[at], sizes[at]);
        #[expect(clippy::cast_possible_truncation, reason = "at most 64")]
        let size = slots.count_ones() as u8;
        // What the other pages keep in the sets that this one leaves and enters.
        (masks[at], sizes[at]) = (0, 0);
        let (mut stays, mut is_there) = (0, 0);
        for (&mask, &of) in masks.iter().zip(sizes.iter()) {
            stays |= if of == size_before { mask } else { 0 };
            is_there |= if of == size { mask } else { 0 };
        }
        (masks[at], sizes[at]) = (slots, size);
        for start in ones(before & !stays) {
            if self
                .groups
                .remove(self.set(size_before.into(), start), group)
            {
                self.nonempty[start as usize] &= !(1 << (size_before - 1));
            }
        }
        for start in ones(slots & !is_there) {
            if self.groups.insert(self.set(size.into(), start), group) {
                self.nonempty[start as usize] |= 1 << (size - 1);
            }
        }
        for start in ones(before & !slots) {
            self.counts[start as usize] -= 1;
        }
        for start in ones(slots & !before) {
            self.counts[start as usize] += 1;
        }
        self.total = self.total - usize::from(size_before) + usize::from(size);
    }

    /// Set of groups with a page of `size` (at least 1) slots, one of them of `start`.
    fn set(&self, size: u32, start: u32) -> usize {
        (size as usize - 1) * self.counts.len() + start as usize
    }
}

/// The start index with the largest count, ties to the smallest index.
pub(super) fn most(counts: impl Iterator<Item = u32>) -> u32 {
    let mut best = (0, 0);
    for (start, count) in (0..).zip(counts) {
        if count > best.1 {
            best = (start, count);
        }
    }
    best.0
}
