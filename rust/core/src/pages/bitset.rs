//! Sets of raw page ids with find-first in one word operation a level, whatever the number of ids.
//!
//! Many sets over the same ids live in one array, interleaved: the words that hold one id in all
//! sets are neighbours, so a page that changes place in several sets touches few cache lines.
//! Level 0 has a bit per id; a bit of level k + 1 says whether a word of level k is not zero.

const WORD_BITS: u32 = u64::BITS;
const WORD_SHIFT: u32 = WORD_BITS.trailing_zeros();

/// `sets` sets over the ids 0..`ids`, all empty at first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct IdSets {
    sets: usize,
    /// Where each level begins in `words`, level 0 first. The last level has one word a set.
    levels: Vec<usize>,
    words: Vec<u64>,
}

impl IdSets {
    pub(super) fn new(ids: u32, sets: usize) -> Self {
        let mut levels = Vec::new();
        let mut words = 0;
        for level_words in level_words(ids) {
            levels.push(words);
            words += level_words as usize * sets;
        }
        Self {
            sets,
            levels,
            words: vec![0; words],
        }
    }

    /// Bytes of `sets` sets over `ids` ids.
    pub(super) fn size_bytes(ids: u32, sets: u32) -> u128 {
        let words: u128 = level_words(ids).map(u128::from).sum();
        words * u128::from(sets) * u128::from(WORD_BITS / 8)
    }

    /// Adds `id`, which is not in the set; true if the set was empty.
    pub(super) fn insert(&mut self, set: usize, id: u32) -> bool {
        debug_assert!(!self.contains(set, id), "{id} is in set {set}");
        let mut at = id;
        for level in &self.levels {
            let word = &mut self.words[level + (at >> WORD_SHIFT) as usize * self.sets + set];
            let before = *word;
            *word = before | bit(at);
            if before != 0 {
                return false;
            }
            at >>= WORD_SHIFT;
        }
        true
    }

    /// Removes `id`, which is in the set; true if the set is empty now.
    pub(super) fn remove(&mut self, set: usize, id: u32) -> bool {
        debug_assert!(self.contains(set, id), "{id} is not in set {set}");
        let mut at = id;
        for level in &self.levels {
            let word = &mut self.words[level + (at >> WORD_SHIFT) as usize * self.sets + set];
            *word &= !bit(at);
            if *word != 0 {
                return false;
            }
            at >>= WORD_SHIFT;
        }
        true
    }

    /// The smallest id of the set.
    pub(super) fn first(&self, set: usize) -> Option<u32> {
        let mut at = 0;
        for level in self.levels.iter().rev() {
            let word = self.words[level + at as usize * self.sets + set];
            if word == 0 {
                return None;
            }
            at = (at << WORD_SHIFT) | word.trailing_zeros();
        }
        Some(at)
    }

    pub(super) fn contains(&self, set: usize, id: u32) -> bool {
        self.words[(id >> WORD_SHIFT) as usize * self.sets + set] & bit(id) != 0
    }
}

fn bit(id: u32) -> u64 {
    1 << (id % WORD_BITS)
}

/// Words a set has on each level.
fn level_words(ids: u32) -> impl Iterator<Item = u32> {
    let first = ids.div_ceil(WORD_BITS).max(1);
    std::iter::successors(Some(first), |&words| {
        (words > 1).then(|| words.div_ceil(WORD_BITS))
    })
}

/// The positions of the bits of `mask`, smallest first.
pub(super) fn ones(mut mask: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let position = (mask != 0).then(|| mask.trailing_zeros())?;
        mask &= mask - 1;
        Some(position)
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// One to four levels, at and beside the word borders of each.
        #[test]
        fn agrees_with_ordered_sets(
            ids in prop_oneof![1..130u32, 4_095..4_100u32, 262_140..262_150u32, Just(300_000u32)],
            flips in proptest::collection::vec((0..3usize, any::<proptest::sample::Index>()), 1..200),
        ) {
            let mut sets = IdSets::new(ids, 3);
            let mut model = vec![BTreeSet::new(); 3];
            for (set, index) in flips {
                // Few ids, so that they are removed again, and the last ones often.
                let near = index.index(2 * 40.min(ids as usize));
                let id = u32::try_from(near / 2).unwrap();
                let id = if near % 2 == 0 { id } else { ids - 1 - id };
                if model[set].remove(&id) {
                    prop_assert_eq!(sets.remove(set, id), model[set].is_empty());
                } else {
                    prop_assert_eq!(sets.insert(set, id), model[set].is_empty());
                    model[set].insert(id);
                }
                for (set, model) in model.iter().enumerate() {
                    prop_assert_eq!(sets.first(set), model.first().copied());
                    prop_assert_eq!(sets.contains(set, id), model.contains(&id));
                }
            }
            let empty = IdSets::new(ids, 3);
            for (set, model) in model.iter().enumerate() {
                for &id in model {
                    sets.remove(set, id);
                }
            }
            prop_assert_eq!(sets, empty, "no summary bit outlives its ids");
        }

        #[test]
        fn ones_are_the_bits_of_the_mask(mask: u64) {
            let bits: Vec<u32> = (0..64).filter(|bit| mask >> bit & 1 == 1).collect();
            prop_assert_eq!(ones(mask).collect::<Vec<_>>(), bits);
        }
    }

    #[test]
    fn size_is_what_is_allocated() {
        for (ids, sets) in [(1, 1), (64, 4), (65, 324), (65_536, 324), (262_145, 2)] {
            let words = IdSets::new(ids, sets as usize).words.len();
            assert_eq!(IdSets::size_bytes(ids, sets), words as u128 * 8);
        }
    }
}
