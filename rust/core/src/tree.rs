//! Prefix tree: which KV pages, on device and on host, hold which tokens.
//!
//! Owns: the bookkeeping of all shared pages and snapshots. It decides and never copies or
//! allocates: what it gives up comes back from the call, or later from
//! [`PrefixTree::take_garbage`]. One mutex, every call is one critical section, and no lock is
//! taken inside it; lock order is scheduler -> tree -> host pages. Design after the radix trees of
//! `SGLang` (sgl-project/sglang) with tokens, never hashes alone, deciding.
//!
//! Invariants (checked by [`PrefixTree::check`]):
//! - device residents (`Full`, `Backing`, `Loading`) form a connected prefix from the root, and so
//!   do host copies unless the policy is `WriteBack`: a match is device, then host, without a hole;
//! - every node but the root has device pages or a complete host copy;
//! - locks of a node are the leases and jobs at or below it; eviction takes unlocked nodes only;
//! - no two children of a node start with the same page; every page id is in one node only;
//! - sums, frontiers and queues equal their recount.

mod check;
mod copies;
mod dump;
mod evict;
mod index;
mod lookup;
#[cfg(all(test, loom))]
mod loom_tests;
mod node;
mod publish;
mod snapshot;
#[cfg(all(test, not(loom)))]
mod tests;
mod types;
mod window;

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::host::HostPage;
use crate::pages::PageEntry;
use crate::request::PriorityClass;
use crate::sync::Mutex;
use index::Books;

pub use dump::{NodeDump, TreeDump};
pub use node::NodeId;
pub use types::{
    Evicted, Inserted, LoadJob, Namespace, NodeState, StoreWant, TreeConfig, TreePage, TreeStats,
    WritePolicy, page_hash,
};

/// A hit, and a snapshot, ends where a prefill cut is invisible.
pub const SNAPSHOT_ALIGN: usize = crate::scheduler::CHUNK_ALIGN;
/// Largest page: in slot mode a page is a whole context.
const MAX_PAGE_SIZE: u32 = 1 << 24;

/// Thread-safe tree; a clone is another handle of the same one.
#[derive(Clone)]
pub struct PrefixTree {
    books: Arc<Mutex<Books>>,
}

/// A locked match: what it covers cannot be evicted. Dropping it unlocks; what only it held back
/// is then evictable, and LOW pages that nobody else reads are garbage.
///
/// The end of the path is fixed; the border between device and host moves with loads and
/// demotions.
pub struct Lease {
    tree: PrefixTree,
    id: u64,
}

impl PrefixTree {
    /// An empty tree. Fails with [`Error::Config`] for a page size that is no power of two in 1 to
    /// 2^24, and for `Selective` after 0 hits.
    pub fn new(config: TreeConfig) -> Result<Self> {
        let page_size = config.page_size;
        if !page_size.is_power_of_two() || page_size > MAX_PAGE_SIZE {
            let expected = format!("a power of two, 1 to {MAX_PAGE_SIZE}");
            return Err(Error::config("page_size", page_size, expected));
        }
        if config.policy == (WritePolicy::Selective { hits: 0 }) {
            return Err(Error::config("hits", 0, "at least 1 hit before a store"));
        }
        let books = Arc::new(Mutex::new(Books::new(config)));
        Ok(Self { books })
    }

    /// Number of the lease, or 0, which no lease has, for one of another tree.
    fn id_of(&self, lease: &Lease) -> u64 {
        if self.owns(lease) { lease.id } else { 0 }
    }

    /// Whether the lease is one of this tree. Calls with a lease of another tree find nothing and
    /// change nothing.
    pub fn owns(&self, lease: &Lease) -> bool {
        Arc::ptr_eq(&self.books, &lease.tree.books)
    }

    /// Tokens in a page.
    pub fn page_size(&self) -> usize {
        self.books.lock().page_size
    }

    /// Locks the longest usable match of a prompt.
    ///
    /// Its length is a multiple of A = max(page size, 64), at most `limit`, and leaves at least
    /// one token to compute. For hybrid models it is cut to the deepest snapshot, and is 0 without
    /// one. O(length of the match).
    pub fn match_prefix(
        &self,
        namespace: Namespace,
        tokens: &[u32],
        limit: usize,
        reader: PriorityClass,
    ) -> Lease {
        let id = self
            .books
            .lock()
            .match_prefix(namespace, tokens, limit, reader);
        let tree = self.clone();
        Lease { tree, id }
    }

