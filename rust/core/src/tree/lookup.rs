//! Look-up and leases: which part of a prompt the tree has, and who holds it.

use super::index::{Books, Hold, Holder};
use super::node::NodeId;
use super::{Namespace, NodeState, SNAPSHOT_ALIGN, TreePage};
use crate::request::PriorityClass;

/// Longest match of a prompt.
struct Found {
    /// From the root; the last node may reach further than `len`.
    path: Vec<NodeId>,
    len: usize,
    /// Tokens whose KV the tree has; more than `len` where a snapshot is missing.
    kv_len: usize,
    /// The node whose snapshot ends at `len`, for hybrid models.
    snapshot: Option<NodeId>,
}

impl Books {
    /// Hash of the first page of `rest`, and the child that starts with it with the number of
    /// whole pages it has in common with `rest`.
    pub(super) fn child(&self, parent: NodeId, rest: &[u32]) -> (u128, Option<(NodeId, usize)>) {
        let first = &rest[..self.page_size];
        let hash = (self.config.hash)(first);
        let children = &self.nodes[parent].children;
        let mut candidates = children.range((hash, NodeId::NONE)..=(hash, NodeId::LAST));
        let child = candidates.find_map(|&(_, child)| {
            let pages = self.common_pages(&self.nodes[child].tokens, rest);
            (pages > 0).then_some((child, pages))
        });
        (hash, child)
    }

    fn common_pages(&self, a: &[u32], b: &[u32]) -> usize {
        let shorter = a.len().min(b.len());
        let (a, b) = (&a[..shorter], &b[..shorter]);
        if a == b {
            return shorter / self.page_size;
        }
        let pages = a.chunks_exact(self.page_size);
        let pairs = pages.zip(b.chunks_exact(self.page_size));
        pairs.take_while(|(a, b)| a == b).count()
    }

    /// The path that `tokens`, of whole pages, follow from a root, and how many of them.
    pub(super) fn walk(&self, root: NodeId, tokens: &[u32]) -> (Vec<NodeId>, usize) {
        let mut path = vec![root];
        let mut at = root;
        let mut len = 0;
        while tokens.len() - len >= self.page_size {
            let (_, Some((child, pages))) = self.child(at, &tokens[len..]) else {
                break;
            };
            len += pages * self.page_size;
            path.push(child);
            at = child;
            if len < self.nodes[child].end {
                break;
            }
        }
        (path, len)
    }

    /// Granularity of a match: whole pages, and cuts that a prefill does not notice.
    fn align(&self) -> usize {
        self.page_size.max(SNAPSHOT_ALIGN)
    }

    fn find(&self, root: NodeId, tokens: &[u32], limit: usize) -> Found {
        let align = self.align();
        // At least one token is always computed: its logits are needed.
        let cap = tokens.len().saturating_sub(1).min(limit) / align * align;
        let (mut path, len) = self.walk(root, &tokens[..cap]);
        let kv_len = len / align * align;
        let (len, snapshot) = self.cut_path(&mut path, kv_len);
        Found {
            path,
            len,
            kv_len,
            snapshot,
        }
    }

    /// Drops the nodes that start at or after `len`; for hybrid models `len` is cut to the deepest
    /// snapshot first. The last node left may reach further than the length returned.
    fn cut_path(&self, path: &mut Vec<NodeId>, mut len: usize) -> (usize, Option<NodeId>) {
        let mut snapshot = None;
        if self.config.snapshots {
            let has = |id: &&NodeId| {
                let node = &self.nodes[**id];
                node.snapshot.is_some() && node.end <= len
            };
            snapshot = path.iter().rev().find(has).copied();
            len = snapshot.map_or(0, |id| self.nodes[id].end);
        }
        while path.len() > 1 && path.last().is_some_and(|&id| self.nodes[id].start() >= len) {
            path.pop();
        }
        (len, snapshot)
    }

    fn lock_snapshot(&mut self, id: Option<NodeId>) {
        if let Some(id) = id
            && let Some(snapshot) = &mut self.nodes[id].snapshot
        {
            if snapshot.locks == 0 {
                self.snapshot_lru.remove(&(snapshot.tick, id));
            }
            snapshot.locks += 1;
        }
    }

    /// Locks the longest match and returns the number of its lease.
    pub(super) fn match_prefix(
        &mut self,
        namespace: Namespace,
        tokens: &[u32],
        limit: usize,
        reader: PriorityClass,
    ) -> u64 {
        let root = self.root(namespace);
        let found = self.find(root, tokens, limit);
        self.take(root, found, tokens.len(), reader)
    }

    /// As `match_prefix`, of whole pages and with no regard to snapshots.
    pub(super) fn match_kv(
        &mut self,
        namespace: Namespace,
        tokens: &[u32],
        reader: PriorityClass,
    ) -> u64 {
        let root = self.root(namespace);
        let (path, len) = self.walk(root, tokens);
        let found = Found {
            path,
            len,
            kv_len: len,
            snapshot: None,
        };
        self.take(root, found, tokens.len(), reader)
    }

