//! Host memory for KV: one anonymous mapping of exactly the bytes asked for.
//!
//! Pages of the mapping are zero and not resident until used, or until [`HostMemory::touch`].
//! What is asked for is compared with what the machine and the control group of the process have
//! left before anything is mapped. The mapping goes when its last [`Region`] goes, and running
//! copies hold theirs.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use headrace_core::{Error, Result};

use crate::regions::{Region, Space};

/// Bytes after which the next plane starts, so that every plane is aligned for any row.
pub const PLANE_ALIGN: u64 = 4096;

/// A mapping; unmapped when dropped.
struct Mapping {
    address: *mut libc::c_void,
    bytes: usize,
}

#[expect(unsafe_code, reason = "an anonymous mapping has no thread")]
// SAFETY: the mapping is plain memory, valid in every thread until `drop`, which has `&mut`.
unsafe impl Send for Mapping {}
#[expect(unsafe_code, reason = "an anonymous mapping has no thread")]
// SAFETY: `&Mapping` gives out the address alone; nothing is read or written through it here.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(bytes: usize) -> Result<Self> {
        #[expect(unsafe_code, reason = "mmap")]
        // SAFETY: a new private anonymous mapping touches no memory that exists.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            let why = std::io::Error::last_os_error();
            let expected = format!("a size that the system can map ({why})");
            return Err(Error::config("host bytes", bytes, expected));
        }
        Ok(Self { address, bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        #[expect(unsafe_code, reason = "munmap")]
        // SAFETY: the mapping is ours, whole, and every `Region` of it holds it, so none is left.
        unsafe {
            libc::munmap(self.address, self.bytes);
        }
    }
}

/// A budget of host memory.
pub struct HostMemory {
    mapping: Arc<Mapping>,
}

impl HostMemory {
    /// Maps `bytes` bytes of zeros. Fails with `Config` for 0, `OutOfHostMemory` if there is less.
    pub fn new(bytes: u64) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::config("host bytes", 0, "at least 1"));
        }
        check_available(bytes, &available())?;
        let too_large = || Error::config("host bytes", bytes, "a size that fits an address");
        let size = usize::try_from(bytes).map_err(|_| too_large())?;
        let mapping = Arc::new(Mapping::new(size)?);
        Ok(Self { mapping })
    }

    /// Length, exactly as asked for.
    pub fn bytes(&self) -> u64 {
        self.mapping.bytes as u64
    }

    /// All of it.
    pub fn region(&self) -> Region {
        let address = self.mapping.address.expose_provenance() as u64;
        #[expect(unsafe_code, reason = "the mapping is known to be valid")]
        // SAFETY: the region holds the mapping, which is readable and writable until dropped.
        unsafe {
            Region::from_raw(address, self.bytes(), Space::Host, self.mapping.clone())
        }
    }

    /// Leaves it out of forked children, for which the system would copy pinned pages at once.
    #[cfg(not(loom))]
    pub(crate) fn keep_from_children(&self) -> Result<()> {
        let Mapping { address, bytes } = *self.mapping;
        #[expect(unsafe_code, reason = "madvise")]
        // SAFETY: the mapping is ours and whole; this changes nothing in this process.
        let failed = unsafe { libc::madvise(address, bytes, libc::MADV_DONTFORK) } != 0;
        if failed {
            let why = std::io::Error::last_os_error();
            let expected = format!("memory that forked children can go without ({why})");
            return Err(Error::config("host bytes", bytes, expected));
        }
        Ok(())
    }

    /// Makes every page resident, with `threads` threads. Call before the memory is in use.
    pub fn touch(&self, threads: usize) {
        let page = usize::try_from(PLANE_ALIGN).unwrap_or(usize::MAX);
        let share = self
            .mapping
            .bytes
            .div_ceil(threads.max(1))
            .next_multiple_of(page);
        std::thread::scope(|scope| {
            for first in (0..self.mapping.bytes).step_by(share) {
                let mapping = &self.mapping;
                scope.spawn(move || {
                    for at in (first..mapping.bytes.min(first + share)).step_by(page) {
                        #[expect(unsafe_code, reason = "first touch")]
                        // SAFETY: `at` is inside the mapping. A volatile read-modify-write of one
                        // byte makes the page resident and keeps what is in it.
                        unsafe {
                            let byte = mapping.address.cast::<u8>().add(at);
                            byte.write_volatile(byte.read_volatile());
                        }
                    }
                });
            }
        });
    }
}

/// Bytes that can be had, by what limits them.
fn available() -> Vec<(&'static str, u64)> {
    let mut limits = Vec::new();
    if let Some(free) = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| meminfo_available(&text))
    {
        limits.push(("MemAvailable", free));
    }
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    limits.extend(cgroup_left(&groups, Path::new("/sys/fs/cgroup")).map(|b| ("cgroup limit", b)));
    limits
}

