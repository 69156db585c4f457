//! The allocator as plain sets and linear scans: the specification in executable form.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::error::Error;
use crate::pages::table::NOT_LIVE;
use PriorityClass::{High, Low};

/// Raw page and start.
pub(super) type Slot = (u32, u32);
type Pools = [BTreeSet<Slot>; 2];

#[derive(Clone, Debug)]
pub(super) struct Model {
    pub(super) config: PageConfig,
    pub(super) caps: [u32; 2],
    pub(super) class: BTreeMap<u32, PriorityClass>,
    pub(super) live: BTreeMap<Slot, Owner>,
    pub(super) pending: BTreeMap<Slot, Epoch>,
    pub(super) pins: BTreeMap<Slot, u32>,
    pub(super) retired: Epoch,
}

impl Model {
    pub(super) fn new(config: PageConfig) -> Self {
        let half = config.num_pages / 2;
        Self {
            caps: [
                config.cap_high.unwrap_or(config.num_pages),
                config.cap_low.unwrap_or(half),
            ],
            config,
            class: BTreeMap::new(),
            live: BTreeMap::new(),
            pending: BTreeMap::new(),
            pins: BTreeMap::new(),
            retired: Epoch(0),
        }
    }

    pub(super) fn starts(&self, class: PriorityClass) -> Vec<u32> {
        let (layers, width) = (self.config.num_layers, self.config.slot_widths);
        match class {
            High => vec![0],
            Low => (0..layers / width).map(|at| at * width).collect(),
        }
    }

    fn slots(&self, raw: u32, class: PriorityClass) -> BTreeSet<Slot> {
        let starts = self.starts(class).into_iter();
        let held = |slot: &Slot| self.live.contains_key(slot) || self.pending.contains_key(slot);
        starts
            .map(|start| (raw, start))
            .filter(|s| !held(s))
            .collect()
    }

    pub(super) fn partial(&self, class: PriorityClass) -> BTreeSet<Slot> {
        let owned = self.class.iter().filter(|&(_, &c)| c == class);
        owned.flat_map(|(&raw, _)| self.slots(raw, class)).collect()
    }

    fn free_pages(&self) -> Vec<u32> {
        let pages = 0..self.config.num_pages;
        pages.filter(|raw| !self.class.contains_key(raw)).collect()
    }

    fn open(&self, class: PriorityClass) -> usize {
        let used = self.class.values().filter(|&&c| c == class).count();
        let cap = self.caps[class as usize] as usize;
        self.free_pages().len().min(cap.saturating_sub(used))
    }

    fn capacity(&self, pools: &Pools, class: PriorityClass, home: u32) -> usize {
        let slots = pools.iter().flatten();
        match self.config.addressing {
            Addressing::Flat => slots.count() + self.open(class) * self.starts(class).len(),
            Addressing::Strict => slots.filter(|s| s.1 == home).count() + self.open(class),
        }
    }

    pub(super) fn available(&self, class: PriorityClass) -> usize {
        let pools = [self.partial(class), BTreeSet::new()];
        self.capacity(&pools, class, self.most(&pools[0], class))
    }

    fn most(&self, pool: &BTreeSet<Slot>, class: PriorityClass) -> u32 {
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        for slot in pool {
            *counts.entry(slot.1).or_default() += 1;
        }
        let starts = self.starts(class).into_iter().rev();
        starts.max_by_key(|start| counts.get(start)).unwrap()
    }

    pub(super) fn alloc_many(
        &mut self,
        items: &[(usize, Option<u32>)],
        class: PriorityClass,
    ) -> Result<TracedPages> {
        let before = self.clone();
        let mut pools = [self.partial(class), BTreeSet::new()];
        let mut done = Vec::new();
        for (item, &(n, start)) in items.iter().enumerate() {
            match self.alloc(n, start, class, &mut pools) {
                Ok(pages) => done.push(pages),
                Err(error) => {
                    *self = before;
                    return Err(error.of_item(item));
                }
            }
        }
        Ok(done)
    }

