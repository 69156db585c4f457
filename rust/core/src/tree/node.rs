//! Nodes and the arena they live in: what a node is, and what it counts for.
//!
//! A node is a run of whole pages of tokens. Its state says which of its page lists are filled;
//! [`Node::tally`] and [`Node::standing`] derive everything that the counters and indices need.

use std::collections::BTreeSet;
use std::ops::{AddAssign, Index, IndexMut, SubAssign};

use super::index::{DeviceKey, HostKey};
use super::{Namespace, NodeState};
use crate::host::HostPage;
use crate::pages::PageEntry;
use crate::request::PriorityClass;

/// Name of a node, in order of creation and never used twice: a stale id names nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId {
    serial: u64,
    index: u32,
}

impl NodeId {
    /// The parent of a root; sorts before every node.
    pub(super) const NONE: Self = Self {
        serial: 0,
        index: 0,
    };
    /// Sorts after every node.
    pub(super) const LAST: Self = Self {
        serial: u64::MAX,
        index: u32::MAX,
    };

    /// As (serial, index), for callers outside Rust.
    pub fn parts(self) -> (u64, u32) {
        (self.serial, self.index)
    }

    /// Inverse of [`NodeId::parts`]; an id that was never issued names nothing.
    pub fn from_parts(serial: u64, index: u32) -> Self {
        Self { serial, index }
    }
}

/// Holders of a node at or below it. Each holder counts on the whole path to the root.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Locks {
    /// Leases of HIGH readers.
    pub(super) high: u32,
    /// Leases of LOW readers.
    pub(super) low: u32,
    /// Copy jobs.
    pub(super) jobs: u32,
    /// Leases, already counted in `low`, that read through LOW pages.
    pub(super) windows: u32,
}

impl Locks {
    pub(super) fn any(self) -> bool {
        self.leased() || self.jobs > 0
    }

    pub(super) fn leased(self) -> bool {
        self.high > 0 || self.low > 0
    }
}

/// A linear-attention state saved at the end of a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Snapshot {
    pub(super) slot: u32,
    pub(super) tick: u64,
    /// Leases that resume from it.
    pub(super) locks: u32,
}

pub(super) struct Node {
    /// 0 = vacant.
    serial: u64,
    pub(super) parent: NodeId,
    pub(super) namespace: Namespace,
    /// (hash of the first page, child): a hash finds candidates, the tokens decide.
    pub(super) children: BTreeSet<(u128, NodeId)>,
    /// Of the first page of tokens; 0 for a root.
    pub(super) hash: u128,
    /// Empty for a root only.
    pub(super) tokens: Vec<u32>,
    /// Tokens from the root to the end of this node.
    pub(super) end: usize,
    pub(super) state: NodeState,
    /// One entry a page in every state but `Host`.
    pub(super) device: Vec<PageEntry>,
    /// One a page; empty only for a `Full` node without host copy. Being filled while `Backing`.
    pub(super) host: Vec<HostPage>,
    pub(super) priority: PriorityClass,
    pub(super) tick: u64,
    pub(super) hits: u32,
    pub(super) locks: Locks,
    /// The load or store that covers this node.
    pub(super) job: Option<u64>,
    /// Device eviction wants the pages once the host copy is there.
    pub(super) leaving: bool,
    /// A LOW request wants a host copy whatever the policy.
    pub(super) forced: bool,
    /// Position in the queue of stores.
    pub(super) queued: Option<(u64, usize)>,
    pub(super) snapshot: Option<Snapshot>,
    /// The job that fills a snapshot at the end of this node.
    pub(super) snapshot_job: Option<u64>,
    /// Published snapshots at or below.
    pub(super) snapshots_below: u32,
    pub(super) resident_children: u32,
    pub(super) leaving_children: u32,
    pub(super) hosted_children: u32,
    pub(super) device_key: Option<DeviceKey>,
    pub(super) host_key: Option<HostKey>,
}

/// What the parent counts about a child.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Standing {
    pub(super) resident: bool,
    pub(super) leaving: bool,
    pub(super) hosted: bool,
}

/// Pages by what they are; sums over all nodes are kept up to date.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Tally {
    pub(super) by_state: [usize; 5],
    /// Complete host copies.
    pub(super) host: usize,
    /// Host pages being filled.
    pub(super) host_pending: usize,
    pub(super) evictable_device: usize,
    pub(super) evictable_host: usize,
    /// Device pages of nodes on their way out.
    pub(super) coming: usize,
    /// Device pages that copies alone hold: evictable once these end.
    pub(super) copied: usize,
}

impl Node {
    pub(super) fn new(parent: NodeId, namespace: Namespace) -> Self {
        Self {
            serial: 0,
            parent,
            namespace,
            children: BTreeSet::new(),
            hash: 0,
            tokens: Vec::new(),
            end: 0,
            state: NodeState::Full,
            device: Vec::new(),
            host: Vec::new(),
            priority: PriorityClass::High,
            tick: 0,
            hits: 0,
            locks: Locks::default(),
            job: None,
            leaving: false,
            forced: false,
            queued: None,
            snapshot: None,
            snapshot_job: None,
            snapshots_below: 0,
            resident_children: 0,
            leaving_children: 0,
            hosted_children: 0,
            device_key: None,
            host_key: None,
        }
    }

