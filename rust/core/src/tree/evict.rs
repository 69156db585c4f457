//! Eviction: exactly the shortfall, the least valuable node first, only its tail if that is enough.

use super::index::Books;
use super::node::NodeId;
use super::{Evicted, NodeState, WritePolicy};

impl Books {
    pub(super) fn evict_device(&mut self, n: usize) -> Evicted {
        let mut out = Evicted {
            coming: n.min(self.total.coming),
            ..Evicted::default()
        };
        let mut left = n - out.coming;
        while left > 0 {
            let Some(&(.., id)) = self.device_frontier.first() else {
                break;
            };
            left -= self.cut_tail(id, left);
            let node = &self.nodes[id];
            if node.host.is_empty() && self.config.policy != WritePolicy::WriteBack {
                self.remove_subtree(id, &mut out);
            } else if !node.host.is_empty() && node.resident_children == 0 {
                out.device.extend(self.demote_node(id));
            } else {
                // Needs a host copy first, or its children do.
                out.coming += self.pages_of(id);
                self.change(id, |node| node.leaving = true);
                self.queue_store(id);
            }
        }
        out
    }

    pub(super) fn evict_host(&mut self, n: usize) -> Evicted {
        let mut out = Evicted::default();
        let mut left = n;
        while left > 0 {
            let Some(&(.., id)) = self.host_frontier.first() else {
                break;
            };
            let pages = self.cut_tail(id, left);
            left -= pages;
            if self.nodes[id].state == NodeState::Host {
                self.counters.evicted_host_pages += pages as u64;
                self.remove_subtree(id, &mut out);
            } else {
                self.counters.reclaimed_host_pages += pages as u64;
                self.keep(id);
                let host = self.change(id, |node| std::mem::take(&mut node.host));
                out.host.extend(host);
            }
        }
        out
    }

    pub(super) fn evict_snapshot(&mut self, n: usize) -> Vec<u32> {
        let mut slots = Vec::new();
        while slots.len() < n {
            let Some(&(_, id)) = self.snapshot_lru.first() else {
                break;
            };
            slots.extend(self.take_snapshot(id));
        }
        self.counters.evicted_snapshots += slots.len() as u64;
        self.counters.snapshots_short += (n - slots.len()) as u64;
        slots
    }

    /// Makes a node at most `pages` long by splitting its front off; returns its length.
    fn cut_tail(&mut self, id: NodeId, pages: usize) -> usize {
        let all = self.pages_of(id);
        if all > pages {
            self.split(id, all - pages);
        }
        all.min(pages)
    }

    /// Removes an unlocked node with its descendants.
    pub(super) fn remove_subtree(&mut self, id: NodeId, out: &mut Evicted) {
        let mut order = vec![id];
        let mut next = 0;
        while let Some(&at) = order.get(next) {
            order.extend(self.nodes[at].children.iter().map(|&(_, child)| child));
            next += 1;
        }
        for &at in order.iter().rev() {
            out.snapshots.extend(self.take_snapshot(at));
            let node = self.detach(at);
            self.counters.removed_pages += (node.tokens.len() / self.page_size) as u64;
            out.device.extend(node.device);
            out.host.extend(node.host);
        }
    }

    pub(super) fn clear(&mut self) -> Evicted {
        let mut out = Evicted::default();
        let mut stack: Vec<NodeId> = self.roots.values().copied().collect();
        while let Some(at) = stack.pop() {
            let node = &self.nodes[at];
            if node.is_root() || node.locks.any() {
                stack.extend(node.children.iter().map(|&(_, child)| child));
            } else {
                self.remove_subtree(at, &mut out);
            }
        }
        out
    }
}
