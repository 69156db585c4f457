//! Host pages: which pages of the pinned host pool are free.
//!
//! Owns: the free pages, as maximal runs of consecutive ids (the copy planner merges neighbours).
//! Knows nothing of bytes or tensors. One mutex, no lock is taken inside it; in the lock order it
//! comes after the tree.
//!
//! Invariants (checked by [`HostPages::check`]): runs are not empty, do not touch and lie inside
//! the pool; `free` is the sum of their lengths.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{Error, Result};
use crate::sync::Mutex;

/// Largest pool: ids and counts stay clear of the ends of u32.
const MAX_PAGES: u32 = 1 << 31;

/// Index of a page in the host pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct HostPage(pub u32);

/// Thread-safe set of free host pages.
pub struct HostPages {
    pool: Mutex<Pool>,
    total: u32,
}

struct Pool {
    /// First free page of a run -> length of the run.
    runs: BTreeMap<u32, u32>,
    /// Length -> first pages of the runs of that length. Few lengths differ: k of them need
    /// k^2 / 2 pages.
    starts: BTreeMap<u32, BTreeSet<u32>>,
    free: u32,
}

impl HostPages {
    /// A pool of `total` free pages. Fails with [`Error::Config`] for more than 2^31.
    pub fn new(total: u32) -> Result<Self> {
        if total > MAX_PAGES {
            let expected = format!("at most {MAX_PAGES} pages");
            return Err(Error::config("host_pages", total, expected));
        }
        let mut pool = Pool {
            runs: BTreeMap::new(),
            starts: BTreeMap::new(),
            free: total,
        };
        pool.add_run(0, total);
        Ok(Self {
            pool: Mutex::new(pool),
            total,
        })
    }

    /// `n` pages in ascending order, or `None` if fewer are free: the first run of consecutive
    /// pages that is long enough, without one the smallest ids.
    /// O(log runs) a run taken, and O(different lengths).
    pub fn alloc(&self, n: usize) -> Option<Vec<HostPage>> {
        let n = u32::try_from(n).ok()?;
        self.pool.lock().alloc(n)
    }

    /// Gives pages back. Fails with [`Error::HostPageState`], and changes nothing, if one is listed
    /// twice, is free already or is outside the pool.
    pub fn free(&self, pages: &[HostPage]) -> Result<()> {
        let mut sorted: Vec<u32> = pages.iter().map(|page| page.0).collect();
        sorted.sort_unstable();
        let mut pool = self.pool.lock();
        pool.check_taken(&sorted, self.total)?;
        for page in sorted {
            pool.insert(page);
        }
        Ok(())
    }

    /// Pages nobody holds.
    pub fn free_count(&self) -> usize {
        self.pool.lock().free as usize
    }

    /// All pages.
    pub fn total(&self) -> usize {
        self.total as usize
    }

    /// The free pages as (first, length) of every run, ascending.
    pub fn dump(&self) -> Vec<(u32, u32)> {
        let pool = self.pool.lock();
        pool.runs
            .iter()
            .map(|(&first, &len)| (first, len))
            .collect()
    }

    /// Recounts the free pages. The error says what does not agree.
    pub fn check(&self) -> std::result::Result<(), String> {
        let pool = self.pool.lock();
        let mut end = None;
        let mut free = 0u32;
        for (&first, &len) in &pool.runs {
            if len == 0 || end.is_some_and(|end| first <= end) || first + len > self.total {
                return Err(format!("host pages: run {first}+{len} after {end:?}"));
            }
            end = Some(first + len);
            free += len;
        }
        let starts = |(&len, starts): (&u32, &BTreeSet<u32>)| {
            let runs = starts.iter().map(move |&first| (first, len));
            runs.collect::<Vec<_>>()
        };
        let mut by_len: Vec<(u32, u32)> = pool.starts.iter().flat_map(starts).collect();
        by_len.sort_unstable();
        if !by_len
            .into_iter()
            .eq(pool.runs.iter().map(|(&first, &len)| (first, len)))
        {
            return Err("host pages: runs by length differ from runs by place".to_owned());
        }
        if free != pool.free {
            return Err(format!("host pages: {free} in runs, {} counted", pool.free));
        }
        Ok(())
    }
}

impl Pool {
    fn alloc(&mut self, n: u32) -> Option<Vec<HostPage>> {
        if n > self.free {
            return None;
        }
        let mut taken = Vec::with_capacity(n as usize);
        let fitting = self.starts.range(n..);
        let mut first = fitting
            .filter_map(|(_, starts)| starts.first())
            .min()
            .copied();
        let mut missing = n;
        while missing > 0 {
            let start = first.take().or(self.runs.keys().next().copied())?;
            let len = self.remove_run(start);
            let part = len.min(missing);
            self.add_run(start + part, len - part);
            taken.extend((start..start + part).map(HostPage));
            missing -= part;
        }
        self.free -= n;
        Some(taken)
    }

    fn add_run(&mut self, first: u32, len: u32) {
        if len > 0 {
            self.runs.insert(first, len);
            self.starts.entry(len).or_default().insert(first);
        }
    }

    /// Returns the length, 0 if no run starts at `first`.
    fn remove_run(&mut self, first: u32) -> u32 {
        let len = self.runs.remove(&first).unwrap_or(0);
        if let Some(starts) = self.starts.get_mut(&len) {
            starts.remove(&first);
            if starts.is_empty() {
                self.starts.remove(&len);
            }
        }
        len
    }

    fn check_taken(&self, sorted: &[u32], total: u32) -> Result<()> {
        let state = |page, what| Err(Error::HostPageState { page, fault: what });
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return state(pair[0], "listed twice in one call");
        }
        for &page in sorted {
            if page >= total {
                return state(page, "outside the host pool");
            }
            if let Some((&first, &len)) = self.runs.range(..=page).next_back()
                && page < first + len
            {
                return state(page, "is free already");
            }
        }
        Ok(())
    }

    fn insert(&mut self, page: u32) {
        let before = self.runs.range(..page).next_back();
        let first = before
            .filter(|&(first, len)| first + len == page)
            .map_or(page, |(&first, _)| first);
        let len = self.remove_run(first) + 1 + self.remove_run(page + 1);
        self.add_run(first, len);
        self.free += 1;
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
