//! One entry of a block table: where a logical page starts, and of which class it is.

/// Set on the entry of a LOW page.
const LOW: u32 = 1 << 31;

/// An entry of a block table: bit 31 = LOW, the low 31 bits = flat page base.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PageEntry(pub u32);

impl PageEntry {
    /// Whether the page holds a window of layers only.
    pub fn is_low(self) -> bool {
        self.0 & LOW != 0
    }
}
