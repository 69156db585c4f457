//! The tree as its documentation tells it: a map from a prefix, page by page, to where its last
//! page is. Nodes, splits and indices do not exist here; everything is found by scanning.

mod evict;
mod jobs;

use std::collections::{BTreeMap, BTreeSet};

use super::*;

/// Pages from the root, each named by one number; the first element is the namespace.
pub(super) type Path = Vec<u32>;

#[derive(Clone, Debug)]
pub(super) struct Page {
    pub(super) state: NodeState,
    pub(super) device: Option<PageEntry>,
    pub(super) host: Option<HostPage>,
    /// The load or store that covers it.
    pub(super) job: Option<u64>,
    pub(super) priority: PriorityClass,
    pub(super) tick: u64,
    pub(super) hits: u32,
    pub(super) leaving: bool,
    pub(super) forced: bool,
    /// (slot, tick).
    pub(super) snapshot: Option<(u32, u64)>,
}

#[derive(Clone, Debug)]
pub(super) struct Hold {
    pub(super) path: Path,
    pub(super) reader: PriorityClass,
    pub(super) windows: bool,
    pub(super) snapshot: Option<Path>,
}

#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) end: Path,
    /// Pages of a load or store; none of a snapshot.
    pub(super) pages: Vec<Path>,
    pub(super) slot: Option<u32>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Given {
    pub(super) device: BTreeSet<u32>,
    pub(super) host: BTreeSet<u32>,
    pub(super) snapshots: BTreeSet<u32>,
    pub(super) coming: usize,
}

pub(super) struct Model {
    pub(super) config: TreeConfig,
    pub(super) pages: BTreeMap<Path, Page>,
    pub(super) tick: u64,
    pub(super) holds: BTreeMap<u64, Hold>,
    pub(super) jobs: BTreeMap<u64, Job>,
    pub(super) garbage: Given,
}

impl Given {
    pub(super) fn of(evicted: &Evicted) -> Self {
        Self {
            device: evicted.device.iter().map(|page| page.0).collect(),
            host: evicted.host.iter().map(|page| page.0).collect(),
            snapshots: evicted.snapshots.iter().copied().collect(),
            coming: evicted.coming,
        }
    }

    pub(super) fn assert_eq(&self, evicted: &Evicted) {
        let other = Self::of(evicted);
        assert_eq!(self.device, other.device, "device pages");
        assert_eq!(self.host, other.host, "host pages");
        assert_eq!(self.snapshots, other.snapshots, "snapshots");
        assert_eq!(self.coming, other.coming, "coming");
    }

    fn take(&mut self, page: &Page) {
        self.device.extend(page.device.map(|page| page.0));
        self.host.extend(page.host.map(|page| page.0));
        self.snapshots.extend(page.snapshot.map(|(slot, _)| slot));
    }
}

impl Page {
    fn resident(&self) -> bool {
        matches!(
            self.state,
            NodeState::Full | NodeState::Loading | NodeState::Backing
        )
    }

    fn readable(&self) -> bool {
        matches!(self.state, NodeState::Full | NodeState::Backing)
    }

    fn host_complete(&self) -> bool {
        self.host.is_some() && self.state != NodeState::Backing
    }
}

/// All paths from the first page down to `path`.
pub(super) fn steps(path: &[u32]) -> impl DoubleEndedIterator<Item = &[u32]> {
    (2..=path.len()).map(|len| &path[..len])
}

impl Model {
    pub(super) fn new(config: TreeConfig) -> Self {
        Self {
            config,
            pages: BTreeMap::new(),
            tick: 0,
            holds: BTreeMap::new(),
            jobs: BTreeMap::new(),
            garbage: Given::default(),
        }
    }

    /// Pages in the granularity of a match.
    pub(super) fn unit(&self) -> usize {
        (64 / self.config.page_size as usize).max(1)
    }

    /// [HIGH leases, LOW leases, jobs, windows] at or below a page.
    pub(super) fn locks(&self, path: &[u32]) -> [u32; 4] {
        let mut locks = [0; 4];
        for hold in self
            .holds
            .values()
            .filter(|hold| hold.path.starts_with(path))
        {
            locks[usize::from(hold.reader == Low)] += 1;
            locks[3] += u32::from(hold.windows);
        }
        let jobs = self.jobs.values().filter(|job| job.end.starts_with(path));
        locks[2] = u32::try_from(jobs.count()).unwrap();
        locks
    }

    pub(super) fn locked(&self, path: &[u32]) -> bool {
        self.locks(path)[..3].iter().any(|&count| count > 0)
    }

