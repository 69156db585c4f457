//! LOW readers: nodes whose device pages are windows of layers, held by the rows that stream.

use super::NodeState;
use super::index::{Books, Holder};
use super::node::NodeId;
use crate::pages::PageEntry;
use crate::request::PriorityClass;

impl Books {
    /// Gives up the device pages of a node that has a host copy.
    pub(super) fn demote_node(&mut self, id: NodeId) -> Vec<PageEntry> {
        self.counters.demoted_pages += self.pages_of(id) as u64;
        self.change(id, |node| {
            node.state = NodeState::Host;
            node.leaving = false;
            std::mem::take(&mut node.device)
        })
    }

    pub(super) fn demote(&mut self, lease: u64) -> Vec<PageEntry> {
        let mut freed = Vec::new();
        let mut at = self.holds.get(&lease).map_or(NodeId::NONE, |hold| hold.end);
        while at != NodeId::NONE {
            let node = &self.nodes[at];
            let parent = node.parent;
            if node.resident() {
                let movable = node.state == NodeState::Full
                    && !node.host.is_empty()
                    && node.locks.high == 0
                    && node.locks.jobs == 0
                    && node.resident_children == 0;
                if !movable {
                    break;
                }
                freed.extend(self.demote_node(at));
            }
            at = parent;
        }
        freed
    }

    pub(super) fn window_missing(&self, lease: u64) -> usize {
        let Some(hold) = self.holds.get(&lease).filter(|_| self.config.device_tier) else {
            return 0;
        };
        let path = self.path(hold.end);
        let missing = path
            .iter()
            .filter(|&&id| self.nodes[id].state == NodeState::Host);
        missing.map(|&id| self.pages_of(id)).sum()
    }

    /// Returns the pages that found no place.
    pub(super) fn give_window(&mut self, lease: u64, pages: &[PageEntry]) -> Vec<PageEntry> {
        if !self.window_hold(lease) {
            return pages.to_vec();
        }
        let end = self.holds.get(&lease).map(|hold| hold.end);
        let mut left = pages;
        for id in end.map(|end| self.path(end)).unwrap_or_default() {
            if left.is_empty() {
                break;
            }
            if self.nodes[id].state != NodeState::Host {
                continue;
            }
            let count = self.pages_of(id).min(left.len());
            let node = self.cut_at(id, self.nodes[id].start() + count * self.page_size);
            let (given, rest) = left.split_at(count);
            self.change(node, |node| {
                node.state = NodeState::Low;
                node.device = given.to_vec();
            });
            left = rest;
        }
        left.to_vec()
    }

    /// Holds the LOW nodes of the path, those to come included. LOW readers only.
    pub(super) fn window_hold(&mut self, lease: u64) -> bool {
        let Some(hold) = self.holds.get_mut(&lease) else {
            return false;
        };
        if hold.reader != PriorityClass::Low || !self.config.device_tier {
            return false;
        }
        if !hold.windows {
            hold.windows = true;
            let end = hold.end;
            self.lock_path(end, Holder::Window);
        }
        true
    }

    /// Lets go of the LOW nodes; the lease stays.
    pub(super) fn window_release(&mut self, lease: u64) {
        if let Some(hold) = self.holds.get_mut(&lease)
            && hold.windows
        {
            hold.windows = false;
            let end = hold.end;
            self.unlock_path(end, NodeId::NONE, Holder::Window);
        }
    }
}
