//! The whole state as data: dump, restore, digest, recount.

use std::collections::BTreeMap;

use super::bitset::ones;
use super::config::PageConfig;
use super::entry::PageEntry;
use super::table::{FREE, RawPage, Table};
use super::{ClassStats, Owner, PageStats};
use crate::error::{Error, Result};
use crate::ids::Epoch;
use crate::request::PriorityClass;

/// State of an allocator in canonical form: rows and starts ascending, ranges as long as possible.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PageDump {
    /// Geometry, and the caps now.
    pub config: PageConfig,
    /// Newest step known to have finished.
    pub retired: Epoch,
    /// Free raw pages as ranges first..end.
    pub free: Vec<(u32, u32)>,
    /// Every other raw page.
    pub pages: Vec<PageRow>,
}

/// A raw page that a class owns. Its slots that are neither live nor pending can be handed out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PageRow {
    /// Raw page.
    pub raw: u32,
    /// Class that owns it.
    pub class: PriorityClass,
    /// Start and owner of each live slot.
    pub live: Vec<(u32, Owner)>,
    /// Start of each pending slot, and the step it waits for.
    pub pending: Vec<(u32, Epoch)>,
    /// Start and pins of each pinned slot.
    pub pins: Vec<(u32, u32)>,
}

type Check = std::result::Result<(), String>;

impl Table {
    pub(super) fn stats(&self) -> PageStats {
        let class = |class| {
            let state = self.class(class);
            ClassStats {
                cap: state.cap,
                used: state.used,
                request: state.live[Owner::Request as usize],
                tree: state.live[Owner::Tree as usize],
                copy: state.live[Owner::Copy as usize],
                pending: state.pending,
                partial: state.partial.total(),
            }
        };
        PageStats {
            num_pages: self.config.num_pages,
            free: self.num_free,
            high: class(PriorityClass::High),
            low: class(PriorityClass::Low),
            pinned: self.pins.len(),
            waste_layers: self.config.num_layers % self.config.slot_widths,
            retired: self.retired,
        }
    }

    pub(super) fn dump(&self) -> PageDump {
        let fences = self.fences();
        PageDump {
            config: PageConfig {
                cap_high: Some(self.class(PriorityClass::High).cap),
                cap_low: Some(self.class(PriorityClass::Low).cap),
                ..self.config.clone()
            },
            retired: self.retired,
            free: self.free_ranges(),
            pages: self
                .owned()
                .map(|(raw, class, page)| self.row(raw, class, page, &fences))
                .collect(),
        }
    }

    fn owned(&self) -> impl Iterator<Item = (u32, PriorityClass, &RawPage)> {
        let pages = (0u32..).zip(&self.pages);
        pages.filter_map(|(raw, page)| page.class.map(|class| (raw, class, page)))
    }

    /// The step that each pending slot waits for.
    fn fences(&self) -> BTreeMap<PageEntry, Epoch> {
        let buckets = self.fenced.iter();
        buckets
            .flat_map(|(&epoch, entries)| entries.iter().map(move |&entry| (entry, epoch)))
            .chain(self.held.iter().map(|(&entry, &epoch)| (entry, epoch)))
            .collect()
    }

    fn free_ranges(&self) -> Vec<(u32, u32)> {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        let is_free = |raw: &u32| self.pages[*raw as usize].class.is_none();
        for raw in (0..self.config.num_pages).filter(is_free) {
            match ranges.last_mut() {
                Some((_, end)) if *end == raw => *end += 1,
                _ => ranges.push((raw, raw + 1)),
            }
        }
        ranges
    }

    fn row(
        &self,
        raw: u32,
        class: PriorityClass,
        page: &RawPage,
        fences: &BTreeMap<PageEntry, Epoch>,
    ) -> PageRow {
        let width = self.config.width(class);
        let entry = |at| PageEntry::encode(raw, at * width, class, self.config.num_pages);
        let fence = |at| fences.get(&entry(at)).copied().unwrap_or_default();
        let pins = |at| self.pins.get(&entry(at)).copied().unwrap_or(0);
        PageRow {
            raw,
            class,
            live: ones(page.live)
                .map(|at| (at * width, page.owner(1 << at)))
                .collect(),
            pending: ones(page.pending)
                .map(|at| (at * width, fence(at)))
                .collect(),
            pins: ones(page.pinned).map(|at| (at * width, pins(at))).collect(),
        }
    }

    pub(super) fn restore(dump: &PageDump) -> Result<Self> {
        dump.config.validate()?;
        let refuse = |what| Error::config("dump", what, "the dump of a page allocator");
        let mut table = Self::new(&dump.config);
        table.retired = dump.retired;
        for row in &dump.pages {
            let restored = table.restore_row(row);
            restored.map_err(|what| refuse(format!("page {}: {what}", row.raw)))?;
        }
        table.check_pages().map_err(refuse)?;
        if table.dump() != *dump {
            let what = "a row or range that is repeated, missing or out of order";
            return Err(refuse(what.to_owned()));
        }
        Ok(table)
    }

