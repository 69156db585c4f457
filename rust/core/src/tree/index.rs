//! The books of the tree: nodes, locks, counters, and the ordered sets that eviction reads.
//!
//! Everything derived from a node changes with it, in [`Books::change`]: the sums over all nodes,
//! what its parent counts about it, and its place in the frontier of either tier. A frontier is an
//! ordered set of the nodes that can be evicted now; nothing is ever rebuilt.

use std::collections::{BTreeMap, BTreeSet};

use super::copies::Job;
use super::node::{Arena, Locks, Node, NodeId, Snapshot, Standing, Tally};
use super::{Evicted, Namespace, NodeState, TreeConfig, TreeStats, WritePolicy};
use crate::request::PriorityClass;

/// (leads to a snapshot, class, tick, node): ascending is the order of eviction.
pub(super) type DeviceKey = (bool, u8, u64, NodeId);
/// (leads to a snapshot, only copy, class, tick, node): ascending is the order of eviction.
pub(super) type HostKey = (bool, bool, u8, u64, NodeId);

/// Who locks a path.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    Lease(PriorityClass),
    Job,
    Window,
}

/// What the tree knows of a lease.
pub(super) struct Hold {
    /// Deepest node of the locked path. A split keeps the id with the tail, so it stays the end.
    pub(super) end: NodeId,
    pub(super) reader: PriorityClass,
    /// Whether it holds the LOW nodes of its path.
    pub(super) windows: bool,
    /// The node whose snapshot it resumes from.
    pub(super) snapshot: Option<NodeId>,
}

pub(super) struct Books {
    pub(super) config: TreeConfig,
    pub(super) page_size: usize,
    pub(super) nodes: Arena,
    pub(super) roots: BTreeMap<Namespace, NodeId>,
    /// Counter of operations; the only clock there is.
    pub(super) tick: u64,
    pub(super) holds: BTreeMap<u64, Hold>,
    pub(super) issued_leases: u64,
    pub(super) jobs: BTreeMap<u64, Job>,
    pub(super) issued_jobs: u64,
    pub(super) total: Tally,
    pub(super) device_frontier: BTreeSet<DeviceKey>,
    pub(super) host_frontier: BTreeSet<HostKey>,
    /// Unlocked published snapshots as (tick, node).
    pub(super) snapshot_lru: BTreeSet<(u64, NodeId)>,
    pub(super) snapshots: usize,
    /// Nodes to store, as (order, start): both halves of a split keep the order.
    pub(super) store_queue: BTreeMap<(u64, usize), NodeId>,
    pub(super) queue_order: u64,
    /// Released by leases and jobs, to be collected by `take_garbage`.
    pub(super) garbage: Evicted,
    pub(super) counters: TreeStats,
    /// Where `check_some` goes on.
    pub(super) check_cursor: usize,
}

impl Books {
    pub(super) fn new(config: TreeConfig) -> Self {
        Self {
            page_size: config.page_size as usize,
            config,
            nodes: Arena::default(),
            roots: BTreeMap::new(),
            tick: 0,
            holds: BTreeMap::new(),
            issued_leases: 0,
            jobs: BTreeMap::new(),
            issued_jobs: 0,
            total: Tally::default(),
            device_frontier: BTreeSet::new(),
            host_frontier: BTreeSet::new(),
            snapshot_lru: BTreeSet::new(),
            snapshots: 0,
            store_queue: BTreeMap::new(),
            queue_order: 0,
            garbage: Evicted::default(),
            counters: TreeStats::default(),
            check_cursor: 0,
        }
    }

    pub(super) fn next_tick(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }

    pub(super) fn pages_of(&self, id: NodeId) -> usize {
        self.nodes[id].tokens.len() / self.page_size
    }

    /// Host copies form a connected prefix, except where eviction decides what is stored.
    pub(super) fn hosts_are_prefix(&self) -> bool {
        self.config.policy != WritePolicy::WriteBack
    }

    /// Changes a node, and with it all that is derived from it.
    pub(super) fn change<T>(&mut self, id: NodeId, f: impl FnOnce(&mut Node) -> T) -> T {
        let node = &mut self.nodes[id];
        let (before, tally) = (node.standing(), node.tally(self.page_size));
        let result = f(node);
        let (after, parent) = (node.standing(), node.parent);
        self.total += node.tally(self.page_size);
        self.total -= tally;
        if before != after && parent != NodeId::NONE {
            self.recount_child(parent, before, after);
        }
        self.refresh(id);
        result
    }

    fn recount_child(&mut self, parent: NodeId, before: Standing, after: Standing) {
        let node = &mut self.nodes[parent];
        let count = |count: &mut u32, before: bool, after: bool| {
            *count = *count + u32::from(after) - u32::from(before);
        };
        count(&mut node.resident_children, before.resident, after.resident);
        count(&mut node.leaving_children, before.leaving, after.leaving);
        count(&mut node.hosted_children, before.hosted, after.hosted);
        self.refresh(parent);
    }

