//! Shadow memory: a version per cell, who holds it, and what should not have happened.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use headrace_core::{Direction, Mechanism};

use crate::device::LayerCopy;

/// Bytes of a cell: addresses and lengths are multiples of it.
pub const CELL: u64 = 8;
/// Version of what a failed copy leaves.
const GARBAGE: u64 = u64::MAX;
/// More would only repeat the first.
const MAX_VIOLATIONS: usize = 16;

/// Bytes a kernel reads.
#[derive(Clone, Debug)]
pub struct Read {
    /// First address.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// The version it must find in every cell.
    pub version: u64,
    /// The job that loads it, if one does: with a failed one it may find anything.
    pub job: Option<u64>,
}

/// Bytes a kernel writes.
#[derive(Clone, Copy, Debug)]
pub struct Write {
    /// First address.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// The version of every cell afterwards.
    pub version: u64,
}

/// A kernel of the forward.
#[derive(Clone, Debug, Default)]
pub struct Kernel {
    /// For messages.
    pub name: String,
    /// What it reads.
    pub reads: Vec<Read>,
    /// What it writes.
    pub writes: Vec<Write>,
    /// Time on the clock.
    pub cost_ns: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    version: u64,
    readers: u32,
    writers: u32,
}

/// What an operation holds.
#[derive(Clone, Debug, Default)]
pub(super) struct Access {
    name: String,
    reads: Vec<(Range<u64>, Wanted)>,
    writes: Vec<(Range<u64>, Source)>,
}

/// What a read must find.
#[derive(Clone, Copy, Debug)]
enum Wanted {
    /// Something that nobody writes meanwhile.
    Stable,
    Version(u64),
    /// Anything: it belongs to a row that is lost.
    Garbage,
}

#[derive(Clone, Copy, Debug)]
enum Source {
    Version(u64),
    /// The cell that many cells further on.
    CopyOf(i64),
}

fn cells(address: u64, bytes: u64) -> Range<u64> {
    address / CELL..(address + bytes).div_ceil(CELL)
}

impl Access {
    pub(super) fn of_copy(batch: &LayerCopy) -> Self {
        let mut access = Self {
            name: format!(
                "copy of job {}, {:?}, k {}",
                batch.job, batch.layer, batch.k
            ),
            ..Self::default()
        };
        for transfer in batch.transfers(Mechanism::Plain).flatten() {
            let run = transfer.run;
            let device = cells(transfer.device.address() + run.device, run.bytes);
            let host = cells(transfer.host.address() + run.host, run.bytes);
            let (from, to) = match batch.plan.direction() {
                Direction::ToDevice => (host, device),
                Direction::ToHost => (device, host),
            };
            let offset = from.start.cast_signed() - to.start.cast_signed();
            access.reads.push((from, Wanted::Stable));
            access.writes.push((to, Source::CopyOf(offset)));
        }
        access
    }

    pub(super) fn of_kernel(kernel: &Kernel, excused: &BTreeSet<u64>) -> Self {
        let reads = kernel.reads.iter().map(|read| {
            let any = read.job.is_some_and(|job| excused.contains(&job));
            let wanted = if any {
                Wanted::Garbage
            } else {
                Wanted::Version(read.version)
            };
            (cells(read.address, read.bytes), wanted)
        });
        let writes = kernel.writes.iter().map(|write| {
            let range = cells(write.address, write.bytes);
            (range, Source::Version(write.version))
        });
        Self {
            name: kernel.name.clone(),
            reads: reads.collect(),
            writes: writes.collect(),
        }
    }
}

impl Access {
    /// Reads that nobody may disturb. A lost row reads what it likes, also what is being written.
    fn held_reads(&self) -> impl Iterator<Item = &(Range<u64>, Wanted)> {
        let reads = self.reads.iter();
        reads.filter(|(_, wanted)| !matches!(wanted, Wanted::Garbage))
    }
}

#[derive(Default)]
pub(super) struct Memory {
    cells: BTreeMap<u64, Cell>,
    unmapped: Vec<Range<u64>>,
    violations: Vec<String>,
}

impl Memory {
    pub(super) fn violations(&self) -> &[String] {
        &self.violations
    }

    pub(super) fn preset(&mut self, write: Write) {
        for at in cells(write.address, write.bytes) {
            self.cells.entry(at).or_default().version = write.version;
        }
    }

    pub(super) fn unmap(&mut self, address: u64, bytes: u64) {
        let range = cells(address, bytes);
        let mut used = self.cells.range(range.clone());
        let used = used.find(|(_, cell)| cell.readers + cell.writers > 0);
        if let Some(at) = used.map(|(&at, _)| at) {
            self.violate("unmap", at, "of memory that is in use");
        }
        self.unmapped.push(range);
    }

    pub(super) fn begin(&mut self, access: &Access) {
        let reads = access.reads.iter().map(|(range, _)| range);
        let writes = access.writes.iter().map(|(range, _)| range);
        let unmapped = reads.chain(writes).find(|range| {
            let mut gone = self.unmapped.iter();
            gone.any(|gone| range.start < gone.end && gone.start < range.end)
        });
        if let Some(at) = unmapped.map(|range| range.start) {
            self.violate(&access.name, at, "touches unmapped memory");
        }
        for (range, wanted) in access.held_reads() {
            for at in range.clone() {
                let cell = self.cells.entry(at).or_default();
                cell.readers += 1;
                let cell = *cell;
                match *wanted {
                    Wanted::Version(wanted) if cell.version != wanted => {
                        let what = format!("reads version {}, not {wanted}", cell.version);
                        self.violate(&access.name, at, &what);
                    }
                    Wanted::Stable | Wanted::Version(_) if cell.writers > 0 => {
                        self.violate(&access.name, at, "reads what is being written");
                    }
                    Wanted::Stable | Wanted::Version(_) | Wanted::Garbage => {}
                }
            }
        }
        for (range, _) in &access.writes {
            for at in range.clone() {
                let cell = self.cells.entry(at).or_default();
                cell.writers += 1;
                let cell = *cell;
                // A kernel's own reads of what it updates in place came first.
                let own = access
                    .held_reads()
                    .filter(|(read, _)| read.contains(&at))
                    .count();
                if cell.readers as usize > own || cell.writers > 1 {
                    self.violate(&access.name, at, "writes what is in use");
                }
            }
        }
    }

    pub(super) fn end(&mut self, access: &Access, fails: bool) {
        for (range, source) in &access.writes {
            for at in range.clone() {
                let version = match *source {
                    _ if fails => GARBAGE,
                    Source::Version(version) => version,
                    Source::CopyOf(offset) => {
                        let from = at.wrapping_add_signed(offset);
                        self.cells.get(&from).map_or(0, |cell| cell.version)
                    }
                };
                let cell = self.cells.entry(at).or_default();
                cell.version = version;
                cell.writers = cell.writers.saturating_sub(1);
            }
        }
        for (range, _) in access.held_reads() {
            for at in range.clone() {
                let cell = self.cells.entry(at).or_default();
                cell.readers = cell.readers.saturating_sub(1);
            }
        }
    }

    fn violate(&mut self, who: &str, at: u64, what: &str) {
        if self.violations.len() < MAX_VIOLATIONS {
            self.violations.push(format!("{who} {what} (cell {at:#x})"));
        }
    }
}
