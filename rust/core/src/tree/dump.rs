//! Canonical dump, digest and restore; counters for users.

use std::hash::{Hash, Hasher};

use super::index::Books;
use super::node::{Node, NodeId};
use super::{Namespace, NodeState, TreeStats};
use crate::host::HostPage;
use crate::pages::PageEntry;
use crate::request::PriorityClass;

/// One node. Its parent is the nearest one before it that ends where it starts.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[expect(
    missing_docs,
    reason = "the fields of a node, as `node.rs` documents them"
)]
pub struct NodeDump {
    pub namespace: Namespace,
    pub start: usize,
    pub tokens: Vec<u32>,
    pub state: NodeState,
    pub device: Vec<PageEntry>,
    pub host: Vec<HostPage>,
    pub low_class: bool,
    pub tick: u64,
    pub hits: u32,
    /// Of HIGH leases, LOW leases, jobs, holders of LOW pages.
    pub locks: [u32; 4],
    pub leaving: bool,
    pub forced: bool,
    pub queued: Option<(u64, usize)>,
    /// (slot, tick, locks).
    pub snapshot: Option<(u32, u64, u32)>,
}

/// All nodes, parents first.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct TreeDump {
    /// Operations so far.
    pub tick: u64,
    /// Stores queued so far.
    pub queue_order: u64,
    /// Depth first, by namespace, then in the order of the children.
    pub nodes: Vec<NodeDump>,
}

impl TreeDump {
    /// FNV-1a over the fields: fixed, equal in every process.
    pub fn digest(&self) -> u64 {
        let mut hasher = Fnv(0xCBF2_9CE4_8422_2325);
        self.hash(&mut hasher);
        hasher.finish()
    }
}

struct Fnv(u64);

impl Hasher for Fnv {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        }
    }
}

impl Books {
    /// All nodes but the roots, depth first, by namespace.
    pub(super) fn in_order(&self) -> Vec<NodeId> {
        let mut order = Vec::with_capacity(self.nodes.len());
        let mut stack: Vec<NodeId> = self.roots.values().rev().copied().collect();
        while let Some(id) = stack.pop() {
            let node = &self.nodes[id];
            if !node.is_root() {
                order.push(id);
            }
            stack.extend(node.children.iter().rev().map(|&(_, child)| child));
        }
        order
    }

    pub(super) fn dump(&self) -> TreeDump {
        let nodes = self.in_order().into_iter().map(|id| {
            let node = &self.nodes[id];
            let locks = node.locks;
            NodeDump {
                namespace: node.namespace,
                start: node.start(),
                tokens: node.tokens.clone(),
                state: node.state,
                device: node.device.clone(),
                host: node.host.clone(),
                low_class: node.priority == PriorityClass::Low,
                tick: node.tick,
                hits: node.hits,
                locks: [locks.high, locks.low, locks.jobs, locks.windows],
                leaving: node.leaving,
                forced: node.forced,
                queued: node.queued,
                snapshot: node.snapshot.map(|s| (s.slot, s.tick, s.locks)),
            }
        });
        TreeDump {
            tick: self.tick,
            queue_order: self.queue_order,
            nodes: nodes.collect(),
        }
    }

    /// Fills an empty tree. The caller checks the result.
    pub(super) fn restore(&mut self, dump: &TreeDump) -> std::result::Result<(), String> {
        let mut path: Vec<NodeId> = Vec::new();
        for (index, given) in dump.nodes.iter().enumerate() {
            let place = |what: &str| format!("node {index}: {what}");
            let pages = given.tokens.len() / self.page_size;
            if pages == 0 || !given.tokens.len().is_multiple_of(self.page_size) {
                return Err(place("not a positive number of whole pages"));
            }
            if !matches!(given.state, NodeState::Full | NodeState::Host) || given.locks != [0; 4] {
                return Err(place("locked, in a copy or in use by LOW readers"));
            }
            let Some(end) = given.start.checked_add(given.tokens.len()) else {
                return Err(place("ends beyond the address space"));
            };
            let root = self.root(given.namespace);
            if path.first() != Some(&root) {
                path = vec![root];
            }
            while path.len() > 1
                && path
                    .last()
                    .is_some_and(|&id| self.nodes[id].end > given.start)
            {
                path.pop();
            }
            let parent = path.last().copied().unwrap_or(root);
            if self.nodes[parent].end != given.start {
                return Err(place("no parent ends where it starts"));
            }
            let (hash, None) = self.child(parent, &given.tokens) else {
                return Err(place("starts like a brother"));
            };
            let mut node = Node::new(parent, given.namespace);
            node.hash = hash;
            node.tokens.clone_from(&given.tokens);
            node.end = end;
            node.state = given.state;
            node.device.clone_from(&given.device);
            node.host.clone_from(&given.host);
            node.priority = if given.low_class {
                PriorityClass::Low
            } else {
                PriorityClass::High
            };
            node.tick = given.tick;
            node.hits = given.hits;
            node.leaving = given.leaving;
            node.forced = given.forced;
            node.queued = given.queued;
            let id = self.attach(node);
            if let Some(key) = given.queued {
                self.store_queue.insert(key, id);
            }
            if let Some((slot, tick, 0)) = given.snapshot {
                self.tick = tick.wrapping_sub(1);
                self.put_snapshot(id, slot);
            }
            path.push(id);
        }
        self.tick = dump.tick;
        self.queue_order = dump.queue_order;
        Ok(())
    }

    pub(super) fn stats(&self) -> TreeStats {
        let [full, low, host, loading, backing] = self.total.by_state;
        TreeStats {
            nodes: self.nodes.len() - self.roots.len(),
            leases: self.holds.len(),
            jobs: self.jobs.len(),
            queued_stores: self.store_queue.len(),
            full_pages: full,
            low_pages: low,
            host_only_pages: host,
            loading_pages: loading,
            backing_pages: backing,
            host_pages: self.total.host,
            host_pending_pages: self.total.host_pending,
            evictable_device: self.total.evictable_device,
            evictable_host: self.total.evictable_host,
            coming_pages: self.total.coming,
            snapshots: self.snapshots,
            evictable_snapshots: self.snapshot_lru.len(),
            ..self.counters
        }
    }
}
