//! State of every raw page and slot, and the five steps that choose a slot.
//!
//! Within a class, slot (r, s) is known by its start index i = s / width, a bit of the masks of r.
//! A slot of an owned page that is neither live nor pending is free to hand out; so the three
//! states cover the page by construction. Between calls no page is `fresh` or `marked`.

use std::collections::BTreeMap;

use super::Owner;
use super::bitset::IdSets;
use super::config::{Addressing, PageConfig};
use super::entry::PageEntry;
use super::pool::{self, Pool};
use crate::error::{Error, Result};
use crate::ids::Epoch;
use crate::request::PriorityClass;

/// Rule that chose a slot.
pub(super) mod step {
    pub(crate) const PARTIAL_AT_HOME: u8 = 1;
    pub(crate) const FRESH_AT_HOME: u8 = 2;
    pub(crate) const OPENED: u8 = 3;
    pub(crate) const ANY_PARTIAL: u8 = 4;
    pub(crate) const ANY_FRESH: u8 = 5;
}

/// A raw page, one cache line. Without a class it is free and every mask is 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[repr(align(64))]
pub(super) struct RawPage {
    pub(super) class: Option<PriorityClass>,
    /// Opened by the current call: its slots are in the fresh pool, not in the partial one.
    pub(super) fresh: bool,
    /// Held by an owner.
    pub(super) live: u64,
    /// Held by nobody, but a step in flight or a copy job may still read it.
    pub(super) pending: u64,
    /// Live slots of the tree and of copy jobs; all others are of requests.
    pub(super) tree: u64,
    pub(super) copy: u64,
    /// Live or pending slots that a copy job reads.
    pub(super) pinned: u64,
    /// Slots named by the current call.
    pub(super) marked: u64,
}

impl RawPage {
    /// Slots that can be handed out.
    pub(super) fn rest(&self, full: u64) -> u64 {
        full & !(self.live | self.pending)
    }

    pub(super) fn owner(&self, bit: u64) -> Owner {
        if self.tree & bit != 0 {
            Owner::Tree
        } else if self.copy & bit != 0 {
            Owner::Copy
        } else {
            Owner::Request
        }
    }

    pub(super) fn set_owner(&mut self, bits: u64, owner: Owner) {
        self.tree &= !bits;
        self.copy &= !bits;
        match owner {
            Owner::Request => {}
            Owner::Tree => self.tree |= bits,
            Owner::Copy => self.copy |= bits,
        }
    }
}

/// What a class owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClassState {
    /// Most raw pages it may own, and those it owns.
    pub(super) cap: u32,
    pub(super) used: u32,
    pub(super) width: u32,
    pub(super) starts: u32,
    /// Mask of all its slots of a page.
    pub(super) full: u64,
    pub(super) partial: Pool,
    pub(super) fresh: Pool,
    /// Live slots by owner, and pending ones.
    pub(super) live: [usize; Owner::COUNT],
    pub(super) pending: usize,
}

impl ClassState {
    fn new(config: &PageConfig, class: PriorityClass) -> Self {
        let starts = config.starts(class);
        Self {
            cap: config.cap(class),
            used: 0,
            width: config.width(class),
            starts,
            full: u64::MAX >> (u64::BITS - starts),
            partial: Pool::new(config.num_pages, starts),
            fresh: Pool::new(config.num_pages, starts),
            live: [0; Owner::COUNT],
            pending: 0,
        }
    }

    /// Index of a start, as [`PageConfig::start_index`]; this one is on every slot's path.
    pub(super) fn start_index(&self, start: u32) -> Option<u32> {
        let at = start / self.width;
        (at * self.width == start && at < self.starts).then_some(at)
    }

    /// Slots of each start, partial and fresh together.
    fn counts(&self) -> impl Iterator<Item = u32> {
        (0..self.starts).map(|start| self.count(start))
    }

    fn count(&self, start: u32) -> u32 {
        self.partial.count(start) + self.fresh.count(start)
    }
}

/// Position of a slot: raw page, and bit of its start index.
pub(super) type Place = (usize, u64);

pub(super) struct Table {
    pub(super) config: PageConfig,
    pub(super) pages: Vec<RawPage>,
    pub(super) free: IdSets,
    pub(super) num_free: u32,
    pub(super) classes: [ClassState; 2],
    /// Raw pages opened by the current call.
    opened: Vec<u32>,
    /// Pins of each pinned slot.
    pub(super) pins: BTreeMap<PageEntry, u32>,
    /// Pending slots by the step they wait for, none of which has retired.
    pub(super) fenced: BTreeMap<Epoch, Vec<PageEntry>>,
    /// Pending slots whose step has retired: they wait for their pins.
    pub(super) held: BTreeMap<PageEntry, Epoch>,
    pub(super) retired: Epoch,
}

/// The one set of `Table::free`.
pub(super) const FREE: usize = 0;