    fn take(&mut self, root: NodeId, found: Found, asked: usize, reader: PriorityClass) -> u64 {
        let tick = self.next_tick();
        let mut path = found.path;
        if let Some(last) = path.last_mut() {
            *last = self.cut_at(*last, found.len);
        }
        let mut device_len = 0;
        for &id in &path {
            self.lock(id, Holder::Lease(reader));
            let node = &mut self.nodes[id];
            // Locked nodes are in no frontier: no key holds the old tick.
            node.tick = tick;
            node.hits = node.hits.saturating_add(1);
            if node.readable() {
                device_len = node.end;
            }
            self.queue_store(id);
        }
        self.lock_snapshot(found.snapshot);
        if let Some(id) = found.snapshot
            && let Some(snapshot) = &mut self.nodes[id].snapshot
        {
            snapshot.tick = tick;
        }
        self.counters.lookups += 1;
        self.counters.lookup_tokens += asked as u64;
        self.counters.hit_device_tokens += device_len as u64;
        self.counters.hit_host_tokens += (found.len - device_len) as u64;
        self.counters.lost_no_snapshot_tokens += (found.kv_len - found.len) as u64;
        self.issued_leases += 1;
        let hold = Hold {
            end: path.last().copied().unwrap_or(root),
            reader,
            windows: false,
            snapshot: found.snapshot,
        };
        self.holds.insert(self.issued_leases, hold);
        self.issued_leases
    }

    /// Tokens of the longest match on device and on host, without any effect.
    pub(super) fn peek(
        &self,
        namespace: Namespace,
        tokens: &[u32],
        limit: usize,
    ) -> (usize, usize) {
        let Some(&root) = self.roots.get(&namespace) else {
            return (0, 0);
        };
        let found = self.find(root, tokens, limit);
        let readable = found.path.iter().map(|&id| &self.nodes[id]);
        let device = readable.take_while(|node| node.readable()).last();
        let device = device.map_or(0, |node| node.end.min(found.len));
        (device, found.len - device)
    }

    /// Ends a lease. Unknown numbers are those of leases that ended.
    pub(super) fn release(&mut self, lease: u64) {
        let Some(hold) = self.holds.remove(&lease) else {
            return;
        };
        self.unlock_snapshot(hold.snapshot);
        self.unlock_hold(&hold, NodeId::NONE);
    }

    fn unlock_hold(&mut self, hold: &Hold, stop: NodeId) {
        if hold.windows {
            self.unlock_path(hold.end, stop, Holder::Window);
        }
        let root = self.roots.get(&self.nodes[hold.end].namespace).copied();
        self.unlock_path(hold.end, stop, Holder::Lease(hold.reader));
        if let Some(root) = root {
            self.prune_root(root);
        }
    }

    fn unlock_snapshot(&mut self, id: Option<NodeId>) {
        if let Some(id) = id
            && let Some(snapshot) = &mut self.nodes[id].snapshot
        {
            snapshot.locks -= 1;
            if snapshot.locks == 0 {
                self.snapshot_lru.insert((snapshot.tick, id));
            }
        }
    }

    /// Gives up the end of a lease, so that at most `len` tokens are left: whole aligned pages,
    /// for hybrid models the deepest snapshot at or before.
    pub(super) fn shorten(&mut self, lease: u64, len: usize) {
        let Some(hold) = self.holds.get(&lease) else {
            return;
        };
        let (old, reader, windows) = (hold.end, hold.reader, hold.windows);
        let len = len / self.align() * self.align();
        if self.nodes[old].end <= len {
            return;
        }
        let mut path = self.path(old);
        let (len, snapshot) = self.cut_path(&mut path, len);
        let Some(&last) = path.last() else {
            return;
        };
        let end = self.cut_at(last, len);
        self.lock_snapshot(snapshot);
        let Some(hold) = self.holds.get_mut(&lease) else {
            return;
        };
        hold.end = end;
        let old_snapshot = std::mem::replace(&mut hold.snapshot, snapshot);
        self.unlock_snapshot(old_snapshot);
        let gone = Hold {
            end: old,
            reader,
            windows,
            snapshot: None,
        };
        self.unlock_hold(&gone, end);
    }

    /// Adds one node below its end to a lease.
    pub(super) fn extend_hold(&mut self, lease: u64, id: NodeId) {
        let Some(hold) = self.holds.get_mut(&lease) else {
            return;
        };
        hold.end = id;
        let (reader, windows) = (hold.reader, hold.windows);
        self.lock(id, Holder::Lease(reader));
        if windows {
            self.lock(id, Holder::Window);
        }
    }

    /// Tokens of a lease on device, and in all.
    pub(super) fn lengths(&self, lease: u64) -> (usize, usize) {
        let Some(hold) = self.holds.get(&lease) else {
            return (0, 0);
        };
        let mut device = 0;
        let mut at = hold.end;
        // Upwards: the device part ends below the deepest node that is not on host.
        while at != NodeId::NONE {
            let node = &self.nodes[at];
            if node.readable() {
                device = node.end;
                break;
            }
            at = node.parent;
        }
        (device, self.nodes[hold.end].end)
    }

    /// Every page of the path, root first.
    pub(super) fn pages(&self, lease: u64) -> Vec<TreePage> {
        let Some(hold) = self.holds.get(&lease) else {
            return Vec::new();
        };
        let mut pages = Vec::with_capacity(self.nodes[hold.end].end / self.page_size);
        for id in self.path(hold.end) {
            let node = &self.nodes[id];
            let shown = node.state != NodeState::Backing;
            pages.extend((0..self.pages_of(id)).map(|page| TreePage {
                state: node.state,
                device: node.device.get(page).copied(),
                host: node.host.get(page).copied().filter(|_| shown),
            }));
        }
        pages
    }
}
