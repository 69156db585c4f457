//! Name of a logical page as kernels read it from a block table.

use crate::request::PriorityClass;

const LOW_FLAG: u32 = 1 << 31;

/// Block-table entry: bit 31 = LOW, low 31 bits = `raw + start * num_pages`.
///
/// A bijection on the slots of a pool with `num_layers * num_pages <= 2^31`, which
/// [`PageConfig::validate`](crate::PageConfig::validate) checks. `num_pages` is always that of the
/// pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PageEntry(pub u32);

impl PageEntry {
    /// The entry of slot (`raw`, `start`), which the pool has; see
    /// [`PageAllocator::entry`](crate::PageAllocator::entry) for numbers of unknown origin.
    pub fn encode(raw: u32, start: u32, class: PriorityClass, num_pages: u32) -> Self {
        let base = u64::from(raw) + u64::from(start) * u64::from(num_pages);
        debug_assert!(
            raw < num_pages && base < u64::from(LOW_FLAG),
            "({raw}, {start}) is no slot of {num_pages} pages"
        );
        #[expect(clippy::cast_possible_truncation, reason = "below 2^31, see above")]
        let base = base as u32;
        match class {
            PriorityClass::High => Self(base),
            PriorityClass::Low => Self(base | LOW_FLAG),
        }
    }

    /// Whether it names a window of layers.
    pub fn is_low(self) -> bool {
        self.0 & LOW_FLAG != 0
    }

    /// Class of the page.
    pub fn class(self) -> PriorityClass {
        if self.is_low() {
            PriorityClass::Low
        } else {
            PriorityClass::High
        }
    }

    /// `raw + start * num_pages`: index of the page at layer 0 of its window in a plane
    /// `[num_layers, num_pages, ...]`.
    pub fn base(self) -> u32 {
        self.0 & !LOW_FLAG
    }

    /// Raw page.
    pub fn raw(self, num_pages: u32) -> u32 {
        self.base() % num_pages
    }

    /// First physical layer.
    pub fn start(self, num_pages: u32) -> u32 {
        self.base() / num_pages
    }
}