    /// Brings the place of a node in both frontiers up to date.
    pub(super) fn refresh(&mut self, id: NodeId) {
        let device = self.device_key(id);
        let host = self.host_key(id);
        let node = &mut self.nodes[id];
        if node.device_key != device {
            let old = std::mem::replace(&mut node.device_key, device);
            if let Some(old) = old {
                self.device_frontier.remove(&old);
            }
            self.device_frontier.extend(device);
        }
        if node.host_key != host {
            let old = std::mem::replace(&mut node.host_key, host);
            if let Some(old) = old {
                self.host_frontier.remove(&old);
            }
            self.host_frontier.extend(host);
        }
    }

    /// Where the node belongs in the device frontier.
    pub(super) fn device_key(&self, id: NodeId) -> Option<DeviceKey> {
        let node = &self.nodes[id];
        let candidate = node.state == NodeState::Full
            && !node.is_root()
            && !node.locks.any()
            && !node.leaving
            && node.resident_children == node.leaving_children;
        candidate.then(|| (self.useful(node), rank(node), node.tick, id))
    }

    /// Where the node belongs in the host frontier.
    pub(super) fn host_key(&self, id: NodeId) -> Option<HostKey> {
        let node = &self.nodes[id];
        let only_copy = node.state == NodeState::Host;
        let candidate = (only_copy || node.state == NodeState::Full)
            && !node.host.is_empty()
            && !node.locks.any()
            && node.hosted_children == 0;
        candidate.then(|| (self.useful(node), only_copy, rank(node), node.tick, id))
    }

    /// Whether the KV of a node can be resumed from: always, unless only snapshots allow it.
    fn useful(&self, node: &Node) -> bool {
        !self.config.snapshots || node.snapshots_below > 0
    }

    /// Locks one node. A lease takes it off the list of those that leave.
    pub(super) fn lock(&mut self, id: NodeId, holder: Holder) {
        let node = &mut self.nodes[id];
        let mut locks = node.locks;
        *count_of(&mut locks, holder) += 1;
        if node.leaving && matches!(holder, Holder::Lease(_)) {
            self.change(id, |node| node.leaving = false);
        }
        self.set_locks(id, locks);
    }

    /// Sets the locks of a node; they decide whether its pages are evictable.
    fn set_locks(&mut self, id: NodeId, locks: Locks) {
        let node = &mut self.nodes[id];
        let before = node.tally(self.page_size);
        node.locks = locks;
        let after = node.tally(self.page_size);
        if before != after {
            self.total += after;
            self.total -= before;
            self.refresh(id);
        }
    }

    /// Locks the path to the root.
    pub(super) fn lock_path(&mut self, end: NodeId, holder: Holder) {
        let mut at = end;
        while at != NodeId::NONE {
            self.lock(at, holder);
            at = self.nodes[at].parent;
        }
    }

    /// Unlocks the path up to, and not including, `stop`. LOW pages that nobody reads any more
    /// become garbage.
    pub(super) fn unlock_path(&mut self, end: NodeId, stop: NodeId, holder: Holder) {
        let mut at = end;
        while at != stop {
            let node = &mut self.nodes[at];
            let parent = node.parent;
            let mut locks = node.locks;
            *count_of(&mut locks, holder) -= 1;
            let unread = locks.windows == 0 && node.state == NodeState::Low;
            self.set_locks(at, locks);
            if unread {
                let dropped = self.change(at, |node| {
                    node.state = NodeState::Host;
                    std::mem::take(&mut node.device)
                });
                self.garbage.device.extend(dropped);
            }
            at = parent;
        }
    }

    /// The root of a namespace, made if there is none.
    pub(super) fn root(&mut self, namespace: Namespace) -> NodeId {
        if let Some(&root) = self.roots.get(&namespace) {
            return root;
        }
        let root = self.nodes.insert(Node::new(NodeId::NONE, namespace));
        self.roots.insert(namespace, root);
        root
    }

    /// Forgets a root that holds nothing and is held by nobody.
    pub(super) fn prune_root(&mut self, root: NodeId) {
        let Some(node) = self.nodes.get(root) else {
            return;
        };
        if node.is_root() && node.children.is_empty() && !node.locks.any() {
            let namespace = node.namespace;
            self.roots.remove(&namespace);
            self.nodes.remove(root);
        }
    }

    /// Hangs a new node below `parent`.
    pub(super) fn attach(&mut self, node: Node) -> NodeId {
        let (parent, hash, standing) = (node.parent, node.hash, node.standing());
        self.total += node.tally(self.page_size);
        let id = self.nodes.insert(node);
        self.nodes[parent].children.insert((hash, id));
        self.recount_child(parent, Standing::default(), standing);
        self.refresh(id);
        id
    }

    /// Takes a node without children out of the tree.
    pub(super) fn detach(&mut self, id: NodeId) -> Node {
        self.take_snapshot(id);
        let (device, host) = (self.nodes[id].device_key, self.nodes[id].host_key);
        if let Some(key) = device {
            self.device_frontier.remove(&key);
        }
        if let Some(key) = host {
            self.host_frontier.remove(&key);
        }
        if let Some(key) = self.nodes[id].queued {
            self.store_queue.remove(&key);
        }
        let node = self.nodes.remove(id);
        self.total -= node.tally(self.page_size);
        self.nodes[node.parent].children.remove(&(node.hash, id));
        self.recount_child(node.parent, node.standing(), Standing::default());
        self.prune_root(node.parent);
        node
    }

