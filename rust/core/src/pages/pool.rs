//! The slots of one class that can be handed out now, found by start and best fit.
//!
//! A raw page with m slots in the pool is in set (m, i) of each of their start indices i. Owns
//! these sets and a count per start; the slots themselves are masks that the caller keeps.
//! Invariants: `counts[i]` == pages with slot i == sum over m of the size of (m, i);
//! bit m - 1 of `sizes[i]` is set iff (m, i) is not empty.

use super::bitset::{IdSets, ones};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pool {
    pages: IdSets,
    counts: Vec<u32>,
    sizes: Vec<u64>,
    total: usize,
}

impl Pool {
    pub(super) fn new(num_pages: u32, starts: u32) -> Self {
        let starts = starts as usize;
        Self {
            pages: IdSets::new(num_pages, starts * starts),
            counts: vec![0; starts],
            sizes: vec![0; starts],
            total: 0,
        }
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

    /// The raw page that has a slot of `start` and the fewest slots, ties to the smallest id.
    pub(super) fn best_fit(&self, start: u32) -> Option<u32> {
        let sizes = self.sizes[start as usize];
        if sizes == 0 {
            return None;
        }
        self.pages.first(self.set(sizes.trailing_zeros(), start))
    }

    /// The slots of a raw page in the pool change from `before` to `after`.
    pub(super) fn change(&mut self, raw: u32, before: u64, after: u64) {
        let size = before.count_ones().wrapping_sub(1);
        for start in ones(before) {
            if self.pages.remove(self.set(size, start), raw) {
                self.sizes[start as usize] &= !(1 << size);
            }
        }
        let size = after.count_ones().wrapping_sub(1);
        for start in ones(after) {
            if self.pages.insert(self.set(size, start), raw) {
                self.sizes[start as usize] |= 1 << size;
            }
        }
        for start in ones(before & !after) {
            self.counts[start as usize] -= 1;
            self.total -= 1;
        }
        for start in ones(after & !before) {
            self.counts[start as usize] += 1;
            self.total += 1;
        }
    }

    fn set(&self, size_minus_one: u32, start: u32) -> usize {
        size_minus_one as usize * self.counts.len() + start as usize
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
