//! `PageAllocator` for Python: pages as two uint32 arrays, raw page and start.

use headrace_core::{self as core, Addressing, Error, Owner, PageConfig, PageEntry};
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::convert;
use crate::door::{Door, Home};
use crate::error::{broken, invalid, to_py};

/// Pages wanted, and the preferred start.
type Item = (usize, Option<u32>);
type Array<'py, T> = Bound<'py, PyArray1<T>>;
type Slots<'py> = (Array<'py, u32>, Array<'py, u32>);
type Traced<'py> = (Array<'py, u32>, Array<'py, u32>, Array<'py, u8>);

/// Version of the dictionary that `dump` returns.
const DUMP_FORMAT: u32 = 1;

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct PageAllocator {
    inner: core::PageAllocator,
    home: Home,
}

#[pymethods]
impl PageAllocator {
    #[new]
    #[pyo3(signature = (
        num_pages, num_layers, page_size, *, slot_widths=2, addressing="flat", cap_high=None,
        cap_low=None
    ))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keywords of the Python constructor"
    )]
    fn new(
        py: Python<'_>,
        num_pages: u32,
        num_layers: u32,
        page_size: u32,
        slot_widths: u32,
        addressing: &str,
        cap_high: Option<u32>,
        cap_low: Option<u32>,
    ) -> PyResult<Self> {
        let config = PageConfig {
            num_pages,
            num_layers,
            page_size,
            slot_widths,
            addressing: addressing_of(py, addressing)?,
            cap_high,
            cap_low,
        };
        let home = Home::here();
        let inner = py.enter(home, || core::PageAllocator::new(config))?;
        Ok(Self { inner, home })
    }

    #[pyo3(signature = (n, priority, preferred_start=None, return_slot_starts=true))]
    fn alloc<'py>(
        &self,
        py: Python<'py>,
        n: usize,
        priority: &str,
        preferred_start: Option<u32>,
        return_slot_starts: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let class = convert::class(py, priority)?;
        if !return_slot_starts && class == core::PriorityClass::Low {
            let expected = "True for 'low', whose raw pages carry several pages each";
            return Err(invalid(
                py,
                "return_slot_starts",
                "False".to_owned(),
                expected,
            ));
        }
        let (pages, starts) = py.enter(self.home, || {
            let entries = self.inner.alloc(n, class, preferred_start)?;
            Ok(self.split(&entries))
        })?;
        let pages = pages.into_pyarray(py);
        if return_slot_starts {
            let slots = (pages, starts.into_pyarray(py)).into_pyobject(py)?;
            return Ok(slots.into_any());
        }
        Ok(pages.into_any())
    }

    fn alloc_many<'py>(
        &self,
        py: Python<'py>,
        items: &Bound<'py, PyAny>,
        priority: &str,
    ) -> PyResult<Vec<Slots<'py>>> {
        let class = convert::class(py, priority)?;
        let items: Vec<Item> = items.extract()?;
        let groups = py.enter(self.home, || {
            let groups = self.inner.alloc_many(&items, class)?;
            Ok(groups
                .iter()
                .map(|group| self.split(group))
                .collect::<Vec<_>>())
        })?;
        let arrays = |(pages, starts): (Vec<u32>, Vec<u32>)| {
            (pages.into_pyarray(py), starts.into_pyarray(py))
        };
        Ok(groups.into_iter().map(arrays).collect())
    }

    fn alloc_traced<'py>(
        &self,
        py: Python<'py>,
        items: &Bound<'py, PyAny>,
        priority: &str,
    ) -> PyResult<Vec<Traced<'py>>> {
        let class = convert::class(py, priority)?;
        let items: Vec<Item> = items.extract()?;
        let groups = py.enter(self.home, || self.inner.alloc_traced(&items, class))?;
        let arrays = |(entries, steps): (Vec<PageEntry>, Vec<u8>)| {
            let (pages, starts) = self.split(&entries);
            (
                pages.into_pyarray(py),
                starts.into_pyarray(py),
                steps.into_pyarray(py),
            )
        };
        Ok(groups.into_iter().map(arrays).collect())
    }

    #[pyo3(signature = (pages, slot_starts, epoch=0, *, owner="request"))]
    fn free(
        &self,
        pages: &Bound<'_, PyAny>,
        slot_starts: &Bound<'_, PyAny>,
        epoch: u64,
        owner: &str,
    ) -> PyResult<()> {
        let owner = owner_of(pages.py(), "owner", owner)?;
        self.on_slots(pages, slot_starts, |entries| {
            self.inner.free(entries, owner, core::Epoch(epoch))
        })
    }

    #[pyo3(signature = (pages, slot_starts, from_owner, to_owner))]
    fn transfer(
        &self,
        pages: &Bound<'_, PyAny>,
        slot_starts: &Bound<'_, PyAny>,
        from_owner: &str,
        to_owner: &str,
    ) -> PyResult<()> {
        let from = owner_of(pages.py(), "from_owner", from_owner)?;
        let to = owner_of(pages.py(), "to_owner", to_owner)?;
        self.on_slots(pages, slot_starts, |entries| {
            self.inner.transfer(entries, from, to)
        })
    }

    fn pin(&self, pages: &Bound<'_, PyAny>, slot_starts: &Bound<'_, PyAny>) -> PyResult<()> {
        self.on_slots(pages, slot_starts, |entries| self.inner.pin(entries))
    }

    fn unpin(&self, pages: &Bound<'_, PyAny>, slot_starts: &Bound<'_, PyAny>) -> PyResult<()> {
        self.on_slots(pages, slot_starts, |entries| self.inner.unpin(entries))
    }

    fn retire(&self, py: Python<'_>, epoch: u64) -> PyResult<()> {
        py.enter(self.home, || {
            self.inner.retire(core::Epoch(epoch));
            Ok(())
        })
    }

    fn set_cap(&self, py: Python<'_>, priority: &str, cap: u32) -> PyResult<()> {
        let class = convert::class(py, priority)?;
        py.enter(self.home, || self.inner.set_cap(class, cap))
    }

    fn reclaim_plan<'py>(&self, py: Python<'py>, k: u32) -> PyResult<Array<'py, u32>> {
        let plan = py.enter(self.home, || self.inner.reclaim_plan(k))?;
        Ok(plan.into_pyarray(py))
    }

    fn available(&self, py: Python<'_>, priority: &str) -> PyResult<usize> {
        let class = convert::class(py, priority)?;
        py.enter(self.home, || Ok(self.inner.available(class)))
    }

    fn encode<'py>(
        &self,
        py: Python<'py>,
        pages: &Bound<'py, PyAny>,
        slot_starts: &Bound<'py, PyAny>,
        priority: &str,
    ) -> PyResult<Array<'py, u32>> {
        let class = convert::class(py, priority)?;
        let (pages, starts) = slots(pages, slot_starts)?;
        let entries = py.enter(self.home, || {
            let slots = pages.iter().zip(&starts).enumerate();
            let entry = |(index, (&raw, &start))| self.inner.entry(index, raw, start, class);
            slots
                .map(|slot| Ok(entry(slot)?.0))
                .collect::<core::Result<Vec<_>>>()
        })?;
        Ok(entries.into_pyarray(py))
    }

    fn decode<'py>(
        &self,
        py: Python<'py>,
        entries: &Bound<'py, PyAny>,
    ) -> PyResult<(Array<'py, u32>, Array<'py, u32>, Array<'py, bool>)> {
        let entries: Vec<_> = array("entries", entries)?
            .into_iter()
            .map(PageEntry)
            .collect();
        let (pages, starts) = self.split(&entries);
        py.enter(self.home, || {
            let slots = pages.iter().zip(&starts).zip(&entries).enumerate();
            for (index, ((&raw, &start), entry)) in slots {
                self.inner.entry(index, raw, start, entry.class())?;
            }
            Ok(())
        })?;
        let is_low: Vec<bool> = entries.iter().map(|entry| entry.is_low()).collect();
        Ok((
            pages.into_pyarray(py),
            starts.into_pyarray(py),
            is_low.into_pyarray(py),
        ))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.enter(self.home, || Ok(self.inner.stats()))?;
        let dict = PyDict::new(py);
        dict.set_item("num_pages", stats.num_pages)?;
        dict.set_item("free", stats.free)?;
        for (name, class) in [("high", stats.high), ("low", stats.low)] {
            let counts = PyDict::new(py);
            counts.set_item("cap", class.cap)?;
            counts.set_item("used", class.used)?;
            counts.set_item("request", class.request)?;
            counts.set_item("tree", class.tree)?;
            counts.set_item("copy", class.copy)?;
            counts.set_item("pending", class.pending)?;
            counts.set_item("partial", class.partial)?;
            dict.set_item(name, counts)?;
        }
        dict.set_item("pinned", stats.pinned)?;
        dict.set_item("waste_layers", stats.waste_layers)?;
        dict.set_item("retired", stats.retired.0)?;
        Ok(dict)
    }

    fn dump<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dump = py.enter(self.home, || Ok(self.inner.dump()))?;
        write_dump(py, &dump)
    }

    #[staticmethod]
    fn restore(py: Python<'_>, dump: &Bound<'_, PyAny>) -> PyResult<Self> {
        let refuse = |what: String| to_py(py, &damaged(what));
        let dump = read_dump(dump).map_err(|error| refuse(error.value(py).to_string()))?;
        let home = Home::here();
        let inner = py.enter(home, || core::PageAllocator::restore(&dump))?;
        Ok(Self { inner, home })
    }

    fn digest(&self, py: Python<'_>) -> PyResult<u64> {
        py.enter(self.home, || Ok(self.inner.digest()))
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let checked = py.enter(self.home, || Ok(self.inner.check()))?;
        checked.map_err(|what| broken(py, &what))
    }
}

