//! A link of limited bandwidth, in the time it would take.

use std::time::Duration;

/// Bytes reserved at once: copies of two streams share the link in turns of this size.
pub(super) const CHUNK: u64 = 1 << 20;

/// One direction of the link.
pub(super) struct Link {
    bandwidth: Option<u64>,
    busy_until_ns: u64,
}

impl Link {
    pub(super) fn new(bandwidth: Option<u64>) -> Self {
        Self {
            bandwidth,
            busy_until_ns: 0,
        }
    }

    pub(super) fn is_capped(&self) -> bool {
        self.bandwidth.is_some()
    }

    /// When `bytes` bytes that are ready at `ready_ns` have passed the link.
    pub(super) fn reserve(&mut self, ready_ns: u64, bytes: u64) -> u64 {
        let Some(bandwidth) = self.bandwidth else {
            return ready_ns;
        };
        let ns = u128::from(bytes) * Duration::from_secs(1).as_nanos() / u128::from(bandwidth);
        let ns = u64::try_from(ns).unwrap_or(u64::MAX);
        self.busy_until_ns = self.busy_until_ns.max(ready_ns).saturating_add(ns);
        self.busy_until_ns
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn copies_share_the_link_back_to_back() {
        let mut link = Link::new(Some(1_000_000_000));
        assert_eq!(link.reserve(100, 50), 150);
        assert_eq!(link.reserve(120, 10), 160); // was ready while the link was busy
        assert_eq!(link.reserve(200, 1), 201); // idle meanwhile
        assert_eq!(Link::new(None).reserve(7, 1 << 40), 7);
    }
}
