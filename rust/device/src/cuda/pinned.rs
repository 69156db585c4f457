//! Pinned memory of the device's own: lists of pieces for gather copies, and flags.
//!
//! Owns: free blocks by size, every block ever allocated. One mutex, taken alone; the driver is
//! called outside of it. A block that is lent is in nobody's way: it comes back when dropped, which
//! its holder does once the copy that reads it is over.
#![expect(unsafe_code, reason = "memory that the driver allocates")]

use std::collections::BTreeMap;
use std::sync::Arc;

use headrace_core::Result;
use headrace_core::sync::Mutex;

use super::context::Context;
use super::driver::DevicePtr;

/// Smallest block: the pieces of 2,048 pages of one plane.
const LEAST_BYTES: usize = 1 << 16;
/// Blocks of the least size made at once, so that serving seldom allocates.
const FIRST_BLOCKS: usize = 32;

/// One piece of a gather copy; layout of the kernel's struct.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) source: u64,
    pub(super) target: u64,
    pub(super) bytes: u64,
}

#[derive(Clone, Copy)]
struct Memory {
    address: u64,
    mapped: DevicePtr,
    bytes: usize,
}

/// All pinned blocks of a device.
pub(super) struct Pool {
    context: Arc<Context>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    free: BTreeMap<usize, Vec<Memory>>,
    owned: Vec<u64>,
}

/// A block that nobody else has.
pub(super) struct Block {
    pool: Arc<Pool>,
    memory: Memory,
}

impl Pool {
    /// Fails with `Device` if the driver has no memory.
    pub(super) fn new(context: Arc<Context>) -> Result<Arc<Self>> {
        let pool = Arc::new(Self {
            context,
            state: Mutex::new(State::default()),
        });
        let first = (0..FIRST_BLOCKS).map(|_| pool.block(LEAST_BYTES));
        // Held together, so that each is another one.
        first.collect::<Result<Vec<_>>>()?;
        Ok(pool)
    }

    /// A block of at least `bytes` bytes, from the pool or new.
    pub(super) fn block(self: &Arc<Self>, bytes: usize) -> Result<Block> {
        let bytes = bytes.max(LEAST_BYTES).next_power_of_two();
        let free = self.state.lock().free.entry(bytes).or_default().pop();
        let memory = match free {
            Some(memory) => memory,
            None => self.allocate(bytes)?,
        };
        let pool = self.clone();
        Ok(Block { pool, memory })
    }

    fn allocate(&self, bytes: usize) -> Result<Memory> {
        let (address, mapped) = self.context.enter()?.new_pinned(bytes)?;
        self.state.lock().owned.push(address);
        Ok(Memory {
            address,
            mapped,
            bytes,
        })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Every block holds the pool, so none is lent.
        let Ok(entered) = self.context.enter() else {
            return;
        };
        for &address in &self.state.lock().owned {
            entered.free_pinned(address);
        }
    }
}

impl Block {
    /// Its address for the GPU.
    pub(super) fn mapped(&self) -> DevicePtr {
        self.memory.mapped
    }

    /// Writes a list to its beginning. The block was asked for with room for it.
    pub(super) fn fill(&mut self, pieces: &[Piece]) {
        let room = self.memory.bytes / size_of::<Piece>();
        assert!(pieces.len() <= room, "a block has room for its list");
        // SAFETY: the block has that room, is aligned to pages, and is lent to this holder alone;
        // the kernel that reads it is not launched yet.
        unsafe {
            let target = self.memory.address as *mut Piece;
            std::ptr::copy_nonoverlapping(pieces.as_ptr(), target, pieces.len());
        }
    }

    /// Zeroes it.
    pub(super) fn clear(&mut self) {
        // SAFETY: all of the block, lent to this holder alone.
        unsafe { std::ptr::write_bytes(self.memory.address as *mut u8, 0, self.memory.bytes) };
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut state = self.pool.state.lock();
        let memory = self.memory;
        state.free.entry(memory.bytes).or_default().push(memory);
    }
}
