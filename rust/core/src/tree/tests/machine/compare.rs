//! The tree, page by page, against the model.

use super::*;

impl Pair {
    /// The tree, page by page, is the model; T4 and T12 by counting.
    pub(super) fn compare(&self) {
        self.tree.check().unwrap();
        self.tree.check_some(3).unwrap();
        let dump = self.tree.dump();
        assert_eq!(dump.tick, self.model.tick);
        let mut count = 0;
        let mut path: Path = Vec::new();
        for node in &dump.nodes {
            let start = node.start / self.page_size;
            path.truncate(start + 1);
            if start == 0 {
                path = vec![u32::try_from(node.namespace.0).unwrap()];
            }
            let pages = node.tokens.len() / self.page_size;
            for page in 0..pages {
                path.push(node.tokens[page * self.page_size]);
                count += 1;
                let known = &self.model.pages[&path];
                assert_eq!(node.state, known.state, "{path:?}");
                assert_eq!(node.device.get(page).copied(), known.device, "{path:?}");
                assert_eq!(node.host.get(page).copied(), known.host, "{path:?}");
                let shown = (
                    node.tick,
                    node.hits,
                    node.leaving,
                    node.forced,
                    node.low_class,
                );
                let low = known.priority == Low;
                let expected = (known.tick, known.hits, known.leaving, known.forced, low);
                assert_eq!(shown, expected, "{path:?}");
                assert_eq!(node.locks, self.model.locks(&path), "{path:?}");
                let locks = self.model.snapshot_locks(&path);
                let snapshot = known.snapshot.map(|(slot, tick)| (slot, tick, locks));
                let shown = node.snapshot.filter(|_| page + 1 == pages);
                assert_eq!(shown, snapshot, "{path:?}");
            }
        }
        assert_eq!(count, self.model.pages.len());
        let stats = self.tree.stats();
        let evictable = (
            self.tree.evictable_device(),
            self.tree.evictable_host(),
            self.tree.evictable_snapshots(),
        );
        assert_eq!(evictable, self.model.evictable());
        assert_eq!(stats.coming_pages, self.model.coming());
        let coming = self.model.coming() + self.model.copied() > 0;
        assert_eq!(self.tree.pages_coming(), coming);
        for (id, lease) in &self.leases {
            self.compare_lease(*id, lease);
        }
        let used = self.model.pages.values();
        let device = used.clone().filter_map(|page| page.device).count();
        let free = self.device.len() + self.low.len();
        assert_eq!(free + device, 2 * DEVICE as usize, "T4: device pages");
        let host = used.filter(|page| page.host.is_some()).count();
        assert_eq!(self.host.len() + host, HOST as usize, "T12: host pages");
    }

    fn compare_lease(&self, id: u64, lease: &Lease) {
        let hold = &self.model.holds[&id];
        assert_eq!(lease.len(), (hold.path.len() - 1) * self.page_size, "T7");
        let pages: Vec<&super::model::Page> = steps(&hold.path)
            .map(|path| &self.model.pages[path])
            .collect();
        let on_device = |page: &&&super::model::Page| {
            matches!(page.state, NodeState::Full | NodeState::Backing)
        };
        let device = pages.iter().take_while(on_device).count() * self.page_size;
        assert_eq!(lease.device_len(), device, "T3");
        assert_eq!(lease.host_len(), lease.len() - device, "T3");
        let snapshot = hold.snapshot.as_ref().map(|path| {
            let (slot, _) = self.model.pages[path].snapshot.unwrap();
            ((path.len() - 1) * self.page_size, slot)
        });
        assert_eq!(lease.snapshot(), snapshot, "T10");
        let shown: Vec<TreePage> = pages
            .into_iter()
            .map(|page| TreePage {
                state: page.state,
                device: page.device,
                host: page.host.filter(|_| page.state != NodeState::Backing),
            })
            .collect();
        assert_eq!(self.tree.pages(lease), shown);
    }
}