    pub(super) fn snapshot_locks(&self, path: &[u32]) -> u32 {
        let holds = self.holds.values();
        let using = holds.filter(|hold| hold.snapshot.as_deref() == Some(path));
        u32::try_from(using.count()).unwrap()
    }

    fn children<'a>(&'a self, path: &'a [u32]) -> impl Iterator<Item = &'a Page> {
        let below = self.pages.range(path.to_vec()..);
        let below = below.take_while(move |(p, _)| p.starts_with(path));
        below
            .filter(move |(p, _)| p.len() == path.len() + 1)
            .map(|(_, page)| page)
    }

    fn useful(&self, path: &[u32]) -> bool {
        let mut below = self
            .pages
            .range(path.to_vec()..)
            .take_while(|(p, _)| p.starts_with(path));
        !self.config.snapshots || below.any(|(_, page)| page.snapshot.is_some())
    }

    pub(super) fn hit(&self, path: &[u32], most: usize) -> (usize, Option<Path>) {
        let known = steps(path)
            .take_while(|p| self.pages.contains_key(*p))
            .count();
        let len = known.min(most) / self.unit() * self.unit();
        self.cut(path, len)
    }

    fn cut(&self, path: &[u32], len: usize) -> (usize, Option<Path>) {
        if !self.config.snapshots {
            return (len, None);
        }
        let mut at = steps(&path[..=len]).rev();
        let snapshot = at.find(|p| self.pages[*p].snapshot.is_some());
        (
            snapshot.map_or(0, |p| p.len() - 1),
            snapshot.map(<[u32]>::to_vec),
        )
    }

    pub(super) fn lookup(&mut self, id: u64, path: &[u32], most: usize, reader: PriorityClass) {
        self.tick += 1;
        let (len, snapshot) = self.hit(path, most);
        for at in steps(&path[..=len]) {
            let page = self.pages.get_mut(at).unwrap();
            page.tick = self.tick;
            page.hits += 1;
            page.leaving = false;
        }
        if let Some(at) = &snapshot {
            let page = self.pages.get_mut(at).unwrap();
            page.snapshot = page.snapshot.map(|(slot, _)| (slot, self.tick));
        }
        let path = path[..=len].to_vec();
        let windows = false;
        self.holds.insert(
            id,
            Hold {
                path,
                reader,
                windows,
                snapshot,
            },
        );
    }

    pub(super) fn release(&mut self, id: u64) {
        self.holds.remove(&id);
        self.drop_windows();
    }

    /// LOW pages that nobody reads become garbage.
    pub(super) fn drop_windows(&mut self) {
        let unread = |path: &Path| self.locks(path)[3] == 0;
        let low = self
            .pages
            .iter()
            .filter(|(_, page)| page.state == NodeState::Low);
        let gone: Vec<Path> = low.map(|(path, _)| path.clone()).filter(unread).collect();
        for path in gone {
            let page = self.pages.get_mut(&path).unwrap();
            page.state = NodeState::Host;
            self.garbage
                .device
                .extend(page.device.take().map(|page| page.0));
        }
    }

    pub(super) fn shorten(&mut self, id: u64, tokens: usize) {
        let hold = self.holds[&id].clone();
        let len = tokens / self.config.page_size as usize / self.unit() * self.unit();
        if hold.path.len() - 1 <= len {
            return;
        }
        let (len, snapshot) = self.cut(&hold.path, len);
        let path = hold.path[..=len].to_vec();
        self.holds.insert(
            id,
            Hold {
                path,
                snapshot,
                ..hold
            },
        );
        self.drop_windows();
    }

    /// (covered, duplicates).
    pub(super) fn insert(
        &mut self,
        id: u64,
        suffix: &[u32],
        given: &[PageEntry],
        priority: PriorityClass,
    ) -> Inserted {
        let mut path = self.holds[&id].path.clone();
        let mut inserted = Inserted::default();
        let end = self.pages.get(&path);
        if !self.config.device_tier || end.is_some_and(|page| !page.readable()) {
            return inserted;
        }
        self.tick += 1;
        for (index, (&next, &own)) in suffix.iter().zip(given).enumerate() {
            path.push(next);
            let tick = self.tick;
            let page = self.pages.entry(path.clone()).or_insert_with(|| Page {
                device: Some(own),
                ..Page::fresh(priority)
            });
            match page.state {
                NodeState::Loading => {
                    path.pop();
                    break;
                }
                NodeState::Full | NodeState::Backing => {
                    let tree = page.device.unwrap();
                    if tree != own {
                        inserted.duplicates.push((index, own, tree));
                    }
                }
                NodeState::Host | NodeState::Low => {
                    page.state = NodeState::Full;
                    let low = page.device.replace(own);
                    self.garbage.device.extend(low.map(|page| page.0));
                }
            }
            page.touch(tick, priority);
            page.leaving = false;
            inserted.covered += 1;
        }
        self.holds.get_mut(&id).unwrap().path = path;
        inserted
    }