fn check_available(needed: u64, limits: &[(&'static str, u64)]) -> Result<()> {
    match limits.iter().min_by_key(|&&(_, bytes)| bytes) {
        Some(&(source_name, available)) if available < needed => Err(Error::OutOfHostMemory {
            needed,
            available,
            source_name,
        }),
        _ => Ok(()),
    }
}

fn meminfo_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Least bytes left in the memory control groups of this process and the groups around it.
fn cgroup_left(groups: &str, root: &Path) -> Option<u64> {
    let path_of = |line: &str| -> Option<(bool, String)> {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let memory = controllers.split(',').any(|c| c == "memory");
        (controllers.is_empty() || memory).then(|| (memory, path.to_owned()))
    };
    let left_in = |v1: bool, dir: &Path| -> Option<u64> {
        let (limit, usage) = if v1 {
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
        } else {
            ("memory.max", "memory.current")
        };
        let read = |name| -> Option<u64> {
            let text = fs::read_to_string(dir.join(name)).ok()?;
            text.trim().parse().ok() // "max" is no limit
        };
        Some(read(limit)?.saturating_sub(read(usage)?))
    };
    let all = groups.lines().filter_map(path_of).flat_map(|(v1, path)| {
        let base = if v1 {
            root.join("memory")
        } else {
            root.to_path_buf()
        };
        let inner = base.join(path.trim_start_matches('/'));
        let around: Vec<_> = inner
            .ancestors()
            .take_while(|dir| dir.starts_with(&base))
            .filter_map(|dir| left_in(v1, dir))
            .collect();
        around
    });
    all.min()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn zero_is_refused_and_more_than_there_is_names_the_shortage() {
        assert!(matches!(HostMemory::new(0), Err(Error::Config { .. })));
        let Err(error) = HostMemory::new(1 << 60) else {
            panic!("an exbibyte was mapped");
        };
        let Error::OutOfHostMemory {
            needed, available, ..
        } = &error
        else {
            panic!("{error}");
        };
        let short = (needed - available).to_string();
        assert!(error.to_string().contains(&short), "{error}");
    }

    #[test]
    fn the_smallest_limit_decides() {
        let limits = [("MemAvailable", 100), ("cgroup limit", 50)];
        assert!(check_available(50, &limits).is_ok());
        assert_eq!(
            check_available(51, &limits),
            Err(Error::OutOfHostMemory {
                needed: 51,
                available: 50,
                source_name: "cgroup limit"
            })
        );
    }

    #[test]
    fn meminfo_is_read_in_kib() {
        let text = "MemTotal: 9 kB\nMemAvailable:   12 kB\n";
        assert_eq!(meminfo_available(text), Some(12 * 1024));
        assert_eq!(meminfo_available("MemTotal: 9 kB\n"), None);
    }

    #[test]
    fn limits_of_outer_groups_count() {
        let root = std::env::temp_dir().join(format!("headrace-cgroup-{}", std::process::id()));
        let inner = root.join("a/b");
        fs::create_dir_all(&inner).unwrap();
        fs::write(root.join("a/memory.max"), "1000\n").unwrap();
        fs::write(root.join("a/memory.current"), "400\n").unwrap();
        fs::write(inner.join("memory.max"), "max\n").unwrap();
        fs::write(inner.join("memory.current"), "300\n").unwrap();
        let left = cgroup_left("0::/a/b\n", &root);
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(left, Some(600));
    }

    /// Bytes of the region that are resident.
    #[expect(
        unsafe_code,
        clippy::unwrap_used,
        reason = "mincore; a test fails by panicking"
    )]
    fn resident(region: &Region) -> u64 {
        let bytes = usize::try_from(region.bytes()).unwrap();
        let mut pages = vec![0u8; bytes.div_ceil(4096)];
        let address = usize::try_from(region.address()).unwrap();
        let address = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: the region is mapped, and there is a byte for each of its pages.
        let failed = unsafe { libc::mincore(address, bytes, pages.as_mut_ptr()) };
        assert_eq!(failed, 0);
        pages
            .iter()
            .map(|page| u64::from(page & 1) * PLANE_ALIGN)
            .sum()
    }

    /// Whether a forked child gets the page at `address`.
    #[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
    fn is_inherited(address: u64) -> bool {
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let holds = |line: &str| {
            let range = line.split(' ').next()?.split_once('-')?;
            let [first, end] = [range.0, range.1].map(|at| u64::from_str_radix(at, 16));
            Some((first.ok()?..end.ok()?).contains(&address))
        };
        let mut lines = maps.lines().skip_while(|line| holds(line) != Some(true));
        let flags = lines
            .find_map(|line| line.strip_prefix("VmFlags:"))
            .unwrap();
        !flags.split(' ').any(|flag| flag == "dc")
    }

    #[test]
    fn forked_children_go_without_memory_that_is_to_be_pinned() {
        let memory = HostMemory::new(3 * PLANE_ALIGN).unwrap();
        let last = memory.region().address() + memory.bytes() - 1;
        assert!(is_inherited(last));
        memory.keep_from_children().unwrap();
        assert!(!is_inherited(last));
    }

    #[test]
    fn memory_has_the_exact_size_and_is_resident_only_when_touched() {
        let bytes = (16 << 20) + 12_345;
        let memory = HostMemory::new(bytes).unwrap();
        let region = memory.region();
        assert_eq!((memory.bytes(), region.bytes()), (bytes, bytes));
        assert_eq!(region.address() % PLANE_ALIGN, 0);
        assert_eq!(resident(&region), 0);
        memory.touch(3);
        assert_eq!(resident(&region), bytes.next_multiple_of(PLANE_ALIGN));
    }
}