    fn restore_row(&mut self, row: &PageRow) -> Check {
        let config = self.config.clone();
        let &PageRow { raw, class, .. } = row;
        let bit = |start| {
            let at = config.start_index(start, class);
            at.map(|at| 1u64 << at).ok_or(format!("no start {start}"))
        };
        let entry = |start| PageEntry::encode(raw, start, class, config.num_pages);
        let Some(page) = self.pages.get_mut(raw as usize) else {
            return Err("not in the pool".to_owned());
        };
        if page.class.is_some() {
            return Err("listed twice".to_owned());
        }
        page.class = Some(class);
        for &(start, owner) in &row.live {
            page.live |= bit(start)?;
            page.set_owner(bit(start)?, owner);
        }
        for &(start, pins) in &row.pins {
            page.pinned |= bit(start)?;
            if pins == 0 || self.pins.insert(entry(start), pins).is_some() {
                return Err(format!("{pins} pins at start {start}"));
            }
        }
        for &(start, epoch) in &row.pending {
            page.pending |= bit(start)?;
            if epoch > self.retired {
                self.fenced.entry(epoch).or_default().push(entry(start));
            } else if page.pinned & bit(start)? != 0 {
                self.held.insert(entry(start), epoch);
            } else {
                return Err(format!("start {start} waits for nothing"));
            }
        }
        let state = &mut self.classes[class as usize];
        state.used += 1;
        state.pending += page.pending.count_ones() as usize;
        for at in ones(page.live) {
            state.live[page.owner(1 << at) as usize] += 1;
        }
        state.partial.set_slots(raw, page.rest(state.full));
        self.free.remove(FREE, raw);
        self.num_free -= 1;
        Ok(())
    }

    pub(super) fn digest(&self) -> u64 {
        let mut digest = Digest::new();
        let config = &self.config;
        let caps = self.classes.each_ref().map(|class| class.cap);
        let shape = [
            config.num_pages,
            config.num_layers,
            config.page_size,
            config.slot_widths,
            config.addressing as u32,
            caps[0],
            caps[1],
        ];
        digest.add(shape.map(u64::from));
        digest.add([self.retired.0]);
        for (raw, class, page) in self.owned() {
            digest.add([u64::from(raw), class as u64, page.live, page.pending]);
            digest.add([page.tree, page.copy]);
        }
        for (entry, epoch) in self.fences() {
            digest.add([u64::from(entry.0), epoch.0]);
        }
        for (entry, &pins) in &self.pins {
            digest.add([u64::from(entry.0), u64::from(pins)]);
        }
        digest.0
    }

    pub(super) fn check(&self) -> Check {
        self.check_pages()?;
        let recount = Self::restore(&self.dump()).map_err(|error| error.to_string())?;
        if self.free != recount.free || self.num_free != recount.num_free {
            return Err(format!("{} pages in the free set", self.num_free));
        }
        for (class, recount) in self.classes.iter().zip(&recount.classes) {
            if class != recount {
                return Err(format!("counts {class:?}, recounted {recount:?}"));
            }
        }
        let sorted = |table: &Self| {
            let mut fenced = table.fenced.clone();
            for bucket in fenced.values_mut() {
                bucket.sort_unstable();
            }
            (fenced, table.held.clone(), table.pins.clone())
        };
        if sorted(self) != sorted(&recount) {
            return Err(format!("fences or pins {:?}", sorted(self)));
        }
        Ok(())
    }

    /// What holds for each page by itself.
    fn check_pages(&self) -> Check {
        for (raw, page) in self.pages.iter().enumerate() {
            let sound = match page.class {
                None => *page == RawPage::default(),
                Some(class) => {
                    let held = page.live | page.pending;
                    let inside = |mask: u64, of: u64| mask & !of == 0;
                    held != 0
                        && page.live & page.pending == 0
                        && page.tree & page.copy == 0
                        && inside(held, self.class(class).full)
                        && inside(page.tree | page.copy, page.live)
                        && inside(page.pinned, held)
                        && page.marked == 0
                        && !page.fresh
                }
            };
            if !sound {
                return Err(format!("page {raw}: {page:?}"));
            }
        }
        Ok(())
    }
}

/// FNV-1a over 64-bit words, each folded so that its high bits reach the low ones.
struct Digest(u64);

impl Digest {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;

    fn new() -> Self {
        Self(Self::BASIS)
    }

    fn add<const N: usize>(&mut self, words: [u64; N]) {
        for word in words {
            self.0 = (self.0 ^ word).wrapping_mul(Self::PRIME);
            self.0 ^= self.0 >> 32;
        }
    }
}