    /// Locks the longest match of whole pages, whatever snapshots there are: for a caller that has
    /// the state itself, and for one that publishes.
    pub fn match_kv(&self, namespace: Namespace, tokens: &[u32], reader: PriorityClass) -> Lease {
        let id = self.books.lock().match_kv(namespace, tokens, reader);
        let tree = self.clone();
        Lease { tree, id }
    }

    /// Whether device pages will follow as garbage once they are stored, or can be evicted once
    /// copies end that alone hold them. O(1).
    pub fn pages_coming(&self) -> bool {
        let total = &self.books.lock().total;
        total.coming + total.copied > 0
    }

    /// Tokens (on device, on host) that `match_prefix` would find now. No lock, no tick, no split.
    pub fn peek(&self, namespace: Namespace, tokens: &[u32], limit: usize) -> (usize, usize) {
        self.books.lock().peek(namespace, tokens, limit)
    }

    /// Gives up the end of a lease, so that at most `len` tokens, cut as in `match_prefix`, are
    /// left: for a host part that is computed again.
    pub fn shorten(&self, lease: &mut Lease, len: usize) {
        let id = self.id_of(lease);
        self.books.lock().shorten(id, len);
    }

    /// Places of all pages of the locked path, root first; owned copies.
    pub fn pages(&self, lease: &Lease) -> Vec<TreePage> {
        let id = self.id_of(lease);
        self.books.lock().pages(id)
    }

    /// The node at the end of the path.
    pub fn end_node(&self, lease: &Lease) -> Option<NodeId> {
        let id = self.id_of(lease);
        self.books.lock().holds.get(&id).map(|hold| hold.end)
    }

    /// State of a node, or `None` once it is gone.
    pub fn node_state(&self, id: NodeId) -> Option<NodeState> {
        self.books.lock().nodes.get(id).map(|node| node.state)
    }

    /// Publishes pages that prefill computed after the end of the lease (`tokens` of
    /// `pages.len()` whole pages) and extends the lease over them.
    ///
    /// Device pages that the tree has win, and those given come back as duplicates. A `Host` or
    /// `Low` node takes the pages given; its LOW pages become garbage. Stops before a `Loading`
    /// node, and covers nothing if the end of the lease is not on device: see `shorten` and
    /// `extend_host`. A node counts for eviction as the highest class that published it.
    pub fn insert(
        &self,
        lease: &mut Lease,
        tokens: &[u32],
        pages: &[PageEntry],
        priority: PriorityClass,
    ) -> Inserted {
        let id = self.id_of(lease);
        self.books.lock().insert(id, tokens, pages, priority)
    }

    /// Publishes host pages of an acknowledged store: `tokens` is the whole prefix, `pages` its
    /// pages from `first_page` on. Returns the pages the tree did not take: it has them already,
    /// or the path before them is gone (then all).
    ///
    /// Fails with `InvalidRequest` if `tokens` are not exactly the pages before and those given.
    pub fn insert_host(
        &self,
        namespace: Namespace,
        tokens: &[u32],
        first_page: usize,
        pages: &[HostPage],
        priority: PriorityClass,
    ) -> Result<Vec<HostPage>> {
        self.books
            .lock()
            .insert_host(namespace, tokens, first_page, pages, priority)
    }

    /// Publishes host pages after the end of the lease and extends it: (pages covered, pages the
    /// tree did not take). Covers nothing if the end has no host copy (except under `WriteBack`).
    pub fn extend_host(
        &self,
        lease: &mut Lease,
        tokens: &[u32],
        pages: &[HostPage],
        priority: PriorityClass,
    ) -> (usize, Vec<HostPage>) {
        let id = self.id_of(lease);
        self.books.lock().extend_host(id, tokens, pages, priority)
    }

    /// Starts a load into the first `pages.len()` host pages after the device part; nodes are
    /// split as needed and locked until the end. With fixed slots there are no loads: a slot copies
    /// from the host pages that its lease locks. Pages beyond [`PrefixTree::loadable`] come back
    /// as `unused`.
    pub fn begin_load(&self, lease: &Lease, pages: &[PageEntry]) -> LoadJob {
        let id = self.id_of(lease);
        self.books.lock().begin_load(id, pages)
    }