    /// Cuts a node after `pages` pages and returns the new first part. The tail keeps the id, the
    /// snapshot and the children; the first part gets copies of everything else.
    pub(super) fn split(&mut self, id: NodeId, pages: usize) -> NodeId {
        let tokens = pages * self.page_size;
        let tail_hash = (self.config.hash)(&self.nodes[id].tokens[tokens..][..self.page_size]);
        let node = &mut self.nodes[id];
        let mut upper = Node::new(node.parent, node.namespace);
        upper.hash = node.hash;
        upper.end = node.start() + tokens;
        upper.tokens = take_front(&mut node.tokens, tokens);
        upper.device = take_front(&mut node.device, pages);
        upper.host = take_front(&mut node.host, pages);
        upper.state = node.state;
        upper.priority = node.priority;
        upper.tick = node.tick;
        upper.hits = node.hits;
        upper.locks = node.locks;
        upper.job = node.job;
        upper.leaving = node.leaving;
        upper.forced = node.forced;
        upper.snapshots_below = node.snapshots_below;
        let standing = node.standing();
        upper.resident_children = u32::from(standing.resident);
        upper.leaving_children = u32::from(standing.leaving);
        upper.hosted_children = u32::from(standing.hosted);
        let (old_hash, queued, job) = (node.hash, node.queued, node.job);
        let upper_id = self.nodes.insert(upper);
        self.nodes[upper_id].children.insert((tail_hash, id));
        let node = &mut self.nodes[id];
        let parent = std::mem::replace(&mut node.parent, upper_id);
        node.hash = tail_hash;
        let start = node.start();
        let children = &mut self.nodes[parent].children;
        children.remove(&(old_hash, id));
        children.insert((old_hash, upper_id));
        if let Some((order, old_start)) = queued {
            self.store_queue.insert((order, old_start), upper_id);
            self.store_queue.insert((order, start), id);
            self.nodes[upper_id].queued = queued;
            self.nodes[id].queued = Some((order, start));
        }
        if let Some(job) = job.and_then(|job| self.jobs.get_mut(&job)) {
            job.nodes.push(upper_id);
        }
        self.refresh(upper_id);
        self.counters.splits += 1;
        upper_id
    }

    /// Makes `node` end at `end` tokens from the root, splitting it if it is longer.
    pub(super) fn cut_at(&mut self, id: NodeId, end: usize) -> NodeId {
        let node = &self.nodes[id];
        if node.end <= end {
            return id;
        }
        let pages = (end - node.start()) / self.page_size;
        self.split(id, pages)
    }

    /// Records a snapshot at the end of a node.
    pub(super) fn put_snapshot(&mut self, id: NodeId, slot: u32) {
        let tick = self.next_tick();
        self.nodes[id].snapshot = Some(Snapshot {
            slot,
            tick,
            locks: 0,
        });
        self.snapshot_lru.insert((tick, id));
        self.snapshots += 1;
        self.add_snapshots_below(id, true);
    }

    /// Removes the snapshot at the end of a node and returns its slot.
    pub(super) fn take_snapshot(&mut self, id: NodeId) -> Option<u32> {
        let snapshot = self.nodes[id].snapshot.take()?;
        self.snapshot_lru.remove(&(snapshot.tick, id));
        self.snapshots -= 1;
        self.add_snapshots_below(id, false);
        Some(snapshot.slot)
    }

    fn add_snapshots_below(&mut self, id: NodeId, more: bool) {
        let mut at = id;
        while at != NodeId::NONE {
            let node = &mut self.nodes[at];
            let was = node.snapshots_below;
            node.snapshots_below = if more { was + 1 } else { was - 1 };
            let (parent, changed) = (node.parent, was == 0 || node.snapshots_below == 0);
            if changed {
                self.refresh(at);
            }
            at = parent;
        }
    }

    /// Nodes from the root to `end`.
    pub(super) fn path(&self, end: NodeId) -> Vec<NodeId> {
        let mut path = Vec::new();
        let mut at = end;
        while at != NodeId::NONE {
            path.push(at);
            at = self.nodes[at].parent;
        }
        path.reverse();
        path
    }
}

/// LOW goes first.
fn rank(node: &Node) -> u8 {
    u8::from(node.priority == PriorityClass::High)
}

fn count_of(locks: &mut Locks, holder: Holder) -> &mut u32 {
    match holder {
        Holder::Lease(PriorityClass::High) => &mut locks.high,
        Holder::Lease(PriorityClass::Low) => &mut locks.low,
        Holder::Job => &mut locks.jobs,
        Holder::Window => &mut locks.windows,
    }
}

/// The first `n` items, or none of an empty list; the rest stays.
fn take_front<T>(list: &mut Vec<T>, n: usize) -> Vec<T> {
    let rest = list.split_off(n.min(list.len()));
    std::mem::replace(list, rest)
}
