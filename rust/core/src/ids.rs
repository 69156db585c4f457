//! Index newtypes: a slot number where a request id is wanted does not compile.

use std::num::NonZeroU32;

/// Name of a request: chosen by the caller, or by the scheduler when none is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Number of a step. Steps retire in order; a fence is the epoch it waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

/// Index of a slot, 0-based. Stored plus one, so that `Option<SlotId>` takes no extra room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(NonZeroU32);

impl SlotId {
    /// The slot at `index`; the largest index is `u32::MAX - 1`.
    pub fn new(index: u32) -> Option<Self> {
        index.checked_add(1).and_then(NonZeroU32::new).map(Self)
    }

    /// The 0-based index.
    pub fn index(self) -> u32 {
        self.0.get() - 1
    }

    pub(crate) fn position(self) -> usize {
        self.index() as usize
    }
}

const _: () = assert!(size_of::<Option<SlotId>>() == 4);
