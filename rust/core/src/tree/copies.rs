//! Loads and stores: what is being copied, who waits for it, and what follows when it ends.
//!
//! A job locks the path to its deepest node and names every node of its page range; a split adds
//! the new half. Host copies are stored parent first, so that they stay a connected prefix;
//! `WriteBack` alone stores from the leaves.

use super::index::{Books, Holder};
use super::node::NodeId;
use super::{LoadJob, NodeState, StoreWant, WritePolicy};
use crate::host::HostPage;
use crate::pages::PageEntry;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum JobKind {
    /// Host pages are read, device pages belong to the job.
    Load,
    /// Handed out by `next_store`; nothing moves yet.
    Wanted,
    /// Device pages are read, host pages belong to the job.
    Store,
    /// State goes to a snapshot slot.
    Snapshot {
        /// The slot, the job's until it ends.
        slot: u32,
    },
}

pub(super) struct Job {
    pub(super) kind: JobKind,
    /// In no order: splits append.
    pub(super) nodes: Vec<NodeId>,
    /// Deepest node; the job locks the path to it.
    pub(super) end: NodeId,
}

impl Books {
    pub(super) fn begin_job(&mut self, kind: JobKind, nodes: Vec<NodeId>, end: NodeId) -> u64 {
        self.issued_jobs += 1;
        self.lock_path(end, Holder::Job);
        self.jobs.insert(self.issued_jobs, Job { kind, nodes, end });
        self.issued_jobs
    }

    /// Ends a job if it is of the kind that `is` accepts, and unlocks its path.
    pub(super) fn end_job(&mut self, id: u64, is: impl Fn(JobKind) -> bool) -> Option<Job> {
        if !self.jobs.get(&id).is_some_and(|job| is(job.kind)) {
            return None;
        }
        let mut job = self.jobs.remove(&id)?;
        self.sort_by_position(&mut job.nodes);
        self.unlock_path(job.end, NodeId::NONE, Holder::Job);
        Some(job)
    }

    fn sort_by_position(&self, nodes: &mut [NodeId]) {
        nodes.sort_unstable_by_key(|&id| self.nodes[id].end);
    }

    /// Pages after the device part that are on host, and, before them, those being loaded.
    pub(super) fn loadable(&self, lease: u64) -> (usize, usize) {
        let Some(hold) = self.holds.get(&lease).filter(|_| self.config.device_tier) else {
            return (0, 0);
        };
        let path = self.path(hold.end);
        let run = |state: NodeState| {
            let rest = path.iter().skip_while(|&&id| self.nodes[id].readable());
            let nodes = rest.take_while(move |&&id| self.nodes[id].state == state);
            nodes.map(|&id| self.pages_of(id)).sum()
        };
        (run(NodeState::Host), run(NodeState::Loading))
    }

    pub(super) fn begin_load(&mut self, lease: u64, pages: &[PageEntry]) -> LoadJob {
        let mut copies = Vec::new();
        let mut nodes = Vec::new();
        let hold = self.holds.get(&lease).filter(|_| self.config.device_tier);
        let path = hold.map(|hold| self.path(hold.end));
        for id in path.unwrap_or_default() {
            let left = &pages[copies.len()..];
            if self.nodes[id].readable() {
                continue;
            }
            if self.nodes[id].state != NodeState::Host || left.is_empty() {
                break;
            }
            let count = self.pages_of(id).min(left.len());
            let end = self.nodes[id].start() + count * self.page_size;
            let id = self.cut_at(id, end);
            let node = &self.nodes[id];
            copies.extend(node.host.iter().copied().zip(left.iter().copied()));
            self.change(id, |node| {
                node.state = NodeState::Loading;
                node.device = left[..count].to_vec();
            });
            nodes.push(id);
        }
        let unused = pages[copies.len()..].to_vec();
        let Some(&end) = nodes.last() else {
            return LoadJob {
                id: 0,
                copies,
                unused,
            };
        };
        let id = self.begin_job(JobKind::Load, nodes.clone(), end);
        for node in nodes {
            self.nodes[node].job = Some(id);
        }
        self.counters.loads += 1;
        LoadJob { id, copies, unused }
    }

    pub(super) fn end_load(&mut self, id: u64, ok: bool) -> Vec<PageEntry> {
        let Some(job) = self.end_job(id, |kind| kind == JobKind::Load) else {
            return Vec::new();
        };
        let mut freed = Vec::new();
        let mut pages = 0;
        // Children first when the load failed: a resident node never has a parent that is not.
        for &node in job.nodes.iter().rev() {
            pages += self.pages_of(node) as u64;
            let dropped = self.change(node, |node| {
                node.job = None;
                if ok {
                    node.state = NodeState::Full;
                    Vec::new()
                } else {
                    node.state = NodeState::Host;
                    std::mem::take(&mut node.device)
                }
            });
            freed.splice(0..0, dropped);
        }
        if ok {
            self.counters.loaded_pages += pages;
        } else {
            self.counters.load_failed_pages += pages;
        }
        freed
    }

    fn wants_store(&self, id: NodeId) -> bool {
        let node = &self.nodes[id];
        node.forced
            || match self.config.policy {
                WritePolicy::WriteThrough => true,
                WritePolicy::Selective { hits } => node.hits >= hits,
                WritePolicy::WriteBack => node.leaving,
                WritePolicy::None => false,
            }
    }

    fn storable(&self, id: NodeId) -> bool {
        let node = &self.nodes[id];
        node.state == NodeState::Full
            && !node.is_root()
            && node.host.is_empty()
            && node.job.is_none()
            && (!self.hosts_are_prefix() || self.nodes[node.parent].host_complete())
            && self.wants_store(id)
    }