    /// Pages after the device part that are on host and not being loaded.
    pub fn loadable(&self, lease: &Lease) -> usize {
        let id = self.id_of(lease);
        self.books.lock().loadable(id).0
    }

    /// Pages after the device part that a load, of this or another lease, fills now.
    pub fn joined(&self, lease: &Lease) -> usize {
        let id = self.id_of(lease);
        self.books.lock().loadable(id).1
    }

    /// Ends a load. If it failed the nodes are on host again and the device pages come back to be
    /// freed. An id that is not a running load is ignored.
    pub fn end_load(&self, id: u64, ok: bool) -> Vec<PageEntry> {
        self.books.lock().end_load(id, ok)
    }

    /// The next node to copy to host, at most `max_pages` of it, by policy and in order of
    /// arrival. It is locked until `begin_store` or `drop_store`.
    pub fn next_store(&self, max_pages: usize) -> Option<StoreWant> {
        self.books.lock().next_store(max_pages)
    }

    /// Asks for host copies of the whole path, whatever the policy.
    pub fn request_store(&self, lease: &Lease) {
        let id = self.id_of(lease);
        self.books.lock().request_store(id);
    }

    /// Starts a store into `host`, page for page. With fewer pages than wanted only the first are
    /// stored and the rest is asked for again; what is too many becomes garbage.
    #[expect(clippy::needless_pass_by_value, reason = "a want is used once")]
    pub fn begin_store(&self, want: StoreWant, host: Vec<HostPage>) -> u64 {
        self.books.lock().begin_store(&want, host)
    }

    /// Gives a store up because the host is full: counted, and not asked for again until the node
    /// is used. A node that device eviction waits for is removed, and its pages become garbage; if
    /// a copy of what is below it still runs it stays, and eviction waits for it no more.
    #[expect(clippy::needless_pass_by_value, reason = "a want is used once")]
    pub fn drop_store(&self, want: StoreWant) {
        self.books.lock().drop_store(&want);
    }

    /// Ends a store. If it failed the host pages come back to be freed. Nodes that device eviction
    /// waits for are demoted; their pages become garbage. An id that is not a running store is
    /// ignored.
    pub fn end_store(&self, id: u64, ok: bool) -> Vec<HostPage> {
        self.books.lock().end_store(id, ok)
    }

    /// Moves nodes of the path to host, deepest first, as long as they have a host copy and only
    /// LOW readers lock them. Returns their device pages.
    pub fn demote(&self, lease: &Lease) -> Vec<PageEntry> {
        let id = self.id_of(lease);
        self.books.lock().demote(id)
    }

    /// Pages of the path that are on host only and have no LOW pages.
    pub fn window_missing(&self, lease: &Lease) -> usize {
        let id = self.id_of(lease);
        self.books.lock().window_missing(id)
    }

    /// LOW pages for the host pages of the path, in path order, held as by `window_hold`. Returns
    /// those that found no place: all of them for a HIGH reader.
    pub fn give_window(&self, lease: &Lease, pages: &[PageEntry]) -> Vec<PageEntry> {
        let id = self.id_of(lease);
        self.books.lock().give_window(id, pages)
    }

    /// Holds the LOW nodes of the path until the lease ends or `window_release`; false for a HIGH
    /// reader. The LOW pages of a node become garbage when its last holder lets go.
    pub fn window_hold(&self, lease: &Lease) -> bool {
        let id = self.id_of(lease);
        self.books.lock().window_hold(id)
    }

    /// Lets go of the LOW nodes of the path; the lease stays, and its host pages stay locked.
    pub fn window_release(&self, lease: &Lease) {
        let id = self.id_of(lease);
        self.books.lock().window_release(id);
    }

    /// Gives up device pages: `n`, or as many as can be. `device.len() + coming` is at most `n`;
    /// `coming` are pages, of this call or an earlier one, that follow as garbage when their store
    /// ends. O(log nodes) a node.
    pub fn evict_device(&self, n: usize) -> Evicted {
        self.books.lock().evict_device(n)
    }

    /// Gives up host pages: `n`, or as many as can be. O(log nodes) a node.
    pub fn evict_host(&self, n: usize) -> Evicted {
        self.books.lock().evict_host(n)
    }

