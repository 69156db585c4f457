//! The invariants, recounted from the nodes, leases and jobs alone.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use super::copies::JobKind;
use super::index::{Books, Hold};
use super::node::{Locks, Node, NodeId, Tally};
use super::{NodeState, SNAPSHOT_ALIGN};
use crate::request::PriorityClass;

type Checked = std::result::Result<(), String>;

fn expect(ok: bool, id: NodeId, what: &str) -> Checked {
    if ok {
        return Ok(());
    }
    Err(format!("node {id:?}: {what}"))
}

fn same<T: PartialEq + Debug>(what: &str, counted: &T, kept: &T) -> Checked {
    if counted == kept {
        return Ok(());
    }
    Err(format!("{what}: counted {counted:?}, kept {kept:?}"))
}

impl Books {
    pub(super) fn check_some(&mut self, n: usize) -> Checked {
        for _ in 0..n.min(self.nodes.places()) {
            let index = self.check_cursor % self.nodes.places();
            self.check_cursor = index + 1;
            if let Some(id) = self.nodes.at(index) {
                self.check_node(id)?;
            }
        }
        Ok(())
    }

    pub(super) fn check(&self) -> Checked {
        let order = self.in_order();
        same(
            "nodes",
            &(order.len() + self.roots.len()),
            &self.nodes.len(),
        )?;
        for (&namespace, &root) in &self.roots {
            let node = self.nodes.get(root).ok_or("a root is gone")?;
            expect(
                node.is_root() && node.namespace == namespace,
                root,
                "not the root",
            )?;
            self.check_node(root)?;
        }
        for &id in &order {
            self.check_node(id)?;
        }
        self.check_sums(&order)?;
        self.check_locks(&order)?;
        self.check_jobs(&order)?;
        self.check_unique(&order)
    }

    /// A node against its parent and children.
    fn check_node(&self, id: NodeId) -> Checked {
        let node = &self.nodes[id];
        if node.is_root() {
            let bare = node.tokens.is_empty() && node.device.is_empty() && node.host.is_empty();
            expect(bare && node.end == 0, id, "a root with tokens or pages")?;
            let kept = !node.children.is_empty() || node.locks.any();
            expect(kept, id, "a root of nothing")?;
        } else {
            self.check_shape(id, node)?;
            let parent = self.nodes.get(node.parent).ok_or("a parent is gone")?;
            self.check_below(id, node, parent)?;
        }
        self.check_children(id, node)?;
        let keys = (self.device_key(id), self.host_key(id));
        expect(
            keys == (node.device_key, node.host_key),
            id,
            "stale place in a frontier",
        )?;
        let placed = keys.0.is_none_or(|key| self.device_frontier.contains(&key))
            && keys.1.is_none_or(|key| self.host_frontier.contains(&key));
        expect(placed, id, "missing in a frontier")?;
        let queued = node
            .queued
            .is_none_or(|key| self.store_queue.get(&key) == Some(&id));
        expect(queued, id, "missing in the queue of stores")
    }

    /// Pages by state; a node has device pages or a complete host copy.
    fn check_shape(&self, id: NodeId, node: &Node) -> Checked {
        let pages = node.tokens.len() / self.page_size;
        let whole = pages > 0 && node.tokens.len().is_multiple_of(self.page_size);
        expect(whole, id, "not whole pages")?;
        let (device, host) = (node.device.len(), node.host.len());
        let lists = match node.state {
            NodeState::Full => device == pages && (host == 0 || host == pages),
            NodeState::Host => device == 0 && host == pages,
            NodeState::Low | NodeState::Loading | NodeState::Backing => {
                device == pages && host == pages
            }
        };
        expect(lists, id, "page lists do not fit the state")?;
        let held = node.state != NodeState::Low || node.locks.windows > 0;
        expect(held, id, "LOW pages that nobody reads")?;
        let copying = matches!(node.state, NodeState::Loading | NodeState::Backing);
        expect(!copying || node.job.is_some(), id, "copied by no job")?;
        let leaving = !node.leaving || matches!(node.state, NodeState::Full | NodeState::Backing);
        expect(leaving, id, "leaves without device pages")?;
        let slot_mode = self.config.device_tier || device == 0;
        expect(slot_mode, id, "device pages without a device tier")?;
        let align = self.page_size.max(SNAPSHOT_ALIGN);
        let aligned = node.end.is_multiple_of(align);
        let snapshot = node.snapshot.is_none() || (self.config.snapshots && aligned);
        expect(snapshot, id, "a snapshot at a wrong position")
    }

    fn check_below(&self, id: NodeId, node: &Node, parent: &Node) -> Checked {
        expect(
            node.start() == parent.end,
            id,
            "does not start at its parent's end",
        )?;
        expect(
            node.namespace == parent.namespace,
            id,
            "in another namespace",
        )?;
        expect(
            parent.children.contains(&(node.hash, id)),
            id,
            "unknown to its parent",
        )?;
        let hash = (self.config.hash)(&node.tokens[..self.page_size]);
        expect(hash == node.hash, id, "wrong hash")?;
        expect(
            !node.resident() || parent.resident(),
            id,
            "a hole in the device part",
        )?;
        let loaded = parent.state != NodeState::Loading || !node.readable();
        expect(loaded, id, "on device below a load")?;
        let hosted = node.host.is_empty() || parent.is_root() || !parent.host.is_empty();
        expect(
            !self.hosts_are_prefix() || hosted,
            id,
            "a hole in the host part",
        )?;
        let (a, b) = (node.locks, parent.locks);
        let monotone = a.high <= b.high && a.low <= b.low && a.jobs <= b.jobs;
        expect(
            monotone && a.windows <= b.windows,
            id,
            "locked more than its parent",
        )?;
        expect(a.windows <= a.low, id, "more windows than LOW readers")
    }

