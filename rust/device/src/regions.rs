//! Memory that copies may touch: regions that keep their owner alive, and the planes they hold.
//!
//! Invariant: a [`Transfer`] lies inside both of its regions.

use std::any::Any;
use std::sync::Arc;

use headrace_core::{Error, Planes, Result, Run};

use crate::device::Transfer;

/// Which processor an address belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Memory of this process.
    Host,
    /// Memory of the GPU with this index.
    Cuda(u32),
    /// No memory at all: addresses of the simulated device.
    Virtual,
}

/// A range of addresses and what keeps it valid.
#[derive(Clone)]
pub struct Region {
    address: u64,
    bytes: u64,
    space: Space,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl Region {
    /// A range of real memory.
    ///
    /// # Safety
    /// While `owner` lives, `bytes` bytes at `address` in `space` are allocated and may be read and
    /// written by any thread. They are plain data: whoever else touches them takes part in the
    /// protocol of the copy queue, or accepts torn values.
    #[expect(unsafe_code, reason = "the caller vouches for an address")]
    pub unsafe fn from_raw(
        address: u64,
        bytes: u64,
        space: Space,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self {
            address,
            bytes,
            space,
            _owner: owner,
        }
    }

    /// Addresses without memory, for the simulated device.
    pub fn virtual_at(address: u64, bytes: u64) -> Self {
        Self {
            address,
            bytes,
            space: Space::Virtual,
            _owner: Arc::new(()),
        }
    }

    /// First address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Which processor it belongs to.
    pub fn space(&self) -> Space {
        self.space
    }

    /// `bytes` bytes from `offset` on, with the same owner. Fails with `Config` beyond the end.
    pub fn slice(&self, offset: u64, bytes: u64) -> Result<Self> {
        if !self.holds(offset, bytes) {
            let value = format_args!("{bytes} bytes at {offset}");
            let expected = format!("inside a region of {} bytes", self.bytes);
            return Err(Error::config("region", value, expected));
        }
        Ok(Self {
            address: self.address + offset,
            bytes,
            ..self.clone()
        })
    }

    fn holds(&self, offset: u64, bytes: u64) -> bool {
        offset
            .checked_add(bytes)
            .is_some_and(|end| end <= self.bytes)
    }
}

/// The planes of a model with the memory of both their sides.
pub struct CopyMemory {
    planes: Planes,
    device: Vec<Region>,
    host: Vec<Region>,
}

impl CopyMemory {
    /// One region per plane and side, KV planes first. Fails with `Config` if the numbers differ or
    /// a region is too small for its plane.
    pub fn new(planes: Planes, device: Vec<Region>, host: Vec<Region>) -> Result<Self> {
        let sides = [
            ("device regions", device.len()),
            ("host regions", host.len()),
        ];
        for (field, len) in sides {
            if len != planes.len() {
                let expected = format!("one for each of {} planes", planes.len());
                return Err(Error::config(field, len, expected));
            }
        }
        for plane in 0..planes.len() {
            let (device_bytes, host_bytes) = planes.extent(plane);
            let sides = [
                ("device region", &device[plane], device_bytes),
                ("host region", &host[plane], host_bytes),
            ];
            for (field, region, needed) in sides {
                let reachable = region.address.checked_add(region.bytes).is_some();
                if region.bytes < needed || !reachable {
                    let value = format_args!("{} bytes", region.bytes);
                    let name = planes.name(plane);
                    let expected = format!("{needed} bytes, the extent of plane {name}");
                    return Err(Error::config(field, value, expected));
                }
            }
        }
        Ok(Self {
            planes,
            device,
            host,
        })
    }

    /// The registry.
    pub fn planes(&self) -> &Planes {
        &self.planes
    }

    /// All regions of (device, host).
    pub fn regions(&self) -> (&[Region], &[Region]) {
        (&self.device, &self.host)
    }

    /// A run with its regions. Fails with `InvalidRequest` if it leaves one of them.
    pub(crate) fn transfer(&self, plane: usize, run: Run) -> Result<Transfer<'_>> {
        if let (Some(device), Some(host)) = (self.device.get(plane), self.host.get(plane))
            && device.holds(run.device, run.bytes)
            && host.holds(run.host, run.bytes)
        {
            return Ok(Transfer {
                plane,
                device,
                host,
                run,
            });
        }
        Err(Error::request(
            "run",
            format_args!("{run:?} of plane {plane}"),
            "inside the regions of its plane",
        ))
    }
}