    fn alloc(
        &mut self,
        n: usize,
        start: Option<u32>,
        class: PriorityClass,
        pools: &mut Pools,
    ) -> Result<(Vec<PageEntry>, Vec<u8>)> {
        if start.is_some_and(|start| !self.starts(class).contains(&start)) {
            return Err(invalid("preferred_start"));
        }
        let all = pools[0].union(&pools[1]).copied().collect();
        let home = start.unwrap_or_else(|| self.most(&all, class));
        let free = self.capacity(pools, class, home);
        if n > free {
            return Err(out_of_pages(n, free));
        }
        if n > 0 && start.is_none() && all.is_empty() {
            self.open_page(class, pools);
        }
        let mut result = (Vec::new(), Vec::new());
        for _ in 0..n {
            let has = |pool: &BTreeSet<Slot>| pool.iter().any(|slot| slot.1 == home);
            let (pool, start, step) = if has(&pools[0]) {
                (0, home, 1)
            } else if has(&pools[1]) {
                (1, home, 2)
            } else if self.open(class) > 0 {
                self.open_page(class, pools);
                (1, home, 3)
            } else if !pools[0].is_empty() {
                (0, self.most(&pools[0], class), 4)
            } else {
                (1, self.most(&pools[1], class), 5)
            };
            let mut sizes: BTreeMap<u32, usize> = BTreeMap::new();
            for slot in pools.iter().flatten() {
                *sizes.entry(slot.0).or_default() += 1;
            }
            let at_start = pools[pool].iter().filter(|slot| slot.1 == start);
            let slot = *at_start
                .min_by_key(|slot| (sizes[&slot.0], slot.0))
                .unwrap();
            pools[pool].remove(&slot);
            self.live.insert(slot, Owner::Request);
            result.0.push(self.entry(slot, class));
            result.1.push(step);
        }
        Ok(result)
    }

    fn open_page(&mut self, class: PriorityClass, pools: &mut Pools) {
        let raw = self.free_pages()[0];
        self.class.insert(raw, class);
        pools[1].extend(self.slots(raw, class));
    }

    pub(super) fn entry(&self, (raw, start): Slot, class: PriorityClass) -> PageEntry {
        let low = u32::from(class == Low) << 31;
        PageEntry(raw + start * self.config.num_pages + low)
    }

    pub(super) fn entry_of(&self, slot: Slot) -> PageEntry {
        self.entry(slot, self.class[&slot.0])
    }