impl PageAllocator {
    fn split(&self, entries: &[PageEntry]) -> (Vec<u32>, Vec<u32>) {
        let num_pages = self.inner.config().num_pages;
        let slot = |entry: &PageEntry| (entry.raw(num_pages), entry.start(num_pages));
        entries.iter().map(slot).unzip()
    }

    fn on_slots(
        &self,
        pages: &Bound<'_, PyAny>,
        starts: &Bound<'_, PyAny>,
        call: impl FnOnce(&[PageEntry]) -> core::Result<()> + Send,
    ) -> PyResult<()> {
        let py = pages.py();
        let (pages, starts) = slots(pages, starts)?;
        py.enter(self.home, || call(&self.inner.entries(&pages, &starts)?))
    }
}

fn slots(pages: &Bound<'_, PyAny>, starts: &Bound<'_, PyAny>) -> PyResult<(Vec<u32>, Vec<u32>)> {
    let py = pages.py();
    let (pages, starts) = (array("pages", pages)?, array("slot_starts", starts)?);
    if pages.len() != starts.len() {
        let expected = format!("one start for each of the {} pages", pages.len());
        let shown = format!("{} starts", starts.len());
        return Err(invalid(py, "slot_starts", shown, &expected));
    }
    Ok((pages, starts))
}