impl Table {
    /// All pages free. `config` is valid.
    pub(super) fn new(config: &PageConfig) -> Self {
        let num_pages = config.num_pages;
        let mut free = IdSets::new(num_pages, 1);
        for raw in 0..num_pages {
            free.insert(FREE, raw);
        }
        Self {
            config: config.clone(),
            pages: vec![RawPage::default(); num_pages as usize],
            free,
            num_free: num_pages,
            classes: [PriorityClass::High, PriorityClass::Low]
                .map(|class| ClassState::new(config, class)),
            opened: Vec::new(),
            pins: BTreeMap::new(),
            fenced: BTreeMap::new(),
            held: BTreeMap::new(),
            retired: Epoch(0),
        }
    }

    pub(super) fn class(&self, class: PriorityClass) -> &ClassState {
        &self.classes[class as usize]
    }

    pub(super) fn class_mut(&mut self, class: PriorityClass) -> &mut ClassState {
        &mut self.classes[class as usize]
    }

    /// Raw pages the class could still open.
    pub(super) fn open_pages(&self, class: PriorityClass) -> u32 {
        let class = self.class(class);
        self.num_free.min(class.cap.saturating_sub(class.used))
    }

    /// Pages one call could get, with the start that gives most where all must have one.
    pub(super) fn available(&self, class: PriorityClass) -> usize {
        self.capacity(class, pool::most(self.class(class).counts()))
    }

    fn capacity(&self, class: PriorityClass, home: u32) -> usize {
        let open = self.open_pages(class) as usize;
        let state = self.class(class);
        match self.config.addressing {
            Addressing::Flat => {
                state.partial.total() + state.fresh.total() + open * state.starts as usize
            }
            Addressing::Strict => state.count(home) as usize + open,
        }
    }

    /// One call of `alloc`; `trace` is told the step of each page.
    pub(super) fn alloc(
        &mut self,
        (n, start): (usize, Option<u32>),
        class: PriorityClass,
        trace: impl FnMut(u8),
    ) -> Result<Vec<PageEntry>> {
        let pages = self.alloc_item(n, start, class, trace)?;
        self.settle(class);
        Ok(pages)
    }

    /// Items in order over one set of fresh slots; the first that fails undoes those before it.
    pub(super) fn alloc_many(
        &mut self,
        items: &[(usize, Option<u32>)],
        class: PriorityClass,
        mut trace: impl FnMut(usize, u8),
    ) -> Result<Vec<Vec<PageEntry>>> {
        let mut done = Vec::with_capacity(items.len());
        for (item, &(n, start)) in items.iter().enumerate() {
            match self.alloc_item(n, start, class, |step| trace(item, step)) {
                Ok(pages) => done.push(pages),
                Err(error) => {
                    self.undo(class, &done);
                    return Err(error.of_item(item));
                }
            }
        }
        self.settle(class);
        Ok(done)
    }

    fn alloc_item(
        &mut self,
        n: usize,
        start: Option<u32>,
        class: PriorityClass,
        mut trace: impl FnMut(u8),
    ) -> Result<Vec<PageEntry>> {
        let home = match start {
            Some(start) => self.home_of(start, class)?,
            None => pool::most(self.class(class).counts()),
        };
        let free = self.capacity(class, home);
        if n > free {
            return Err(Error::OutOfPages {
                needed: n,
                free,
                evictable: 0,
                item: None,
            });
        }
        let state = self.class(class);
        if n > 0 && start.is_none() && state.partial.total() + state.fresh.total() == 0 {
            self.open(class, None);
        }
        // There is room for all n, so from here on nothing fails.
        let mut pages = Vec::with_capacity(n);
        let (num_pages, width) = (self.config.num_pages, self.class(class).width);
        for (raw, start, step) in std::iter::from_fn(|| self.take(class, home)).take(n) {
            trace(step);
            pages.push(PageEntry::encode(raw, start * width, class, num_pages));
        }
        // Apart from the loop above, whose steps wait for each other, these cache misses overlap.
        for entry in &pages {
            let start = entry.start(num_pages) / width;
            self.pages[entry.raw(num_pages) as usize].live |= 1 << start;
        }
        debug_assert_eq!(pages.len(), n, "the capacity was exact");
        self.class_mut(class).live[Owner::Request as usize] += n;
        Ok(pages)
    }

    fn home_of(&self, start: u32, class: PriorityClass) -> Result<u32> {
        self.config.start_index(start, class).ok_or_else(|| {
            let last = (self.config.starts(class) - 1) * self.config.width(class);
            let expected = format!(
                "a multiple of {} up to {last}, or None",
                self.config.width(class)
            );
            Error::request("preferred_start", start, expected)
        })
    }

