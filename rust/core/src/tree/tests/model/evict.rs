//! Which pages may go, and in which order.

use super::*;

impl Model {
    pub(in super::super) fn coming(&self) -> usize {
        self.pages.values().filter(|page| page.leaving).count()
    }

    /// Pages that only copies hold.
    pub(in super::super) fn copied(&self) -> usize {
        let held = |path: &Path| {
            let [high, low, jobs, _] = self.locks(path);
            high + low == 0 && jobs > 0
        };
        let pages = self.pages.iter();
        pages
            .filter(|(path, page)| page.resident() && held(path))
            .count()
    }

    /// One page after the other, by (useful, class, tick).
    pub(in super::super) fn evict_device(&mut self, n: usize) -> Given {
        let mut out = Given {
            coming: n.min(self.coming()),
            ..Given::default()
        };
        for _ in out.coming..n {
            let frontier = self.pages.iter().filter(|(path, page)| {
                page.state == NodeState::Full
                    && !page.leaving
                    && !self.locked(path)
                    && !self
                        .children(path)
                        .any(|page| page.resident() && !page.leaving)
            });
            let order =
                frontier.map(|(p, page)| (self.useful(p), page.priority == High, page.tick, p));
            let Some((.., at)) = order.min() else {
                break;
            };
            let at = at.clone();
            let page = &self.pages[&at];
            if page.host.is_none() && self.config.policy != WritePolicy::WriteBack {
                self.remove(&at, &mut out);
            } else if page.host.is_some() && !self.children(&at).any(Page::resident) {
                out.device.extend(self.demote_page(&at).map(|page| page.0));
            } else {
                self.pages.get_mut(&at).unwrap().leaving = true;
                out.coming += 1;
            }
        }
        out
    }

    /// Where host copies have holes (`WriteBack`), two pages of one path may have equal keys; node
    /// ids, which do not exist here, decide between them, so `given` may say which it was.
    pub(in super::super) fn evict_host(&mut self, n: usize, given: &Evicted) -> Given {
        let given = Given::of(given);
        let mut out = Given::default();
        for _ in 0..n {
            let frontier = self.pages.iter().filter(|(path, page)| {
                matches!(page.state, NodeState::Full | NodeState::Host)
                    && page.host.is_some()
                    && !self.locked(path)
                    && !self.children(path).any(|page| page.host.is_some())
            });
            let order = frontier.map(|(path, page)| {
                let only = page.state == NodeState::Host;
                let class = page.priority == High;
                let other = page.host.is_some_and(|page| !given.host.contains(&page.0));
                (self.useful(path), only, class, page.tick, other, path)
            });
            let Some((_, only, .., at)) = order.min() else {
                break;
            };
            let at = at.clone();
            if only {
                self.remove(&at, &mut out);
            } else {
                let host = self.pages.get_mut(&at).unwrap().host.take();
                out.host.extend(host.map(|page| page.0));
                self.keep(&at);
            }
        }
        out
    }

    pub(in super::super) fn evict_snapshot(&mut self, n: usize) -> Vec<u32> {
        let mut slots = Vec::new();
        for _ in 0..n {
            let free = self
                .pages
                .iter()
                .filter(|(path, _)| self.snapshot_locks(path) == 0);
            let order = free.filter_map(|(path, page)| Some((page.snapshot?.1, path)));
            let Some((_, at)) = order.min() else {
                break;
            };
            let at = at.clone();
            slots.extend(
                self.pages
                    .get_mut(&at)
                    .unwrap()
                    .snapshot
                    .take()
                    .map(|s| s.0),
            );
        }
        slots
    }

    pub(in super::super) fn clear(&mut self) -> Given {
        let mut out = Given::default();
        let tops: Vec<Path> = self
            .pages
            .keys()
            .filter(|p| !self.locked(p))
            .cloned()
            .collect();
        for path in tops {
            self.remove(&path, &mut out);
        }
        out
    }

    /// Pages that may be evicted: (device, host, snapshots).
    pub(in super::super) fn evictable(&self) -> (usize, usize, usize) {
        let free = || self.pages.iter().filter(|(path, _)| !self.locked(path));
        let device = free().filter(|(_, page)| page.state == NodeState::Full);
        let host = free().filter(|(_, page)| {
            page.host.is_some() && matches!(page.state, NodeState::Full | NodeState::Host)
        });
        let snapshots = self
            .pages
            .iter()
            .filter(|(path, page)| page.snapshot.is_some() && self.snapshot_locks(path) == 0);
        (device.count(), host.count(), snapshots.count())
    }
}