fn array(field: &'static str, value: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    match value.extract::<PyReadonlyArray1<'_, u32>>() {
        Ok(array) => Ok(array.as_array().to_vec()),
        Err(_) => Err(invalid(
            value.py(),
            field,
            value.get_type().to_string(),
            "a one-dimensional uint32 array",
        )),
    }
}

fn owner_of(py: Python<'_>, field: &'static str, name: &str) -> PyResult<Owner> {
    let owner = [Owner::Request, Owner::Tree, Owner::Copy]
        .into_iter()
        .find(|&owner| owner_name(owner) == name);
    owner.ok_or_else(|| {
        let expected = "'request', 'tree' or 'copy'";
        invalid(py, field, format!("{name:?}"), expected)
    })
}

fn owner_name(owner: Owner) -> &'static str {
    match owner {
        Owner::Request => "request",
        Owner::Tree => "tree",
        Owner::Copy => "copy",
    }
}

fn class_name(class: core::PriorityClass) -> &'static str {
    match class {
        core::PriorityClass::High => "high",
        core::PriorityClass::Low => "low",
    }
}

fn addressing_of(py: Python<'_>, name: &str) -> PyResult<Addressing> {
    match name {
        "flat" => Ok(Addressing::Flat),
        "strict" => Ok(Addressing::Strict),
        _ => Err(to_py(
            py,
            &Error::Config {
                field: "addressing",
                value: format!("{name:?}"),
                expected: "'flat' or 'strict'".to_owned(),
            },
        )),
    }
}

fn damaged(what: String) -> Error {
    Error::Config {
        field: "dump",
        value: what,
        expected: "the dump of a page allocator".to_owned(),
    }
}