    pub(super) fn is_root(&self) -> bool {
        self.parent == NodeId::NONE
    }

    pub(super) fn start(&self) -> usize {
        self.end - self.tokens.len()
    }

    /// Whether the device pages belong to the connected prefix; a root always does.
    pub(super) fn resident(&self) -> bool {
        matches!(
            self.state,
            NodeState::Full | NodeState::Backing | NodeState::Loading
        )
    }

    /// Whether device pages can be read at full width.
    pub(super) fn readable(&self) -> bool {
        matches!(self.state, NodeState::Full | NodeState::Backing)
    }

    /// Whether the host copy is complete; a root needs none.
    pub(super) fn host_complete(&self) -> bool {
        self.is_root() || (self.state != NodeState::Backing && !self.host.is_empty())
    }

    pub(super) fn standing(&self) -> Standing {
        Standing {
            resident: self.resident(),
            leaving: self.leaving,
            hosted: !self.host.is_empty(),
        }
    }

    /// Whether the device pages, and the host pages, may be evicted once nothing below has any.
    pub(super) fn evictable(&self) -> (bool, bool) {
        let free = !self.locks.any() && !self.is_root();
        let full = self.state == NodeState::Full;
        let host = !self.host.is_empty() && (full || self.state == NodeState::Host);
        (free && full, free && host)
    }

    pub(super) fn tally(&self, page_size: usize) -> Tally {
        let pages = self.tokens.len() / page_size;
        let mut tally = Tally::default();
        if self.is_root() {
            return tally;
        }
        tally.by_state[self.state as usize] = pages;
        let (device, host) = self.evictable();
        if self.state == NodeState::Backing {
            tally.host_pending = pages;
        } else if !self.host.is_empty() {
            tally.host = pages;
        }
        tally.evictable_device = pages * usize::from(device);
        tally.evictable_host = pages * usize::from(host);
        if self.leaving {
            tally.coming = pages;
        }
        if self.resident() && self.locks.any() && !self.locks.leased() {
            tally.copied = pages;
        }
        tally
    }
}

impl Tally {
    fn fields(&mut self) -> impl Iterator<Item = &mut usize> {
        self.by_state.iter_mut().chain([
            &mut self.host,
            &mut self.host_pending,
            &mut self.evictable_device,
            &mut self.evictable_host,
            &mut self.coming,
            &mut self.copied,
        ])
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, mut other: Self) {
        for (mine, theirs) in self.fields().zip(other.fields()) {
            *mine += *theirs;
        }
    }
}

impl SubAssign for Tally {
    fn sub_assign(&mut self, mut other: Self) {
        for (mine, theirs) in self.fields().zip(other.fields()) {
            *mine -= *theirs;
        }
    }
}

/// Storage of nodes. Indexing is by ids that the tree itself holds; [`Arena::get`] is for ids that
/// may be stale.
#[derive(Default)]
pub(super) struct Arena {
    nodes: Vec<Node>,
    vacant: Vec<u32>,
    issued: u64,
}

impl Arena {
    pub(super) fn insert(&mut self, mut node: Node) -> NodeId {
        self.issued += 1;
        node.serial = self.issued;
        let index = self.vacant.pop().unwrap_or_else(|| {
            // 2^32 nodes are more memory than any machine has.
            let index = u32::try_from(self.nodes.len()).unwrap_or(u32::MAX);
            self.nodes.push(Node::new(NodeId::NONE, Namespace(0)));
            index
        });
        let id = NodeId {
            serial: self.issued,
            index,
        };
        self[id] = node;
        id
    }

    pub(super) fn remove(&mut self, id: NodeId) -> Node {
        self.vacant.push(id.index);
        let gone = Node::new(NodeId::NONE, Namespace(0));
        std::mem::replace(&mut self[id], gone)
    }

    pub(super) fn get(&self, id: NodeId) -> Option<&Node> {
        let node = self.nodes.get(id.index as usize)?;
        (id.serial != 0 && node.serial == id.serial).then_some(node)
    }

    /// The node stored at `index`.
    pub(super) fn at(&self, index: usize) -> Option<NodeId> {
        let serial = self.nodes.get(index)?.serial;
        let index = u32::try_from(index).ok()?;
        (serial != 0).then_some(NodeId { serial, index })
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    /// Places for nodes, vacant ones included.
    pub(super) fn places(&self) -> usize {
        self.nodes.len()
    }
}

impl Index<NodeId> for Arena {
    type Output = Node;

    fn index(&self, id: NodeId) -> &Node {
        &self.nodes[id.index as usize]
    }
}

impl IndexMut<NodeId> for Arena {
    fn index_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.index as usize]
    }
}
