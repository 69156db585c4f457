//! Snapshots of linear-attention state, each at the end of a node.

use super::SNAPSHOT_ALIGN;
use super::copies::JobKind;
use super::index::Books;
use super::node::NodeId;
use crate::error::{Error, Result};

impl Books {
    /// The node of a lease's path that `position` lies in or at the end of.
    fn node_at(&self, lease: u64, position: usize) -> Option<NodeId> {
        let mut at = self.holds.get(&lease)?.end;
        if position == 0 || position > self.nodes[at].end {
            return None;
        }
        while self.nodes[at].start() >= position {
            at = self.nodes[at].parent;
        }
        Some(at)
    }

    pub(super) fn begin_snapshot(&mut self, lease: u64, position: usize, slot: u32) -> Result<u64> {
        let refuse = |expected: String| Err(Error::request("position", position, expected));
        if !self.config.snapshots {
            return refuse("no snapshot: the tree was made for a model without them".to_owned());
        }
        let align = self.page_size.max(SNAPSHOT_ALIGN);
        let Some(id) = self
            .node_at(lease, position)
            .filter(|_| position.is_multiple_of(align))
        else {
            let (_, len) = self.lengths(lease);
            return refuse(format!(
                "a multiple of {align}, at most the {len} of the lease"
            ));
        };
        let node = &self.nodes[id];
        if node.end == position && (node.snapshot.is_some() || node.snapshot_job.is_some()) {
            return refuse("a position without a snapshot".to_owned());
        }
        let node = self.cut_at(id, position);
        let job = self.begin_job(JobKind::Snapshot { slot }, Vec::new(), node);
        self.nodes[node].snapshot_job = Some(job);
        Ok(job)
    }

    pub(super) fn end_snapshot(&mut self, id: u64, ok: bool) -> Option<u32> {
        let is = |kind| matches!(kind, JobKind::Snapshot { .. });
        let job = self.end_job(id, is)?;
        let JobKind::Snapshot { slot } = job.kind else {
            return None;
        };
        self.nodes[job.end].snapshot_job = None;
        if !ok {
            self.counters.snapshots_failed += 1;
            return Some(slot);
        }
        self.counters.snapshots_taken += 1;
        self.put_snapshot(job.end, slot);
        None
    }

    pub(super) fn has_snapshot(&self, lease: u64, position: usize) -> bool {
        self.node_at(lease, position)
            .map(|id| &self.nodes[id])
            .is_some_and(|node| node.end == position && node.snapshot.is_some())
    }
}