    fn check_children(&self, id: NodeId, node: &Node) -> Checked {
        let mut firsts = BTreeSet::new();
        let mut counts = [0; 4];
        for &(_, child) in &node.children {
            let child = self.nodes.get(child).ok_or("a child is gone")?;
            expect(child.parent == id, id, "a child has another parent")?;
            let fresh = firsts.insert(&child.tokens[..self.page_size.min(child.tokens.len())]);
            expect(fresh, id, "two children start alike")?;
            let standing = child.standing();
            counts[0] += u32::from(standing.resident);
            counts[1] += u32::from(standing.leaving);
            counts[2] += u32::from(standing.hosted);
            counts[3] += child.snapshots_below;
        }
        counts[3] += u32::from(node.snapshot.is_some());
        let kept = [
            node.resident_children,
            node.leaving_children,
            node.hosted_children,
            node.snapshots_below,
        ];
        same("children", &counts, &kept)
    }

    fn check_sums(&self, order: &[NodeId]) -> Checked {
        let mut total = Tally::default();
        let mut frontiers = [0; 4];
        for &id in order {
            let node = &self.nodes[id];
            total += node.tally(self.page_size);
            frontiers[0] += usize::from(node.device_key.is_some());
            frontiers[1] += usize::from(node.host_key.is_some());
            frontiers[2] += usize::from(node.queued.is_some());
            frontiers[3] += usize::from(node.snapshot.is_some());
        }
        same("sums", &total, &self.total)?;
        let kept = [
            self.device_frontier.len(),
            self.host_frontier.len(),
            self.store_queue.len(),
            self.snapshots,
        ];
        same("frontiers", &frontiers, &kept)?;
        let free = |&&id: &&NodeId| self.nodes[id].snapshot.is_some_and(|s| s.locks == 0);
        let free: BTreeSet<(u64, NodeId)> = order
            .iter()
            .filter(free)
            .filter_map(|&id| self.nodes[id].snapshot.map(|s| (s.tick, id)))
            .collect();
        same("free snapshots", &free, &self.snapshot_lru)
    }

    /// Locks are the leases and jobs at or below.
    fn check_locks(&self, order: &[NodeId]) -> Checked {
        let mut locks: BTreeMap<NodeId, Locks> = BTreeMap::new();
        let mut snapshots: BTreeMap<NodeId, u32> = BTreeMap::new();
        for Hold {
            end,
            reader,
            windows,
            snapshot,
        } in self.holds.values()
        {
            for id in self.path(*end) {
                let locks = locks.entry(id).or_default();
                match reader {
                    PriorityClass::High => locks.high += 1,
                    PriorityClass::Low => locks.low += 1,
                }
                locks.windows += u32::from(*windows);
            }
            if let Some(id) = snapshot {
                *snapshots.entry(*id).or_default() += 1;
            }
        }
        for job in self.jobs.values() {
            for id in self.path(job.end) {
                locks.entry(id).or_default().jobs += 1;
            }
        }
        for &id in order.iter().chain(self.roots.values()) {
            let node = &self.nodes[id];
            same("locks", &locks.remove(&id).unwrap_or_default(), &node.locks)?;
            let kept = node.snapshot.map_or(0, |snapshot| snapshot.locks);
            same("snapshot locks", &snapshots.remove(&id).unwrap_or(0), &kept)?;
        }
        same("locks of nodes that are gone", &locks.len(), &0)?;
        same(
            "snapshot locks of nodes that are gone",
            &snapshots.len(),
            &0,
        )
    }

    fn check_jobs(&self, order: &[NodeId]) -> Checked {
        let mut named = BTreeMap::new();
        for (&id, job) in &self.jobs {
            let state = match job.kind {
                JobKind::Load => NodeState::Loading,
                JobKind::Wanted => NodeState::Full,
                JobKind::Store => NodeState::Backing,
                JobKind::Snapshot { .. } => {
                    let node = self.nodes.get(job.end).ok_or("a snapshot without a node")?;
                    expect(
                        node.snapshot_job == Some(id),
                        job.end,
                        "knows no snapshot job",
                    )?;
                    continue;
                }
            };
            for &node in &job.nodes {
                let found = self.nodes.get(node).ok_or("a job without a node")?;
                expect(found.state == state, node, "not in the state of its job")?;
                named.insert(node, id);
            }
        }
        let jobs = order
            .iter()
            .filter_map(|&id| Some((id, self.nodes[id].job?)));
        same("nodes in jobs", &jobs.collect(), &named)
    }

    /// Every page and snapshot slot is in one place only.
    fn check_unique(&self, order: &[NodeId]) -> Checked {
        let (mut device, mut host, mut slots) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for &id in order {
            let node = &self.nodes[id];
            let fresh = node.device.iter().all(|page| device.insert(*page))
                && node.host.iter().all(|page| host.insert(*page))
                && node
                    .snapshot
                    .is_none_or(|snapshot| slots.insert(snapshot.slot));
            expect(fresh, id, "a page of another node")?;
            let low = node.state == NodeState::Low;
            expect(
                node.device.iter().all(|page| page.is_low() == low),
                id,
                "pages of the wrong class",
            )?;
        }
        let fresh = self.garbage.device.iter().all(|page| device.insert(*page))
            && self.garbage.host.iter().all(|page| host.insert(*page));
        if !fresh {
            return Err("garbage that a node still has".to_owned());
        }
        for job in self.jobs.values() {
            if let JobKind::Snapshot { slot } = job.kind
                && !slots.insert(slot)
            {
                return Err(format!("snapshot slot {slot} has two owners"));
            }
        }
        Ok(())
    }
}
