//! `HostPages`, `PrefixTree`, `Lease` and `StoreWant` for Python.

use headrace_core as core;
use headrace_core::tree::{Evicted, Namespace, NodeState, StoreWant as Want, WritePolicy};
use headrace_core::{HostPage, PageEntry, TreeConfig};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::convert;
use crate::door::{Door, Home};
use crate::error::{broken, invalid, released, to_py};

type Page = (&'static str, Option<u32>, Option<u32>);
type Duplicate = (usize, u32, u32);

fn host_pages(ids: Vec<u32>) -> Vec<HostPage> {
    ids.into_iter().map(HostPage).collect()
}

fn host_ids(pages: Vec<HostPage>) -> Vec<u32> {
    pages.into_iter().map(|page| page.0).collect()
}

fn device_ids(pages: Vec<PageEntry>) -> Vec<u32> {
    pages.into_iter().map(|page| page.0).collect()
}

/// Block-table entries, all of one class.
fn entries(py: Python<'_>, ids: Vec<u32>, low: bool) -> PyResult<Vec<PageEntry>> {
    let pages: Vec<PageEntry> = ids.into_iter().map(PageEntry).collect();
    match pages.iter().find(|page| page.is_low() != low) {
        None => Ok(pages),
        Some(wrong) => {
            let class = if low { "LOW" } else { "HIGH" };
            let expected = format!("block-table entries of {class} pages (bit 31 is LOW)");
            Err(invalid(py, "pages", wrong.0.to_string(), &expected))
        }
    }
}

fn state_name(state: NodeState) -> &'static str {
    match state {
        NodeState::Full => "full",
        NodeState::Low => "low",
        NodeState::Host => "host",
        NodeState::Loading => "loading",
        NodeState::Backing => "backing",
    }
}

fn policy(py: Python<'_>, name: &str, hits: u32) -> PyResult<WritePolicy> {
    match name {
        "write_through" => Ok(WritePolicy::WriteThrough),
        "write_through_selective" => Ok(WritePolicy::Selective { hits }),
        "write_back" => Ok(WritePolicy::WriteBack),
        "none" => Ok(WritePolicy::None),
        _ => {
            let expected = "'write_through', 'write_through_selective', 'write_back' or 'none'";
            let error = core::Error::Config {
                field: "policy",
                value: name.to_owned(),
                expected: expected.to_owned(),
            };
            Err(to_py(py, &error))
        }
    }
}

fn given_up(py: Python<'_>, evicted: Evicted) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("device", device_ids(evicted.device))?;
    dict.set_item("host", host_ids(evicted.host))?;
    dict.set_item("snapshots", evicted.snapshots)?;
    dict.set_item("coming", evicted.coming)?;
    Ok(dict)
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct HostPages {
    inner: core::HostPages,
    home: Home,
}

#[pymethods]
impl HostPages {
    #[new]
    fn new(py: Python<'_>, total: u32) -> PyResult<Self> {
        let home = Home::here();
        let inner = py.enter(home, || core::HostPages::new(total))?;
        Ok(Self { inner, home })
    }

    fn alloc(&self, py: Python<'_>, n: usize) -> PyResult<Option<Vec<u32>>> {
        py.enter(self.home, || Ok(self.inner.alloc(n).map(host_ids)))
    }

    fn free(&self, py: Python<'_>, pages: Vec<u32>) -> PyResult<()> {
        py.enter(self.home, || self.inner.free(&host_pages(pages)))
    }

    fn free_count(&self, py: Python<'_>) -> PyResult<usize> {
        py.enter(self.home, || Ok(self.inner.free_count()))
    }

    fn total(&self, py: Python<'_>) -> PyResult<usize> {
        py.enter(self.home, || Ok(self.inner.total()))
    }

    fn dump(&self, py: Python<'_>) -> PyResult<Vec<(u32, u32)>> {
        py.enter(self.home, || Ok(self.inner.dump()))
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let checked = py.enter(self.home, || Ok(self.inner.check()))?;
        checked.map_err(|what| broken(py, &what))
    }
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct Lease {
    /// Empty once released.
    inner: Mutex<Option<core::Lease>>,
    home: Home,
}

impl Lease {
    fn read<T: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&core::Lease) -> T + Send,
    ) -> PyResult<T> {
        let value = py.enter(self.home, || Ok(self.inner.lock().as_ref().map(f)))?;
        value.ok_or_else(|| released(py, "lease"))
    }
}