    /// Publishes below `path`; returns (covered, unused).
    pub(super) fn publish_host(
        &mut self,
        path: &mut Path,
        suffix: &[u32],
        given: &[HostPage],
        priority: PriorityClass,
        leased: bool,
    ) -> (usize, Vec<HostPage>) {
        self.tick += 1;
        let (mut covered, mut unused) = (0, Vec::new());
        for (&next, &own) in suffix.iter().zip(given) {
            let prefix = self.config.policy != WritePolicy::WriteBack;
            let parent = self.pages.get(path.as_slice());
            let allowed = !prefix || parent.is_none_or(Page::host_complete);
            path.push(next);
            let tick = self.tick;
            if let Some(page) = self.pages.get_mut(path.as_slice()) {
                if allowed && page.host.is_none() && page.job.is_none() {
                    page.host = Some(own);
                } else {
                    unused.push(own);
                }
                page.touch(tick, priority);
                if leased {
                    page.leaving = false;
                } else {
                    self.keep(path);
                }
            } else if allowed {
                let page = Page {
                    state: NodeState::Host,
                    host: Some(own),
                    tick,
                    ..Page::fresh(priority)
                };
                self.pages.insert(path.clone(), page);
            } else {
                path.pop();
                break;
            }
            covered += 1;
        }
        unused.extend_from_slice(&given[covered..]);
        (covered, unused)
    }

    /// Pages of a lease after its device part that are in `state`.
    pub(super) fn run_of(&self, id: u64, state: NodeState) -> Vec<Path> {
        let path = &self.holds[&id].path;
        let rest = steps(path).skip_while(|p| self.pages[*p].readable());
        let run = rest.take_while(|p| self.pages[*p].state == state);
        run.map(<[u32]>::to_vec).collect()
    }

    pub(super) fn on_path(&self, id: u64, state: NodeState) -> Vec<Path> {
        let on = steps(&self.holds[&id].path).filter(|p| self.pages[*p].state == state);
        on.map(<[u32]>::to_vec).collect()
    }

    pub(super) fn demote(&mut self, id: u64) -> Vec<PageEntry> {
        let mut freed = Vec::new();
        for at in steps(&self.holds[&id].path.clone()).rev() {
            let page = &self.pages[at];
            if !page.resident() {
                continue;
            }
            let locks = self.locks(at);
            let movable = page.state == NodeState::Full
                && page.host.is_some()
                && locks[0] + locks[2] == 0
                && !self.children(at).any(Page::resident);
            if !movable {
                break;
            }
            freed.extend(self.demote_page(at));
        }
        freed
    }

    fn demote_page(&mut self, at: &[u32]) -> Option<PageEntry> {
        let page = self.pages.get_mut(at).unwrap();
        page.state = NodeState::Host;
        page.leaving = false;
        page.device.take()
    }

    fn remove(&mut self, at: &[u32], out: &mut Given) {
        let below = self
            .pages
            .range(at.to_vec()..)
            .map(|(path, _)| path.clone());
        let gone: Vec<Path> = below.take_while(|path| path.starts_with(at)).collect();
        for path in gone {
            out.take(&self.pages.remove(&path).unwrap());
        }
    }

    fn keep(&mut self, at: &[u32]) {
        for at in steps(at).rev() {
            let page = self.pages.get_mut(at).unwrap();
            if !page.leaving {
                break;
            }
            page.leaving = false;
        }
    }

    fn settle(&mut self, at: &[u32]) {
        for at in steps(at).rev() {
            let ready = self.pages.get(at).is_some_and(|page| {
                page.leaving
                    && page.state == NodeState::Full
                    && page.host.is_some()
                    && !self.locked(at)
                    && !self.children(at).any(Page::resident)
            });
            if !ready {
                break;
            }
            let page = self.demote_page(at);
            self.garbage.device.extend(page.map(|page| page.0));
        }
    }
}

impl Page {
    fn fresh(priority: PriorityClass) -> Self {
        Self {
            state: NodeState::Full,
            device: None,
            host: None,
            job: None,
            priority,
            tick: 0,
            hits: 0,
            leaving: false,
            forced: false,
            snapshot: None,
        }
    }

    fn touch(&mut self, tick: u64, priority: PriorityClass) {
        self.tick = tick;
        self.priority = self.priority.min(priority);
    }
}