fn write_dump<'py>(py: Python<'py>, dump: &core::PageDump) -> PyResult<Bound<'py, PyDict>> {
    let config = &dump.config;
    let addressing = match config.addressing {
        Addressing::Flat => "flat",
        Addressing::Strict => "strict",
    };
    let cap = PyDict::new(py);
    cap.set_item("high", config.cap_high)?;
    cap.set_item("low", config.cap_low)?;
    let pages = PyList::empty(py);
    for row in &dump.pages {
        let live: Vec<u32> = row.live.iter().map(|slot| slot.0).collect();
        let pending: Vec<[u64; 2]> = row.pending.iter().map(|p| [p.0.into(), p.1.0]).collect();
        let owners: Vec<_> = row.live.iter().map(|slot| owner_name(slot.1)).collect();
        let pins: Vec<[u32; 2]> = row
            .pins
            .iter()
            .map(|&(start, pins)| [start, pins])
            .collect();
        let fields = PyList::empty(py);
        fields.append(row.raw)?;
        fields.append(class_name(row.class))?;
        fields.append(live)?;
        fields.append(pending)?;
        fields.append(owners)?;
        fields.append(pins)?;
        pages.append(fields)?;
    }
    let free: Vec<[u32; 2]> = dump.free.iter().map(|&(first, end)| [first, end]).collect();
    let dict = PyDict::new(py);
    dict.set_item("format", DUMP_FORMAT)?;
    dict.set_item("L", config.num_layers)?;
    dict.set_item("N", config.num_pages)?;
    dict.set_item("P", config.page_size)?;
    dict.set_item("w", config.slot_widths)?;
    dict.set_item("addressing", addressing)?;
    dict.set_item("cap", cap)?;
    dict.set_item("retired", dump.retired.0)?;
    dict.set_item("free", free)?;
    dict.set_item("pages", pages)?;
    Ok(dict)
}

fn read_dump(dump: &Bound<'_, PyAny>) -> PyResult<core::PageDump> {
    let py = dump.py();
    let refuse = |what: &str| to_py(py, &damaged(what.to_owned()));
    if dump.get_item("format")?.extract::<u32>()? != DUMP_FORMAT {
        return Err(refuse("format is not 1"));
    }
    let cap = dump.get_item("cap")?;
    let addressing: String = dump.get_item("addressing")?.extract()?;
    let config = PageConfig {
        num_pages: dump.get_item("N")?.extract()?,
        num_layers: dump.get_item("L")?.extract()?,
        page_size: dump.get_item("P")?.extract()?,
        slot_widths: dump.get_item("w")?.extract()?,
        addressing: addressing_of(py, &addressing)?,
        cap_high: Some(cap.get_item("high")?.extract()?),
        cap_low: Some(cap.get_item("low")?.extract()?),
    };
    let free: Vec<[u32; 2]> = dump.get_item("free")?.extract()?;
    let rows: Vec<Vec<Bound<'_, PyAny>>> = dump.get_item("pages")?.extract()?;
    let mut pages = Vec::new();
    for row in rows {
        let [raw, class, live, pending, owners, pins] = &row[..] else {
            return Err(refuse("a row of pages has not 6 fields"));
        };
        let live: Vec<u32> = live.extract()?;
        let pending: Vec<(u32, u64)> = pairs(pending)?;
        let owners: Vec<String> = owners.extract()?;
        if owners.len() != live.len() {
            return Err(refuse("a row has not one owner for each live slot"));
        }
        let owners = owners.iter().map(|name| owner_of(py, "owners", name));
        let owners: Vec<Owner> = owners.collect::<PyResult<_>>()?;
        pages.push(core::PageRow {
            raw: raw.extract()?,
            class: convert::class(py, &class.extract::<String>()?)?,
            live: live.into_iter().zip(owners).collect(),
            pending: pending
                .into_iter()
                .map(|(start, epoch)| (start, core::Epoch(epoch)))
                .collect(),
            pins: pairs(pins)?,
        });
    }
    Ok(core::PageDump {
        config,
        retired: core::Epoch(dump.get_item("retired")?.extract()?),
        free: free.into_iter().map(|[first, end]| (first, end)).collect(),
        pages,
    })
}

/// Pairs of numbers, from lists or tuples.
fn pairs<T>(value: &Bound<'_, PyAny>) -> PyResult<Vec<(u32, T)>>
where
    T: for<'a, 'py> FromPyObject<'a, 'py, Error = PyErr>,
{
    let pairs: Vec<[Bound<'_, PyAny>; 2]> = value.extract()?;
    let pairs = pairs.into_iter();
    pairs
        .map(|[start, value]| Ok((start.extract()?, value.extract()?)))
        .collect()
}