#[pymethods]
impl Lease {
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let lease = py.enter(self.home, || Ok(self.inner.lock().take().map(drop)))?;
        lease.ok_or_else(|| released(py, "lease"))
    }

    fn device_len(&self, py: Python<'_>) -> PyResult<usize> {
        self.read(py, core::Lease::device_len)
    }

    fn host_len(&self, py: Python<'_>) -> PyResult<usize> {
        self.read(py, core::Lease::host_len)
    }

    fn snapshot(&self, py: Python<'_>) -> PyResult<Option<(usize, u32)>> {
        self.read(py, core::Lease::snapshot)
    }
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct StoreWant {
    /// Empty once used.
    inner: Mutex<Option<Want>>,
    #[pyo3(get)]
    pages: Vec<u32>,
}

impl StoreWant {
    fn take(&self, py: Python<'_>) -> PyResult<Want> {
        let want = self.inner.lock().take();
        want.ok_or_else(|| released(py, "store"))
    }
}

enum Access<T> {
    Done(T),
    Released,
    Foreign,
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct PrefixTree {
    inner: core::PrefixTree,
    home: Home,
}

impl PrefixTree {
    /// Runs `f` with a lease that is live and of this tree.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        lease: &Lease,
        f: impl FnOnce(&core::PrefixTree, &mut core::Lease) -> core::Result<T> + Send,
    ) -> PyResult<T> {
        let access = py.enter(self.home, || match lease.inner.lock().as_mut() {
            None => Ok(Access::Released),
            Some(lease) if !self.inner.owns(lease) => Ok(Access::Foreign),
            Some(lease) => f(&self.inner, lease).map(Access::Done),
        })?;
        match access {
            Access::Done(value) => Ok(value),
            Access::Released => Err(released(py, "lease")),
            Access::Foreign => {
                let value = "a lease of another tree".to_owned();
                Err(invalid(py, "lease", value, "a lease of this tree"))
            }
        }
    }

    fn run<T: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&core::PrefixTree) -> T + Send,
    ) -> PyResult<T> {
        py.enter(self.home, || Ok(f(&self.inner)))
    }
}