    /// The slot of an entry, or what is wrong with it.
    fn slot(&self, entry: PageEntry) -> std::result::Result<Slot, &'static str> {
        let base = entry.0 & (u32::MAX >> 1);
        let class = if entry.0 >> 31 == 1 { Low } else { High };
        let slot = (base % self.config.num_pages, base / self.config.num_pages);
        if !self.starts(class).contains(&slot.1) {
            Err("the class has no such start")
        } else if self.class.get(&slot.0) != Some(&class) {
            Err(NOT_LIVE)
        } else {
            Ok(slot)
        }
    }

    /// The slots of live entries of `owner`, listed once, for which `fault` finds nothing.
    fn owned(
        &self,
        entries: &[PageEntry],
        owner: Owner,
        fault: impl Fn(&Slot) -> Option<&'static str>,
    ) -> Result<Vec<Slot>> {
        let mut slots = Vec::new();
        self.each(entries, |slot| {
            let found = match self.live.get(&slot) {
                None => Some(NOT_LIVE),
                Some(_) if slots.contains(&slot) => Some("it is listed twice"),
                Some(Owner::Request) if owner != Owner::Request => Some("a request holds it"),
                Some(Owner::Tree) if owner != Owner::Tree => Some("the tree holds it"),
                Some(Owner::Copy) if owner != Owner::Copy => Some("a copy job holds it"),
                Some(_) => fault(&slot),
            };
            slots.push(slot);
            found.map_or(Ok(()), Err)
        })?;
        Ok(slots)
    }

    fn each(
        &self,
        entries: &[PageEntry],
        mut visit: impl FnMut(Slot) -> std::result::Result<(), &'static str>,
    ) -> Result<()> {
        for (index, &entry) in entries.iter().enumerate() {
            if let Err(fault) = self.slot(entry).and_then(&mut visit) {
                let base = entry.0 & (u32::MAX >> 1);
                return Err(Error::PageState {
                    index,
                    page: base % self.config.num_pages,
                    start: base / self.config.num_pages,
                    fault,
                });
            }
        }
        Ok(())
    }

    pub(super) fn free(&mut self, entries: &[PageEntry], owner: Owner, epoch: Epoch) -> Result<()> {
        for slot in self.owned(entries, owner, |_| None)? {
            self.live.remove(&slot);
            self.pending.insert(slot, epoch);
        }
        self.sweep();
        Ok(())
    }

    pub(super) fn transfer(&mut self, entries: &[PageEntry], from: Owner, to: Owner) -> Result<()> {
        let pinned = |slot: &Slot| self.pins.get(slot).map(|_| "a copy job reads it");
        for slot in self.owned(entries, from, pinned)? {
            self.live.insert(slot, to);
        }
        Ok(())
    }

    pub(super) fn pin(&mut self, entries: &[PageEntry]) -> Result<()> {
        let mut pins = self.pins.clone();
        self.each(entries, |slot| {
            *pins.entry(slot).or_insert(0) += 1;
            self.live.get(&slot).map(|_| ()).ok_or(NOT_LIVE)
        })?;
        self.pins = pins;
        Ok(())
    }

    pub(super) fn unpin(&mut self, entries: &[PageEntry]) -> Result<()> {
        let mut pins = self.pins.clone();
        self.each(entries, |slot| match pins.get_mut(&slot) {
            None | Some(0) => Err("it is not pinned"),
            Some(pins) => {
                *pins -= 1;
                Ok(())
            }
        })?;
        pins.retain(|_, pins| *pins > 0);
        self.pins = pins;
        self.sweep();
        Ok(())
    }

    pub(super) fn retire(&mut self, epoch: Epoch) {
        self.retired = self.retired.max(epoch);
        self.sweep();
    }

    /// Slots that wait for nothing leave, and pages that hold nothing are free.
    fn sweep(&mut self) {
        let (retired, pins) = (self.retired, &self.pins);
        self.pending
            .retain(|slot, epoch| *epoch > retired || pins.contains_key(slot));
        let held = self.live.keys().chain(self.pending.keys());
        let held: BTreeSet<u32> = held.map(|slot| slot.0).collect();
        self.class.retain(|raw, _| held.contains(raw));
    }

    pub(super) fn set_cap(&mut self, class: PriorityClass, cap: u32) -> Result<()> {
        if cap > self.config.num_pages {
            let field = match class {
                High => "cap_high",
                Low => "cap_low",
            };
            return Err(Error::config(field, "", ""));
        }
        self.caps[class as usize] = cap;
        Ok(())
    }

    pub(super) fn reclaim_plan(&self, k: u32) -> Result<Vec<u32>> {
        let of = |raw: u32| self.live.range((raw, 0)..(raw + 1, 0));
        let copied = |raw: &u32| {
            of(*raw).any(|(_, &owner)| owner == Owner::Copy)
                || self.pins.keys().any(|slot| slot.0 == *raw)
        };
        let low = self.class.iter().filter(|&(_, &class)| class == Low);
        let mut pages: Vec<u32> = low.map(|(&raw, _)| raw).filter(|r| !copied(r)).collect();
        if k as usize > pages.len() {
            return Err(out_of_pages(k as usize, pages.len()));
        }
        pages.sort_by_key(|&raw| (of(raw).count(), raw));
        pages.truncate(k as usize);
        Ok(pages)
    }

    pub(super) fn dump(&self) -> PageDump {
        let mut free: Vec<(u32, u32)> = Vec::new();
        for raw in self.free_pages() {
            match free.last_mut() {
                Some(range) if range.1 == raw => range.1 += 1,
                _ => free.push((raw, raw + 1)),
            }
        }
        let row = |(&raw, &class): (&u32, &PriorityClass)| PageRow {
            raw,
            class,
            live: in_page(&self.live, raw),
            pending: in_page(&self.pending, raw),
            pins: in_page(&self.pins, raw),
        };
        PageDump {
            config: PageConfig {
                cap_high: Some(self.caps[0]),
                cap_low: Some(self.caps[1]),
                ..self.config.clone()
            },
            retired: self.retired,
            free,
            pages: self.class.iter().map(row).collect(),
        }
    }

    pub(super) fn stats(&self) -> PageStats {
        let class = |class| {
            let of_class = |slot: &Slot| self.class[&slot.0] == class;
            let live = |owner| {
                let slots = self.live.iter();
                slots
                    .filter(|(slot, o)| of_class(slot) && **o == owner)
                    .count()
            };
            ClassStats {
                cap: self.caps[class as usize],
                used: u32::try_from(self.class.values().filter(|&&c| c == class).count()).unwrap(),
                request: live(Owner::Request),
                tree: live(Owner::Tree),
                copy: live(Owner::Copy),
                pending: self.pending.keys().filter(|s| of_class(s)).count(),
                partial: self.partial(class).len(),
            }
        };
        PageStats {
            num_pages: self.config.num_pages,
            free: u32::try_from(self.free_pages().len()).unwrap(),
            high: class(High),
            low: class(Low),
            pinned: self.pins.len(),
            waste_layers: self.config.num_layers % self.config.slot_widths,
            retired: self.retired,
        }
    }
}

fn in_page<T: Copy>(of: &BTreeMap<Slot, T>, raw: u32) -> Vec<(u32, T)> {
    let slots = of.iter().filter(|(slot, _)| slot.0 == raw);
    slots.map(|(slot, &value)| (slot.1, value)).collect()
}

/// Words of a message are not part of the specification.
pub(super) fn invalid(field: &'static str) -> Error {
    Error::request(field, "", "")
}

pub(super) fn out_of_pages(needed: usize, free: usize) -> Error {
    Error::OutOfPages {
        needed,
        free,
        evictable: 0,
        item: None,
    }
}
