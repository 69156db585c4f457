//! Loads, stores and snapshots: begun, and ended well or not.

use super::*;

impl Pair {
    pub(super) fn load(&mut self, [lease, n, _]: [u32; 3]) {
        let Some(id) = self.lease(lease) else {
            return;
        };
        let mut run = self.model.run_of(id, NodeState::Host);
        run.retain(|_| self.model.config.device_tier);
        let pages = device(draw(&self.device, n as usize % 5));
        let lease = &self.leases[&id];
        assert_eq!(self.tree.loadable(lease), run.len());
        assert_eq!(
            self.tree.joined(lease),
            self.model.run_of(id, NodeState::Loading).len()
        );
        let job = self.tree.begin_load(lease, &pages);
        let run: Vec<Path> = run.into_iter().take(pages.len()).collect();
        let hosts = run.iter().map(|path| self.model.pages[path].host.unwrap());
        let copies: Vec<_> = hosts.zip(pages.iter().copied()).collect();
        assert_eq!(job.copies, copies);
        assert_eq!(job.unused, pages[copies.len()..]);
        let Some(end) = run.last().cloned() else {
            assert_eq!(job.id, 0);
            return;
        };
        for (path, (_, page)) in run.iter().zip(copies) {
            let found = self.model.pages.get_mut(path).unwrap();
            found.state = NodeState::Loading;
            found.device = Some(page);
            self.device.remove(&page.0);
        }
        self.model.begin_job(job.id, run, end, None);
        self.loads.insert(job.id);
    }

    pub(super) fn end_load(&mut self, [by, ok, _]: [u32; 3]) {
        if let Some(id) = pick(self.loads.iter().copied(), by) {
            self.loads.remove(&id);
            let expected = self.model.end_load(id, ok % 3 > 0);
            assert_eq!(self.tree.end_load(id, ok % 3 > 0), expected);
            self.free_device(expected);
        }
        assert_eq!(self.tree.end_load(u64::MAX, true), []);
    }

    pub(super) fn want(&mut self, [most, ..]: [u32; 3]) {
        let Some(want) = self.tree.next_store(most as usize % 5) else {
            return;
        };
        assert!(want.pages.len() <= most as usize % 5);
        let place = |page: &PageEntry| {
            let mut all = self.model.pages.iter();
            let found = all.find(|(_, known)| known.device == Some(*page));
            found.map(|(path, _)| path.clone()).unwrap()
        };
        let paths: Vec<Path> = want.pages.iter().map(place).collect();
        self.model.assert_storable(&paths);
        let end = paths.last().cloned().unwrap();
        self.model.begin_job(want.job, paths, end, None);
        self.wants.insert(want.job, want);
    }

    pub(super) fn store(&mut self, [by, n, _]: [u32; 3]) {
        let Some(id) = pick(self.wants.keys().copied(), by) else {
            return self.want([by, n, 0]);
        };
        let want = self.wants.remove(&id).unwrap();
        if n % 5 == 0 || self.host.is_empty() {
            self.model.drop_store(id);
            self.tree.drop_store(want);
            return;
        }
        let count = if n % 5 == 1 { n as usize / 5 % 4 } else { ALL };
        let pages = host(draw(&self.host, want.pages.len().min(count)));
        let wanted = self.model.end_job(id).pages;
        let job = self.tree.begin_store(want, pages.clone());
        let stored: Vec<Path> = wanted.into_iter().take(pages.len()).collect();
        for (path, page) in stored.iter().zip(&pages) {
            let found = self.model.pages.get_mut(path).unwrap();
            found.state = NodeState::Backing;
            found.host = Some(*page);
            self.host.remove(&page.0);
        }
        if let Some(end) = stored.last().cloned() {
            self.model.begin_job(job, stored, end, None);
            self.stores.insert(job);
        }
    }

    pub(super) fn end_store(&mut self, [by, ok, _]: [u32; 3]) {
        if let Some(id) = pick(self.stores.iter().copied(), by) {
            self.stores.remove(&id);
            let expected = self.model.end_store(id, ok % 4 > 0);
            assert_eq!(self.tree.end_store(id, ok % 4 > 0), expected);
            self.free_host(expected);
        }
    }

    pub(super) fn begin_snapshot(&mut self, [lease, position, _]: [u32; 3]) {
        let (Some(id), Some(&slot)) = (self.lease(lease), self.slots.first()) else {
            return;
        };
        let position = position as usize % 20 * 32;
        let align = self.page_size.max(64);
        let path = &self.model.holds[&id].path;
        let fits = position > 0
            && position.is_multiple_of(align)
            && position <= (path.len() - 1) * self.page_size
            && self.model.config.snapshots;
        let at: Option<Path> = fits.then(|| path[..=position / self.page_size].to_vec());
        let free = at.filter(|at| {
            let taken = |job: &super::model::Job| job.slot.is_some() && job.end == *at;
            self.model.pages[at].snapshot.is_none() && !self.model.jobs.values().any(taken)
        });
        let begun = self.tree.begin_snapshot(&self.leases[&id], position, slot);
        assert_eq!(begun.is_ok(), free.is_some(), "at {position}");
        if let (Ok(job), Some(at)) = (begun, free) {
            self.slots.remove(&slot);
            self.model.begin_job(job, Vec::new(), at, Some(slot));
            self.snapshot_jobs.insert(job);
        }
    }

    pub(super) fn end_snapshot(&mut self, [by, ok, _]: [u32; 3]) {
        let Some(id) = pick(self.snapshot_jobs.iter().copied(), by) else {
            return;
        };
        self.snapshot_jobs.remove(&id);
        let job = self.model.end_job(id);
        let slot = job.slot.unwrap();
        if ok % 4 > 0 {
            assert_eq!(self.tree.end_snapshot(id, true), None);
            self.model.tick += 1;
            let page = self.model.pages.get_mut(&job.end).unwrap();
            page.snapshot = Some((slot, self.model.tick));
        } else {
            assert_eq!(self.tree.end_snapshot(id, false), Some(slot));
            self.slots.insert(slot);
        }
    }
}
