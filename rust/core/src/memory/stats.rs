//! Counts of the KV memory.

use super::Memory;
use crate::pages::PageStats;
use crate::tree::TreeStats;

/// Counters since construction, and gauges; all true at one instant.
#[derive(Clone, Debug, Default)]
pub struct MemoryStats {
    /// Device pages by class and state; `None` with fixed slots.
    pub pages: Option<PageStats>,
    /// The prefix tree; `None` without one.
    pub tree: Option<TreeStats>,
    /// Host pages nobody holds.
    pub host_free: usize,
    /// All host pages.
    pub host_total: usize,
    /// Host snapshots nobody holds.
    pub snapshots_free: usize,
    /// All host snapshots.
    pub snapshots_total: usize,
    /// Copies that have not ended.
    pub jobs: usize,
    /// Copies that failed or were cancelled.
    pub copies_failed: u64,
    /// Copies that never ended; what they named is lost to the pools.
    pub copies_abandoned: u64,
    /// Pages that were not stored because the host had no room.
    pub stores_dropped: u64,
    /// Snapshots not taken for want of a buffer.
    pub snapshots_skipped: u64,
    /// Requests parked in the host tier, and brought back.
    pub parked: u64,
    /// See `parked`.
    pub resumed: u64,
    /// Pages streamed through windows, counted per step.
    pub streamed_pages: u64,
    /// Steps that streamed more than their budget.
    pub stream_overruns: u64,
}

impl Memory {
    pub(crate) fn stats(&self) -> MemoryStats {
        MemoryStats {
            pages: self.pages.as_ref().map(crate::pages::PageAllocator::stats),
            tree: self.tree.as_ref().map(crate::tree::PrefixTree::stats),
            host_free: self.host.free_count(),
            host_total: self.host.total(),
            snapshots_free: self.snapshots.free_count(),
            snapshots_total: self.snapshots.total(),
            jobs: self.jobs.len(),
            ..self.counters.clone()
        }
    }
}