    /// Gives up the `n` least recently used snapshots, or as many as can be.
    pub fn evict_snapshot(&self, n: usize) -> Vec<u32> {
        self.books.lock().evict_snapshot(n)
    }

    /// Device pages of unlocked nodes, those that leave already included. O(1).
    pub fn evictable_device(&self) -> usize {
        self.books.lock().total.evictable_device
    }

    /// Host pages of unlocked nodes. O(1).
    pub fn evictable_host(&self) -> usize {
        self.books.lock().total.evictable_host
    }

    /// Snapshots that no lease resumes from. O(1).
    pub fn evictable_snapshots(&self) -> usize {
        self.books.lock().snapshot_lru.len()
    }

    /// Everything released by leases and jobs since the last call.
    pub fn take_garbage(&self) -> Evicted {
        std::mem::take(&mut self.books.lock().garbage)
    }

    /// Starts to fill snapshot slot `slot` with the state at `position`, a multiple of
    /// max(page size, 64) inside the path of the lease. Nothing is published before the end.
    ///
    /// Fails with `InvalidRequest` for another position, for one that has a snapshot or gets one,
    /// and for a tree without snapshots.
    pub fn begin_snapshot(&self, lease: &Lease, position: usize, slot: u32) -> Result<u64> {
        let id = self.id_of(lease);
        self.books.lock().begin_snapshot(id, position, slot)
    }

    /// Publishes a snapshot, or returns the slot of one that failed. An id that is not a running
    /// snapshot is ignored.
    pub fn end_snapshot(&self, id: u64, ok: bool) -> Option<u32> {
        self.books.lock().end_snapshot(id, ok)
    }

    /// Whether a snapshot is published at `position` of the path.
    pub fn has_snapshot(&self, lease: &Lease, position: usize) -> bool {
        let id = self.id_of(lease);
        self.books.lock().has_snapshot(id, position)
    }

    /// Counters since construction, and sizes of now.
    pub fn stats(&self) -> TreeStats {
        self.books.lock().stats()
    }

    /// The whole tree, in an order that depends on nothing but the calls so far.
    pub fn dump(&self) -> TreeDump {
        self.books.lock().dump()
    }

    /// A fixed 64-bit digest of [`PrefixTree::dump`], equal in every process.
    pub fn digest(&self) -> u64 {
        self.dump().digest()
    }

    /// A tree equal to one that was dumped while nothing was locked. Fails with [`Error::Config`]
    /// if the dump breaks an invariant, or has locks, jobs or LOW pages.
    pub fn restore(config: TreeConfig, dump: &TreeDump) -> Result<Self> {
        let tree = Self::new(config)?;
        let expected = |what: String| Error::config("dump", "invalid", what);
        tree.books.lock().restore(dump).map_err(expected)?;
        tree.check().map_err(expected)?;
        Ok(tree)
    }

    /// Recounts everything. The error says what does not agree. O(size of the tree).
    pub fn check(&self) -> std::result::Result<(), String> {
        self.books.lock().check()
    }

    /// Checks the next `n` nodes, round robin, each against its neighbours.
    pub fn check_some(&self, n: usize) -> std::result::Result<(), String> {
        self.books.lock().check_some(n)
    }

    /// Removes everything that is not locked.
    pub fn clear(&self) -> Evicted {
        self.books.lock().clear()
    }
}

impl Lease {
    /// Tokens on device, from the start.
    pub fn device_len(&self) -> usize {
        self.tree.books.lock().lengths(self.id).0
    }

    /// Tokens after these that are on host, LOW pages or being loaded.
    pub fn host_len(&self) -> usize {
        let (device, len) = self.tree.books.lock().lengths(self.id);
        len - device
    }

    /// Tokens of the whole path.
    pub fn len(&self) -> usize {
        self.tree.books.lock().lengths(self.id).1
    }

    /// Whether it covers no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// (position, slot) of the snapshot that the match resumes from; locked like the pages.
    pub fn snapshot(&self) -> Option<(usize, u32)> {
        let books = self.tree.books.lock();
        let node = &books.nodes[books.holds.get(&self.id)?.snapshot?];
        node.snapshot.map(|snapshot| (node.end, snapshot.slot))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.tree.books.lock().release(self.id);
    }
}
