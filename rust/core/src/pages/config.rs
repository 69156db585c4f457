//! Geometry and budgets of a page pool.

use super::entry::PageEntry;
use super::pool::Pool;
use super::table::RawPage;
use crate::error::{Error, Result};
use crate::request::PriorityClass;

/// A raw page keeps its slots in the bits of one word.
const MAX_STARTS: u32 = u64::BITS;
/// Flat page bases are 31-bit: bit 31 of a block-table entry is the LOW flag.
const MAX_BASES: u64 = 1 << 31;
/// Largest tables an allocator may need for itself; 65,536 pages of 18 starts take 10 MB.
const MAX_TABLE_BYTES: u128 = 4 << 30;

/// How kernels find the window of a LOW page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Addressing {
    /// By the start in each block-table entry: any mix of starts in a row.
    Flat,
    /// By one base per layer: all LOW pages of a row have one start.
    Strict,
}

/// Shape and limits of a pool; checked by [`PageAllocator::new`](crate::PageAllocator::new).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PageConfig {
    /// Raw pages, ids `0..num_pages`.
    pub num_pages: u32,
    /// Layers that have KV.
    pub num_layers: u32,
    /// Tokens a page, a power of two.
    pub page_size: u32,
    /// Layers a LOW page spans, 1 to `num_layers`; at most 64 windows a raw page.
    pub slot_widths: u32,
    /// How kernels address LOW pages.
    pub addressing: Addressing,
    /// Most raw pages of HIGH; `None`: all.
    pub cap_high: Option<u32>,
    /// Most raw pages of LOW; `None`: half of them, rounded down.
    pub cap_low: Option<u32>,
}

impl PageConfig {
    /// Fails with [`Error::Config`] for the first field that cannot work.
    pub fn validate(&self) -> Result<()> {
        let at_least_one = [
            ("num_pages", self.num_pages),
            ("num_layers", self.num_layers),
        ];
        for (field, value) in at_least_one {
            if value == 0 {
                return Err(Error::config(field, value, "at least 1"));
            }
        }
        if !self.page_size.is_power_of_two() {
            return Err(Error::config(
                "page_size",
                self.page_size,
                "a power of two of tokens",
            ));
        }
        if self.slot_widths == 0 || self.slot_widths > self.num_layers {
            let expected = format!("1 to {} layers", self.num_layers);
            return Err(Error::config("slot_widths", self.slot_widths, expected));
        }
        let starts = self.starts(PriorityClass::Low);
        if starts > MAX_STARTS {
            let narrowest = self.num_layers / (MAX_STARTS + 1) + 1;
            let expected = format!(
                "at least {narrowest} layers: {starts} windows a raw page, {MAX_STARTS} are possible"
            );
            return Err(Error::config("slot_widths", self.slot_widths, expected));
        }
        if u64::from(self.num_pages) * u64::from(self.num_layers) > MAX_BASES {
            let expected = format!(
                "at most {} pages of {} layers, for page bases below 2^31",
                MAX_BASES / u64::from(self.num_layers),
                self.num_layers
            );
            return Err(Error::config("num_pages", self.num_pages, expected));
        }
        let bytes = self.table_bytes();
        if bytes > MAX_TABLE_BYTES {
            let expected =
                format!("fewer pages: the allocator's own tables would take {bytes} bytes");
            return Err(Error::config("num_pages", self.num_pages, expected));
        }
        self.check_cap("cap_high", self.cap(PriorityClass::High))?;
        self.check_cap("cap_low", self.cap(PriorityClass::Low))
    }

    /// The entry of a slot. Fails with [`Error::PageState`] if the class has no such slot;
    /// `index` is the position of the slot in the call, for the error.
    pub(crate) fn entry(
        &self,
        index: usize,
        raw: u32,
        start: u32,
        class: PriorityClass,
    ) -> Result<PageEntry> {
        let fault = if raw >= self.num_pages {
            "the pool has no such raw page"
        } else if self.start_index(start, class).is_none() {
            "the class has no such start"
        } else {
            return Ok(PageEntry::encode(raw, start, class, self.num_pages));
        };
        Err(Error::PageState {
            index,
            page: raw,
            start,
            fault,
        })
    }

    /// Layers a logical page of the class spans.
    pub(crate) fn width(&self, class: PriorityClass) -> u32 {
        match class {
            PriorityClass::High => self.num_layers,
            PriorityClass::Low => self.slot_widths,
        }
    }

    /// Logical pages of the class that one raw page carries.
    pub(crate) fn starts(&self, class: PriorityClass) -> u32 {
        self.num_layers / self.width(class)
    }

    /// Position of `start` among the starts of the class; `None` if it is none.
    pub(crate) fn start_index(&self, start: u32, class: PriorityClass) -> Option<u32> {
        let width = self.width(class);
        let index = start / width;
        (start.is_multiple_of(width) && index < self.starts(class)).then_some(index)
    }

    /// Most raw pages of the class at construction.
    pub(crate) fn cap(&self, class: PriorityClass) -> u32 {
        match class {
            PriorityClass::High => self.cap_high.unwrap_or(self.num_pages),
            PriorityClass::Low => self.cap_low.unwrap_or(self.num_pages / 2),
        }
    }

    pub(super) fn check_cap(&self, field: &'static str, cap: u32) -> Result<()> {
        if cap > self.num_pages {
            let expected = format!("at most the {} raw pages of the pool", self.num_pages);
            return Err(Error::config(field, cap, expected));
        }
        Ok(())
    }

    /// Page states, and per class a partial and a fresh pool.
    fn table_bytes(&self) -> u128 {
        let starts = self.starts(PriorityClass::Low);
        let pools = 2 * Pool::size_bytes(self.num_pages, starts);
        u128::from(self.num_pages) * size_of::<RawPage>() as u128 + pools
    }
}
