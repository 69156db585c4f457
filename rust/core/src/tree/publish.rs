//! Publishing: pages of a request, or of an acknowledged store, become the tree's.

use super::index::Books;
use super::node::{Node, NodeId};
use super::{Inserted, Namespace, NodeState};
use crate::error::{Error, Result};
use crate::host::HostPage;
use crate::pages::PageEntry;
use crate::request::PriorityClass;

impl Books {
    pub(super) fn insert(
        &mut self,
        lease: u64,
        tokens: &[u32],
        pages: &[PageEntry],
        priority: PriorityClass,
    ) -> Inserted {
        let mut inserted = Inserted::default();
        let Some(mut at) = self.holds.get(&lease).map(|hold| hold.end) else {
            return inserted;
        };
        // Device pages form a connected prefix, and a load decides alone over what it fills.
        if !self.config.device_tier || !self.nodes[at].readable() {
            return inserted;
        }
        let count = pages.len().min(tokens.len() / self.page_size);
        let tick = self.next_tick();
        while inserted.covered < count {
            let done = inserted.covered;
            let rest = &tokens[done * self.page_size..count * self.page_size];
            let (id, covered) = match self.child(at, rest) {
                (hash, None) => {
                    let mut node = self.new_node(at, hash, rest, priority);
                    node.device = pages[done..count].to_vec();
                    self.counters.inserted_pages += (count - done) as u64;
                    (self.attach(node), count - done)
                }
                (_, Some((child, _))) if self.nodes[child].state == NodeState::Loading => break,
                (_, Some((child, common))) => {
                    let end = self.nodes[child].start() + common * self.page_size;
                    let id = self.cut_at(child, end);
                    self.offer(id, done, &pages[done..done + common], &mut inserted);
                    (id, common)
                }
            };
            self.extend_hold(lease, id);
            self.touch_published(id, tick, priority);
            inserted.covered += covered;
            at = id;
        }
        inserted
    }

    /// Pages for tokens the tree knows: its own device pages win, a node without takes these.
    fn offer(&mut self, id: NodeId, first: usize, pages: &[PageEntry], inserted: &mut Inserted) {
        let node = &self.nodes[id];
        if node.readable() {
            let pairs = pages.iter().zip(&node.device).enumerate();
            let different = pairs.filter(|(_, (given, existing))| given != existing);
            let duplicates = different.map(|(i, (&given, &own))| (first + i, given, own));
            let before = inserted.duplicates.len();
            inserted.duplicates.extend(duplicates);
            self.counters.duplicate_pages += (inserted.duplicates.len() - before) as u64;
            return;
        }
        let low = self.change(id, |node| {
            node.state = NodeState::Full;
            std::mem::replace(&mut node.device, pages.to_vec())
        });
        self.garbage.device.extend(low);
        self.counters.inserted_pages += pages.len() as u64;
    }

    pub(super) fn insert_host(
        &mut self,
        namespace: Namespace,
        tokens: &[u32],
        first_page: usize,
        pages: &[HostPage],
        priority: PriorityClass,
    ) -> Result<Vec<HostPage>> {
        let expected = first_page
            .checked_add(pages.len())
            .and_then(|pages| pages.checked_mul(self.page_size));
        if expected != Some(tokens.len()) {
            let what = "the whole prefix, exactly the pages before first_page and those given";
            return Err(Error::request("tokens.len()", tokens.len(), what));
        }
        let root = self.root(namespace);
        let start = first_page * self.page_size;
        let (path, len) = self.walk(root, &tokens[..start]);
        let mut unused = pages.to_vec();
        if len == start
            && let Some(&last) = path.last()
        {
            let at = self.cut_at(last, start);
            (_, unused) = self.publish_host(None, at, &tokens[start..], pages, priority);
        }
        self.prune_root(root);
        Ok(unused)
    }

    /// Publishes host pages after the end of a lease and extends it. Returns the number of pages
    /// covered, and those given that the tree did not take.
    pub(super) fn extend_host(
        &mut self,
        lease: u64,
        tokens: &[u32],
        pages: &[HostPage],
        priority: PriorityClass,
    ) -> (usize, Vec<HostPage>) {
        let Some(at) = self.holds.get(&lease).map(|hold| hold.end) else {
            return (0, pages.to_vec());
        };
        self.publish_host(Some(lease), at, tokens, pages, priority)
    }

    fn publish_host(
        &mut self,
        lease: Option<u64>,
        mut at: NodeId,
        tokens: &[u32],
        pages: &[HostPage],
        priority: PriorityClass,
    ) -> (usize, Vec<HostPage>) {
        let count = pages.len().min(tokens.len() / self.page_size);
        let tick = self.next_tick();
        let (mut done, mut unused) = (0, Vec::new());
        while done < count {
            let rest = &tokens[done * self.page_size..count * self.page_size];
            let allowed = !self.hosts_are_prefix() || self.nodes[at].host_complete();
            let (id, covered) = match self.child(at, rest) {
                (_, None) if !allowed => break,
                (hash, None) => {
                    let mut node = self.new_node(at, hash, rest, priority);
                    node.state = NodeState::Host;
                    node.host = pages[done..count].to_vec();
                    (self.attach(node), count - done)
                }
                (_, Some((child, common))) => {
                    let end = self.nodes[child].start() + common * self.page_size;
                    let id = self.cut_at(child, end);
                    let given = &pages[done..done + common];
                    let node = &self.nodes[id];
                    if allowed && node.host.is_empty() && node.job.is_none() {
                        self.change(id, |node| node.host = given.to_vec());
                        self.unqueue_store(id);
                        self.queue_children(id);
                    } else {
                        unused.extend_from_slice(given);
                    }
                    (id, common)
                }
            };
            if let Some(lease) = lease {
                self.extend_hold(lease, id);
            }
            self.touch_published(id, tick, priority);
            done += covered;
            at = id;
        }
        unused.extend_from_slice(&pages[done..]);
        self.counters.inserted_host_pages += (pages.len() - unused.len()) as u64;
        (done, unused)
    }

    fn new_node(&self, at: NodeId, hash: u128, tokens: &[u32], priority: PriorityClass) -> Node {
        let parent = &self.nodes[at];
        let mut node = Node::new(at, parent.namespace);
        node.hash = hash;
        node.tokens = tokens.to_vec();
        node.end = parent.end + tokens.len();
        node.priority = priority;
        node
    }

    /// A node counts for the highest class that published it.
    fn touch_published(&mut self, id: NodeId, tick: u64, priority: PriorityClass) {
        self.change(id, |node| {
            node.tick = tick;
            node.priority = node.priority.min(priority);
        });
        self.keep(id);
        self.queue_store(id);
    }
}