    /// Takes one slot out of the pools: raw page, start index and step.
    fn take(&mut self, class: PriorityClass, home: u32) -> Option<(u32, u32, u8)> {
        let can_open = self.open_pages(class) > 0;
        let state = self.class(class);
        let (start, step) = if state.partial.count(home) > 0 {
            (home, step::PARTIAL_AT_HOME)
        } else if state.fresh.count(home) > 0 {
            (home, step::FRESH_AT_HOME)
        } else if can_open {
            let raw = self.open(class, Some(home))?;
            return Some((raw, home, step::OPENED));
        } else if state.partial.total() > 0 {
            (state.partial.most(), step::ANY_PARTIAL)
        } else {
            (state.fresh.most(), step::ANY_FRESH)
        };
        let state = &mut self.classes[class as usize];
        let pool = match step {
            step::PARTIAL_AT_HOME | step::ANY_PARTIAL => &mut state.partial,
            _ => &mut state.fresh,
        };
        Some((pool.take_best_fit(start)?, start, step))
    }

    /// Gives the smallest free raw page to the class, with the slot `taken` handed out at once.
    fn open(&mut self, class: PriorityClass, taken: Option<u32>) -> Option<u32> {
        let raw = self.free.first(FREE)?;
        self.free.remove(FREE, raw);
        self.num_free -= 1;
        let page = &mut self.pages[raw as usize];
        page.class = Some(class);
        page.fresh = true;
        self.opened.push(raw);
        let state = &mut self.classes[class as usize];
        state.used += 1;
        let taken = taken.map_or(0, |start| 1 << start);
        state.fresh.set_slots(raw, state.full & !taken);
        Some(raw)
    }

    /// End of a call that succeeded: what is left of fresh pages joins the partial pool.
    fn settle(&mut self, class: PriorityClass) {
        let state = &mut self.classes[class as usize];
        for raw in self.opened.drain(..) {
            self.pages[raw as usize].fresh = false;
            state.partial.set_slots(raw, state.fresh.slots(raw));
            state.fresh.set_slots(raw, 0);
        }
    }

    /// Takes back what the items of a group call got. Their pages are the log.
    fn undo(&mut self, class: PriorityClass, done: &[Vec<PageEntry>]) {
        let state = &mut self.classes[class as usize];
        for entry in done.iter().flatten() {
            state.live[Owner::Request as usize] -= 1;
            let raw = entry.raw(self.config.num_pages);
            let page = &mut self.pages[raw as usize];
            if page.fresh {
                continue;
            }
            let start = entry.start(self.config.num_pages) / state.width;
            page.live &= !(1 << start);
            let slots = state.partial.slots(raw) | 1 << start;
            state.partial.set_slots(raw, slots);
        }
        for raw in self.opened.drain(..) {
            self.pages[raw as usize] = RawPage::default();
            state.fresh.set_slots(raw, 0);
            state.used -= 1;
            self.free.insert(FREE, raw);
            self.num_free += 1;
        }
    }

    /// Where the slot of an entry is. Fails if the class that owns its raw page has no such slot.
    pub(super) fn place(&self, index: usize, entry: PageEntry) -> Result<Place> {
        let num_pages = self.config.num_pages;
        let (raw, start) = (entry.raw(num_pages), entry.start(num_pages));
        let class = entry.class();
        let fault = match self.class(class).start_index(start) {
            None => "the class has no such start",
            Some(_) if self.pages[raw as usize].class != Some(class) => NOT_LIVE,
            Some(at) => return Ok((raw as usize, 1 << at)),
        };
        Err(Error::PageState {
            index,
            page: raw,
            start,
            fault,
        })
    }

    pub(super) fn is_held(&self, entry: PageEntry) -> bool {
        self.place(0, entry).is_ok_and(|(raw, bit)| {
            let page = &self.pages[raw];
            (page.live | page.pending) & bit != 0
        })
    }

    pub(super) fn fault(&self, index: usize, entry: PageEntry, fault: &'static str) -> Error {
        Error::PageState {
            index,
            page: entry.raw(self.config.num_pages),
            start: entry.start(self.config.num_pages),
            fault,
        }
    }

    /// Entries of the slots (`pages[k]`, `starts[k]`): of the class that owns the raw page now.
    pub(super) fn entries(&self, pages: &[u32], starts: &[u32]) -> Result<Vec<PageEntry>> {
        let slots = pages.iter().zip(starts).enumerate();
        slots
            .map(|(index, (&raw, &start))| {
                let owned = self.pages.get(raw as usize).and_then(|page| page.class);
                match owned {
                    Some(class) if self.class(class).start_index(start).is_some() => {
                        Ok(PageEntry::encode(raw, start, class, self.config.num_pages))
                    }
                    Some(class) => self.config.entry(index, raw, start, class),
                    // A free page has no slot, which is for the call to say.
                    None if start == 0 => self.config.entry(index, raw, start, PriorityClass::High),
                    None => self.config.entry(index, raw, start, PriorityClass::Low),
                }
            })
            .collect()
    }
}

pub(super) const NOT_LIVE: &str = "it is not live";
