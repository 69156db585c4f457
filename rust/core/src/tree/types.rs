//! Plain types of the tree's interface.

use super::node::NodeId;
use crate::host::HostPage;
use crate::pages::PageEntry;
use crate::request::PriorityClass;

/// Model, KV dtype and adapter: pages of different namespaces never meet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Namespace(pub u64);

/// When a host copy is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WritePolicy {
    /// As soon as pages are published.
    #[default]
    WriteThrough,
    /// Once a look-up has hit them `hits` times.
    Selective {
        /// At least 1.
        hits: u32,
    },
    /// When device eviction wants the pages.
    WriteBack,
    /// Only where a LOW request asks.
    None,
}

/// Where the pages of a node are. The node owns them unless it says otherwise.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum NodeState {
    /// HIGH pages on device; a host copy that is complete, or none.
    Full,
    /// A complete host copy, and LOW pages held by the LOW leases that read through them.
    Low,
    /// A complete host copy only.
    Host,
    /// A complete host copy; device pages that belong to the load that fills them.
    Loading,
    /// HIGH pages on device; host pages that belong to the store that fills them.
    Backing,
}

/// Settings of a tree. Checked once, by [`PrefixTree::new`](super::PrefixTree::new).
#[derive(Clone, Debug)]
pub struct TreeConfig {
    /// Tokens in a page, a power of two.
    pub page_size: u32,
    /// Hybrid model: a match must end at a snapshot of linear-attention state.
    pub snapshots: bool,
    /// False for fixed slots: nodes are on host only.
    pub device_tier: bool,
    /// When host copies are made.
    pub policy: WritePolicy,
    /// Hash of a page of tokens, [`page_hash`] but for tests. It finds candidates; tokens decide.
    pub hash: fn(&[u32]) -> u128,
}

impl Default for TreeConfig {
    fn default() -> Self {
        Self {
            page_size: 64,
            snapshots: false,
            device_tier: true,
            policy: WritePolicy::WriteThrough,
            hash: page_hash,
        }
    }
}

/// Multiplier of [`page_hash`]: the golden ratio, odd.
const HASH_FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
const HASH_SEEDS: [u64; 4] = [
    0x6865_6164_7261_6365,
    0x7072_6566_6978_7472,
    0x6565_7061_6765_6861,
    0x7368_7665_7273_6931,
];

/// Fixed-seed hash of tokens: the same in every process. Four lanes, so that the multiplications
/// overlap.
pub fn page_hash(tokens: &[u32]) -> u128 {
    let mix = |lane: u64, word: u64| (lane ^ word).wrapping_mul(HASH_FACTOR).rotate_left(29);
    let mut lanes = HASH_SEEDS;
    let chunks = tokens.chunks_exact(8);
    for (index, &token) in chunks.remainder().iter().enumerate() {
        lanes[index % 4] = mix(lanes[index % 4], u64::from(token));
    }
    for chunk in chunks {
        for (lane, pair) in lanes.iter_mut().zip(chunk.chunks_exact(2)) {
            *lane = mix(*lane, u64::from(pair[0]) << 32 | u64::from(pair[1]));
        }
    }
    let fold = |a, b| mix(mix(mix(a, b), b >> 32), a);
    let high = fold(fold(lanes[0], lanes[1]), fold(lanes[2], lanes[3]));
    let low = fold(fold(lanes[2], lanes[0]), fold(lanes[1], lanes[3]));
    u128::from(high) << 64 | u128::from(low)
}

/// Place of one page of tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TreePage {
    /// State of its node.
    pub state: NodeState,
    /// Entry of the block table; the page is being filled while `Loading`.
    pub device: Option<PageEntry>,
    /// Complete host copy.
    pub host: Option<HostPage>,
}

/// What `insert` did.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Inserted {
    /// Pages from the start of the call that the tree now has on device and the lease covers.
    pub covered: usize,
    /// (index in the call, page given, page of the tree): the given one stays the caller's.
    pub duplicates: Vec<(usize, PageEntry, PageEntry)>,
}

/// What the tree gave up; the caller frees it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Evicted {
    /// Device pages.
    pub device: Vec<PageEntry>,
    /// Host pages.
    pub host: Vec<HostPage>,
    /// Snapshot slots.
    pub snapshots: Vec<u32>,
    /// Device pages that follow as garbage once they are stored.
    pub coming: usize,
}

/// A load to carry out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoadJob {
    /// For `end_load`; 0 if there is nothing to load.
    pub id: u64,
    /// From host page to device page, in path order.
    pub copies: Vec<(HostPage, PageEntry)>,
    /// Pages given for which there was nothing to load.
    pub unused: Vec<PageEntry>,
}

/// A node to be copied to host. It goes back by `begin_store` or `drop_store`; until then it is
/// locked.
#[derive(PartialEq, Eq, Debug)]
pub struct StoreWant {
    pub(super) job: u64,
    /// The node.
    pub node: NodeId,
    /// Its device pages, in path order.
    pub pages: Vec<PageEntry>,
    /// Its eviction class.
    pub priority: PriorityClass,
    /// Whether device eviction waits for its pages.
    pub leaving: bool,
}

/// Declares the counters once, as fields and as rows for users.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident: $unit:ty,)*) => {
        /// Counters since construction, then sizes of now.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[expect(missing_docs, reason = "the names say it: what is counted, and in which unit")]
        pub struct TreeStats {
            $($(#[$doc])* pub $name: $unit,)*
        }

        impl TreeStats {
            /// Every counter with its name.
            pub fn rows(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name as u64),)*]
            }
        }
    };
}

counters! {
    lookups: u64,
    lookup_tokens: u64,
    hit_device_tokens: u64,
    hit_host_tokens: u64,
    /// KV that a hybrid model could not use for want of a snapshot.
    lost_no_snapshot_tokens: u64,
    inserted_pages: u64,
    inserted_host_pages: u64,
    duplicate_pages: u64,
    demoted_pages: u64,
    /// Host copies dropped of pages that stay on device.
    reclaimed_host_pages: u64,
    /// Pages dropped whose only copy was on host.
    evicted_host_pages: u64,
    /// Pages of removed nodes, whatever the reason.
    removed_pages: u64,
    splits: u64,
    loads: u64,
    loaded_pages: u64,
    load_failed_pages: u64,
    stores: u64,
    stored_pages: u64,
    store_failed_pages: u64,
    /// Tokens not stored because the host was full.
    host_full_tokens: u64,
    snapshots_taken: u64,
    snapshots_failed: u64,
    evicted_snapshots: u64,
    /// Snapshots asked of `evict_snapshot` that it could not give.
    snapshots_short: u64,
    nodes: usize,
    leases: usize,
    jobs: usize,
    queued_stores: usize,
    full_pages: usize,
    low_pages: usize,
    host_only_pages: usize,
    loading_pages: usize,
    backing_pages: usize,
    /// Complete host copies.
    host_pages: usize,
    host_pending_pages: usize,
    evictable_device: usize,
    evictable_host: usize,
    coming_pages: usize,
    snapshots: usize,
    evictable_snapshots: usize,
}
