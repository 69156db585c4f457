//! Copies in flight: what they hold, and what becomes of it.

use super::*;

impl Model {
    /// Whether `pages`, handed out to be stored, may be.
    pub(in super::super) fn assert_storable(&self, pages: &[Path]) {
        for (index, path) in pages.iter().enumerate() {
            let page = &self.pages[path];
            assert_eq!(
                (page.state, page.host, page.job),
                (NodeState::Full, None, None)
            );
            let wanted = match self.config.policy {
                WritePolicy::WriteThrough => true,
                WritePolicy::Selective { hits } => page.hits >= hits,
                WritePolicy::WriteBack => page.leaving,
                WritePolicy::None => false,
            };
            assert!(wanted || page.forced, "{path:?} stored against the policy");
            let parent = &path[..path.len() - 1];
            if index > 0 {
                assert_eq!(parent, pages[index - 1], "a run down one path");
            } else if self.config.policy != WritePolicy::WriteBack {
                let parent = self.pages.get(parent);
                assert!(parent.is_none_or(Page::host_complete), "parent first");
            }
        }
    }

    pub(in super::super) fn begin_job(
        &mut self,
        id: u64,
        pages: Vec<Path>,
        end: Path,
        slot: Option<u32>,
    ) {
        for path in &pages {
            self.pages.get_mut(path).unwrap().job = Some(id);
        }
        self.jobs.insert(id, Job { end, pages, slot });
    }

    pub(in super::super) fn end_job(&mut self, id: u64) -> Job {
        let job = self.jobs.remove(&id).unwrap();
        for path in &job.pages {
            self.pages.get_mut(path).unwrap().job = None;
        }
        job
    }

    pub(in super::super) fn end_load(&mut self, id: u64, ok: bool) -> Vec<PageEntry> {
        let mut freed = Vec::new();
        for path in self.end_job(id).pages {
            let page = self.pages.get_mut(&path).unwrap();
            if ok {
                page.state = NodeState::Full;
            } else {
                page.state = NodeState::Host;
                freed.extend(page.device.take());
            }
        }
        freed
    }

    pub(in super::super) fn drop_store(&mut self, id: u64) {
        let job = self.end_job(id);
        for path in job.pages.iter().rev() {
            if self.locked(path) {
                self.keep(path);
            }
        }
        if let Some(at) = job.pages.iter().find(|path| self.pages[*path].leaving) {
            let mut garbage = std::mem::take(&mut self.garbage);
            self.remove(at, &mut garbage);
            self.garbage = garbage;
            self.settle(&at[..at.len() - 1]);
        }
    }

    pub(in super::super) fn end_store(&mut self, id: u64, ok: bool) -> Vec<HostPage> {
        let job = self.end_job(id);
        let mut freed = Vec::new();
        for path in &job.pages {
            let page = self.pages.get_mut(path).unwrap();
            page.state = NodeState::Full;
            if !ok {
                freed.extend(page.host.take());
                self.keep(path);
            }
        }
        self.settle(&job.end);
        freed
    }
}
