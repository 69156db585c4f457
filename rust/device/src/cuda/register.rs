//! Host memory that the GPU may reach: pinned piece by piece, unpinned when nothing uses it.
//!
//! Invariants: a registration holds the mapping, so memory is unpinned before it is unmapped, and
//! stays mapped if the driver does not unpin it; its pieces lie one behind the other. A copy may not cross from one piece to the next: the driver
//! refuses that of its copy engine. No locks.

use std::sync::Arc;

use headrace_core::{Error, Result};

use super::context::Context;
use super::driver::DevicePtr;
use crate::host::{HostMemory, PLANE_ALIGN};
use crate::regions::Region;

/// Most bytes pinned by one call: whole pages, and small enough to name what did not fit.
pub(super) const PIECE_BYTES: u64 = 1 << 30;

/// Registered memory. Whoever drops it knows that no copy touches it any more.
pub(super) struct Registration {
    context: Arc<Context>,
    pieces: Vec<DevicePtr>,
    piece_bytes: u64,
    /// Last: unmapped, at the earliest, once it is unpinned.
    region: Region,
}

/// A range within one registered piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Address in this process.
    pub(super) host: u64,
    /// Address for kernels.
    pub(super) mapped: DevicePtr,
    /// Distance from the start of the range.
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl Registration {
    /// Pins all of `memory`. Fails with `Config` if the driver refuses a piece; those before it are
    /// unpinned then.
    pub(super) fn new(context: &Arc<Context>, memory: &HostMemory) -> Result<Self> {
        Self::in_pieces(context, memory, PIECE_BYTES)
    }

    pub(super) fn in_pieces(
        context: &Arc<Context>,
        memory: &HostMemory,
        piece_bytes: u64,
    ) -> Result<Self> {
        memory.keep_from_children()?;
        let mut registration = Self {
            context: context.clone(),
            pieces: Vec::new(),
            piece_bytes,
            region: memory.region(),
        };
        let whole = memory.bytes().next_multiple_of(PLANE_ALIGN);
        let entered = context.enter()?;
        let mut first = 0;
        while first < whole {
            let bytes = piece_bytes.min(whole - first);
            let address = registration.region.address() + first;
            let mapped = entered.register(address, bytes).map_err(|refused| {
                let expected = format!(
                    "memory that can be pinned; piece {} of {bytes} bytes was refused: {refused}",
                    registration.pieces.len()
                );
                Error::config("host bytes", memory.bytes(), expected)
            })?;
            registration.pieces.push(mapped);
            first += bytes;
        }
        Ok(registration)
    }

    /// Whether all of a range is registered here.
    pub(super) fn holds(&self, address: u64, bytes: u64) -> bool {
        let first = address.checked_sub(self.region.address());
        let end = first.and_then(|first| first.checked_add(bytes));
        end.is_some_and(|end| end <= self.region.bytes())
    }

    /// A range that it holds, cut where pieces meet and at every multiple of `most` bytes of it.
    pub(super) fn parts(
        &self,
        address: u64,
        bytes: u64,
        most: u64,
    ) -> impl Iterator<Item = Part> + '_ {
        let first = address - self.region.address();
        let mut offset = 0;
        std::iter::from_fn(move || {
            if offset == bytes {
                return None;
            }
            let at = first + offset;
            let within = at % self.piece_bytes;
            let piece = usize::try_from(at / self.piece_bytes).ok()?;
            let left = (self.piece_bytes - within).min(bytes - offset);
            let part = Part {
                host: address + offset,
                mapped: self.pieces.get(piece)? + within,
                offset,
                bytes: left.min(most - offset % most),
            };
            offset += part.bytes;
            Some(part)
        })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let unpinned = self.context.enter().is_ok_and(|entered| {
            // The last one first, as a stack, and all of them.
            (0..self.pieces.len() as u64)
                .rev()
                .fold(true, |all, piece| {
                    let address = self.region.address() + piece * self.piece_bytes;
                    entered.unregister(address).is_ok() && all
                })
        });
        if !unpinned {
            // Another mapping at its addresses could not be pinned.
            std::mem::forget(self.region.clone());
        }
    }
}