    /// Puts a node at the end of the queue of stores if the policy wants a host copy of it. One
    /// whose parent has none follows when the parent's store is done.
    pub(super) fn queue_store(&mut self, id: NodeId) {
        if self.nodes[id].queued.is_none() && self.storable(id) {
            self.queue_order += 1;
            let key = (self.queue_order, self.nodes[id].start());
            self.nodes[id].queued = Some(key);
            self.store_queue.insert(key, id);
        }
    }

    pub(super) fn unqueue_store(&mut self, id: NodeId) {
        if let Some(key) = self.nodes[id].queued.take() {
            self.store_queue.remove(&key);
        }
    }

    pub(super) fn queue_children(&mut self, id: NodeId) {
        let children: Vec<NodeId> = self.nodes[id].children.iter().map(|c| c.1).collect();
        for child in children {
            self.queue_store(child);
        }
    }

    pub(super) fn request_store(&mut self, lease: u64) {
        let path = self.holds.get(&lease).map(|hold| self.path(hold.end));
        for id in path.unwrap_or_default() {
            self.nodes[id].forced = true;
            self.queue_store(id);
        }
    }

    pub(super) fn next_store(&mut self, max_pages: usize) -> Option<StoreWant> {
        if max_pages == 0 {
            return None;
        }
        while let Some((_, id)) = self.store_queue.pop_first() {
            self.nodes[id].queued = None;
            if !self.storable(id) {
                continue;
            }
            let count = self.pages_of(id).min(max_pages);
            let end = self.nodes[id].start() + count * self.page_size;
            let node = self.cut_at(id, end);
            if node != id {
                // Where host copies need no order the rest is stored independently.
                self.queue_store(id);
            }
            let job = self.begin_job(JobKind::Wanted, vec![node], node);
            self.nodes[node].job = Some(job);
            let wanted = &self.nodes[node];
            return Some(StoreWant {
                job,
                node,
                pages: wanted.device.clone(),
                priority: wanted.priority,
                leaving: wanted.leaving,
            });
        }
        None
    }

    pub(super) fn begin_store(&mut self, want: &StoreWant, host: Vec<HostPage>) -> u64 {
        let Some(job) = self.end_job(want.job, |kind| kind == JobKind::Wanted) else {
            self.garbage.host.extend(host);
            return 0;
        };
        let mut host = host.into_iter();
        let mut nodes = Vec::new();
        let mut rest = Vec::new();
        for id in job.nodes {
            let count = self.pages_of(id).min(host.len());
            if count == 0 {
                rest.push(id);
                continue;
            }
            let node = self.cut_at(id, self.nodes[id].start() + count * self.page_size);
            if node != id {
                rest.push(id);
            }
            let pages: Vec<HostPage> = host.by_ref().take(count).collect();
            self.change(node, |node| {
                node.state = NodeState::Backing;
                node.host = pages;
            });
            nodes.push(node);
        }
        self.garbage.host.extend(host);
        for id in rest {
            self.nodes[id].job = None;
            self.queue_store(id);
        }
        let Some(&end) = nodes.last() else {
            return 0;
        };
        let id = self.begin_job(JobKind::Store, nodes.clone(), end);
        for node in nodes {
            self.nodes[node].job = Some(id);
        }
        self.counters.stores += 1;
        id
    }

    pub(super) fn drop_store(&mut self, want: &StoreWant) {
        let Some(job) = self.end_job(want.job, |kind| kind == JobKind::Wanted) else {
            return;
        };
        let mut leaving = None;
        for &id in job.nodes.iter().rev() {
            self.nodes[id].job = None;
            self.counters.host_full_tokens += self.nodes[id].tokens.len() as u64;
            if self.nodes[id].locks.any() {
                self.keep(id); // no store will follow that could end its leaving
            } else if self.nodes[id].leaving {
                leaving = Some(id);
            }
        }
        if let Some(id) = leaving {
            // The host is full, and device eviction waits for these pages: the node goes.
            let parent = self.nodes[id].parent;
            let mut gone = std::mem::take(&mut self.garbage);
            self.remove_subtree(id, &mut gone);
            self.garbage = gone;
            self.settle(parent);
        }
    }

    pub(super) fn end_store(&mut self, id: u64, ok: bool) -> Vec<HostPage> {
        let Some(job) = self.end_job(id, |kind| kind == JobKind::Store) else {
            return Vec::new();
        };
        let mut freed = Vec::new();
        for &id in &job.nodes {
            let pages = self.pages_of(id) as u64;
            let dropped = self.change(id, |node| {
                node.job = None;
                node.state = NodeState::Full;
                if ok {
                    Vec::new()
                } else {
                    std::mem::take(&mut node.host)
                }
            });
            freed.extend(dropped);
            if ok {
                self.counters.stored_pages += pages;
                self.queue_children(id);
            } else {
                self.counters.store_failed_pages += pages;
                self.keep(id);
            }
        }
        self.settle(job.end);
        freed
    }

    /// Takes a node, and the ancestors that waited for it, off the list of those that leave.
    pub(super) fn keep(&mut self, id: NodeId) {
        let mut at = id;
        while self.nodes[at].leaving {
            self.change(at, |node| node.leaving = false);
            at = self.nodes[at].parent;
        }
    }

    /// Demotes a leaving node whose turn has come, then the ancestors that waited for it.
    pub(super) fn settle(&mut self, id: NodeId) {
        let mut at = id;
        while let Some(node) = self.nodes.get(at)
            && node.leaving
            && node.state == NodeState::Full
            && node.host_complete()
            && !node.locks.any()
            && node.resident_children == 0
        {
            let parent = node.parent;
            let pages = self.demote_node(at);
            self.garbage.device.extend(pages);
            at = parent;
        }
    }
}