#[pymethods]
impl PrefixTree {
    #[new]
    #[pyo3(signature = (page_size=64, *, snapshots=false, device_tier=true, policy="write_through",
                        hits=2, colliding_hash=false))]
    fn new(
        py: Python<'_>,
        page_size: u32,
        snapshots: bool,
        device_tier: bool,
        policy: &str,
        hits: u32,
        colliding_hash: bool,
    ) -> PyResult<Self> {
        let home = Home::here();
        let hash: fn(&[u32]) -> u128 = if colliding_hash {
            |_| 0
        } else {
            core::tree::page_hash
        };
        let config = TreeConfig {
            page_size,
            snapshots,
            device_tier,
            policy: self::policy(py, policy, hits)?,
            hash,
        };
        let inner = py.enter(home, || core::PrefixTree::new(config))?;
        Ok(Self { inner, home })
    }

    #[pyo3(signature = (namespace, tokens, limit=None, reader="high"))]
    fn match_prefix(
        &self,
        namespace: u64,
        tokens: &Bound<'_, PyAny>,
        limit: Option<usize>,
        reader: &str,
    ) -> PyResult<Lease> {
        let py = tokens.py();
        let tokens = convert::tokens("tokens", tokens)?;
        let reader = convert::class(py, reader)?;
        let limit = limit.unwrap_or(usize::MAX);
        let find = |tree: &core::PrefixTree| {
            tree.match_prefix(Namespace(namespace), &tokens, limit, reader)
        };
        let inner = Mutex::new(Some(self.run(py, find)?));
        Ok(Lease {
            inner,
            home: self.home,
        })
    }

    #[pyo3(signature = (namespace, tokens, limit=None))]
    fn peek(
        &self,
        namespace: u64,
        tokens: &Bound<'_, PyAny>,
        limit: Option<usize>,
    ) -> PyResult<(usize, usize)> {
        let py = tokens.py();
        let tokens = convert::tokens("tokens", tokens)?;
        let limit = limit.unwrap_or(usize::MAX);
        self.run(py, |tree| tree.peek(Namespace(namespace), &tokens, limit))
    }

    fn shorten(&self, py: Python<'_>, lease: &Lease, len: usize) -> PyResult<()> {
        self.with(py, lease, |tree, lease| {
            tree.shorten(lease, len);
            Ok(())
        })
    }

    fn pages(&self, py: Python<'_>, lease: &Lease) -> PyResult<Vec<Page>> {
        let pages = self.with(py, lease, |tree, lease| Ok(tree.pages(lease)))?;
        let shown = pages.into_iter().map(|page| {
            let device = page.device.map(|page| page.0);
            (state_name(page.state), device, page.host.map(|page| page.0))
        });
        Ok(shown.collect())
    }

    #[pyo3(signature = (lease, tokens, pages, priority="high"))]
    fn insert(
        &self,
        lease: &Lease,
        tokens: &Bound<'_, PyAny>,
        pages: Vec<u32>,
        priority: &str,
    ) -> PyResult<(usize, Vec<Duplicate>)> {
        let py = tokens.py();
        let tokens = convert::tokens("tokens", tokens)?;
        let pages = entries(py, pages, false)?;
        let class = convert::class(py, priority)?;
        let insert = |tree: &core::PrefixTree, lease: &mut core::Lease| {
            Ok(tree.insert(lease, &tokens, &pages, class))
        };
        let inserted = self.with(py, lease, insert)?;
        let duplicates = inserted.duplicates.into_iter();
        let duplicates = duplicates.map(|(index, given, own)| (index, given.0, own.0));
        Ok((inserted.covered, duplicates.collect()))
    }

    #[pyo3(signature = (namespace, tokens, first_page, pages, priority="high"))]
    fn insert_host(
        &self,
        namespace: u64,
        tokens: &Bound<'_, PyAny>,
        first_page: usize,
        pages: Vec<u32>,
        priority: &str,
    ) -> PyResult<Vec<u32>> {
        let py = tokens.py();
        let tokens = convert::tokens("tokens", tokens)?;
        let class = convert::class(py, priority)?;
        let pages = host_pages(pages);
        let insert = || {
            let namespace = Namespace(namespace);
            self.inner
                .insert_host(namespace, &tokens, first_page, &pages, class)
        };
        py.enter(self.home, insert).map(host_ids)
    }

    #[pyo3(signature = (lease, tokens, pages, priority="high"))]
    fn extend_host(
        &self,
        lease: &Lease,
        tokens: &Bound<'_, PyAny>,
        pages: Vec<u32>,
        priority: &str,
    ) -> PyResult<(usize, Vec<u32>)> {
        let py = tokens.py();
        let tokens = convert::tokens("tokens", tokens)?;
        let class = convert::class(py, priority)?;
        let pages = host_pages(pages);
        let extend = |tree: &core::PrefixTree, lease: &mut core::Lease| {
            Ok(tree.extend_host(lease, &tokens, &pages, class))
        };
        let (covered, unused) = self.with(py, lease, extend)?;
        Ok((covered, host_ids(unused)))
    }

    #[expect(
        clippy::type_complexity,
        reason = "(id, copies, unused), named in the stub"
    )]
    fn begin_load(
        &self,
        py: Python<'_>,
        lease: &Lease,
        pages: Vec<u32>,
    ) -> PyResult<(u64, Vec<(u32, u32)>, Vec<u32>)> {
        let pages = entries(py, pages, false)?;
        let job = self.with(py, lease, |tree, lease| Ok(tree.begin_load(lease, &pages)))?;
        let copies = job.copies.into_iter();
        let copies = copies.map(|(host, device)| (host.0, device.0)).collect();
        Ok((job.id, copies, device_ids(job.unused)))
    }

    fn loadable(&self, py: Python<'_>, lease: &Lease) -> PyResult<usize> {
        self.with(py, lease, |tree, lease| Ok(tree.loadable(lease)))
    }

    fn joined(&self, py: Python<'_>, lease: &Lease) -> PyResult<usize> {
        self.with(py, lease, |tree, lease| Ok(tree.joined(lease)))
    }

    fn end_load(&self, py: Python<'_>, id: u64, ok: bool) -> PyResult<Vec<u32>> {
        self.run(py, |tree| device_ids(tree.end_load(id, ok)))
    }

    fn request_store(&self, py: Python<'_>, lease: &Lease) -> PyResult<()> {
        self.with(py, lease, |tree, lease| {
            tree.request_store(lease);
            Ok(())
        })
    }

    fn next_store(&self, py: Python<'_>, max_pages: usize) -> PyResult<Option<StoreWant>> {
        let want = self.run(py, |tree| tree.next_store(max_pages))?;
        Ok(want.map(|want| StoreWant {
            pages: want.pages.iter().map(|page| page.0).collect(),
            inner: Mutex::new(Some(want)),
        }))
    }

    fn begin_store(&self, py: Python<'_>, want: &StoreWant, host: Vec<u32>) -> PyResult<u64> {
        let want = want.take(py)?;
        self.run(py, |tree| tree.begin_store(want, host_pages(host)))
    }

    fn drop_store(&self, py: Python<'_>, want: &StoreWant) -> PyResult<()> {
        let want = want.take(py)?;
        self.run(py, |tree| tree.drop_store(want))
    }

    fn end_store(&self, py: Python<'_>, id: u64, ok: bool) -> PyResult<Vec<u32>> {
        self.run(py, |tree| host_ids(tree.end_store(id, ok)))
    }

    fn demote(&self, py: Python<'_>, lease: &Lease) -> PyResult<Vec<u32>> {
        let freed = self.with(py, lease, |tree, lease| Ok(tree.demote(lease)))?;
        Ok(device_ids(freed))
    }

    fn window_missing(&self, py: Python<'_>, lease: &Lease) -> PyResult<usize> {
        self.with(py, lease, |tree, lease| Ok(tree.window_missing(lease)))
    }

    fn give_window(&self, py: Python<'_>, lease: &Lease, pages: Vec<u32>) -> PyResult<Vec<u32>> {
        let pages = entries(py, pages, true)?;
        let left = self.with(py, lease, |tree, lease| Ok(tree.give_window(lease, &pages)))?;
        Ok(device_ids(left))
    }

    fn window_hold(&self, py: Python<'_>, lease: &Lease) -> PyResult<bool> {
        self.with(py, lease, |tree, lease| Ok(tree.window_hold(lease)))
    }

    fn window_release(&self, py: Python<'_>, lease: &Lease) -> PyResult<()> {
        self.with(py, lease, |tree, lease| {
            tree.window_release(lease);
            Ok(())
        })
    }

    fn evict_device<'py>(&self, py: Python<'py>, n: usize) -> PyResult<Bound<'py, PyDict>> {
        given_up(py, self.run(py, |tree| tree.evict_device(n))?)
    }

    fn evict_host<'py>(&self, py: Python<'py>, n: usize) -> PyResult<Bound<'py, PyDict>> {
        given_up(py, self.run(py, |tree| tree.evict_host(n))?)
    }

    fn evict_snapshot(&self, py: Python<'_>, n: usize) -> PyResult<Vec<u32>> {
        self.run(py, |tree| tree.evict_snapshot(n))
    }

    fn evictable_device(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, core::PrefixTree::evictable_device)
    }

    fn evictable_host(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, core::PrefixTree::evictable_host)
    }

    fn evictable_snapshots(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, core::PrefixTree::evictable_snapshots)
    }

    fn take_garbage<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        given_up(py, self.run(py, core::PrefixTree::take_garbage)?)
    }

    fn clear<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        given_up(py, self.run(py, core::PrefixTree::clear)?)
    }

    fn begin_snapshot(
        &self,
        py: Python<'_>,
        lease: &Lease,
        position: usize,
        slot: u32,
    ) -> PyResult<u64> {
        self.with(py, lease, |tree, lease| {
            tree.begin_snapshot(lease, position, slot)
        })
    }

    fn end_snapshot(&self, py: Python<'_>, id: u64, ok: bool) -> PyResult<Option<u32>> {
        self.run(py, |tree| tree.end_snapshot(id, ok))
    }

    fn has_snapshot(&self, py: Python<'_>, lease: &Lease, position: usize) -> PyResult<bool> {
        self.with(py, lease, |tree, lease| {
            Ok(tree.has_snapshot(lease, position))
        })
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.run(py, core::PrefixTree::stats)?;
        let dict = PyDict::new(py);
        for (name, count) in stats.rows() {
            dict.set_item(name, count)?;
        }
        Ok(dict)
    }

    fn dump<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let dump = self.run(py, core::PrefixTree::dump)?;
        let list = PyList::empty(py);
        for node in dump.nodes {
            let dict = PyDict::new(py);
            dict.set_item("namespace", node.namespace.0)?;
            dict.set_item("start", node.start)?;
            dict.set_item("tokens", node.tokens)?;
            dict.set_item("state", state_name(node.state))?;
            dict.set_item("device", device_ids(node.device))?;
            dict.set_item("host", host_ids(node.host))?;
            dict.set_item("priority", if node.low_class { "low" } else { "high" })?;
            dict.set_item("tick", node.tick)?;
            dict.set_item("locks", node.locks.to_vec())?;
            dict.set_item("leaving", node.leaving)?;
            dict.set_item("snapshot", node.snapshot.map(|(slot, ..)| slot))?;
            list.append(dict)?;
        }
        Ok(list)
    }

    fn digest(&self, py: Python<'_>) -> PyResult<u64> {
        self.run(py, core::PrefixTree::digest)
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let checked = self.run(py, core::PrefixTree::check)?;
        checked.map_err(|what| broken(py, &what))
    }

    fn check_some(&self, py: Python<'_>, n: usize) -> PyResult<()> {
        let checked = self.run(py, |tree| tree.check_some(n))?;
        checked.map_err(|what| broken(py, &what))
    }
}
