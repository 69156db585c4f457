//! The three ways to move bytes: copies one by one, in a batch, or by a kernel that walks a list.
//!
//! No locks. What a launched kernel reads is returned with it, to be kept until the copy is over.

use std::ffi::CStr;
use std::sync::Arc;

use headrace_core::{Error, Mechanism, Result};

use super::context::{Context, Entered};
use super::driver::{DevicePtr, Handle};
use super::pinned::{Block, Piece, Pool};

/// Most blocks of the kernel: with pieces that keep their threads busy they fill the link, and more
/// would take processors from the forward for nothing (16 of 132 are 12 %).
const MAX_BLOCKS: u64 = 16;
/// Threads of a block.
pub(super) const BLOCK_THREADS: u64 = 1024;
const WARP: u64 = 32;
/// Bytes a thread has in flight: four loads of 16 bytes.
const THREAD_BYTES: u64 = 64;
/// Longest piece of a list: what keeps all threads of a block busy. A longer one is cut, so that
/// blocks share it.
pub(super) const PIECE_BYTES: u64 = BLOCK_THREADS * THREAD_BYTES;

/// Bytes that lie in one piece on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// Address on the host, in this process.
    pub(super) host: u64,
    /// The same, as a kernel sees it.
    pub(super) mapped: DevicePtr,
    pub(super) device: DevicePtr,
    pub(super) bytes: u64,
}

/// What was enqueued.
#[derive(Default)]
pub(super) struct Sent {
    /// What the copy reads until it is over.
    pub(super) list: Option<Block>,
    /// Part of it may be enqueued, the rest was refused.
    pub(super) refused: Option<Error>,
}

/// The kernel and the memory for its lists.
pub(super) struct Paths {
    context: Arc<Context>,
    pool: Arc<Pool>,
    module: Handle,
    kernel: Handle,
}

impl Paths {
    /// Loads the kernel and launches it once over nothing: code is loaded at its first launch, which
    /// may wait for the whole GPU. Fails with `Device`.
    pub(super) fn new(
        context: &Arc<Context>,
        pool: &Arc<Pool>,
        code: &[u8],
        symbol: &CStr,
        stream: Handle,
    ) -> Result<Self> {
        let entered = context.enter()?;
        let (module, kernel) = entered.load(code, symbol)?;
        let paths = Self {
            context: context.clone(),
            pool: pool.clone(),
            module,
            kernel,
        };
        let list = pool.block(0)?;
        entered.launch(kernel, stream, [1, 32], list.mapped(), [0, 32])?;
        entered.synchronize(stream)?;
        Ok(paths)
    }

    /// Enqueues copies. An error means that nothing is enqueued.
    pub(super) fn send(
        &self,
        entered: &Entered<'_>,
        stream: Handle,
        how: Mechanism,
        to_device: bool,
        spans: &[Span],
    ) -> Result<Sent> {
        if spans.is_empty() {
            return Ok(Sent::default());
        }
        match how {
            Mechanism::Plain => Self::plain(entered, stream, to_device, spans),
            Mechanism::Batch => Ok(Self::batch(entered, stream, to_device, spans)),
            Mechanism::Gather => self.gather(entered, stream, to_device, spans),
        }
    }

    fn plain(
        entered: &Entered<'_>,
        stream: Handle,
        to_device: bool,
        spans: &[Span],
    ) -> Result<Sent> {
        for (index, span) in spans.iter().enumerate() {
            let copied = entered.copy(stream, to_device, span.host, span.device, span.bytes);
            match copied {
                Ok(()) => {}
                Err(refused) if index == 0 => return Err(refused),
                Err(refused) => {
                    return Ok(Sent {
                        refused: Some(refused),
                        ..Sent::default()
                    });
                }
            }
        }
        Ok(Sent::default())
    }

    /// The driver does not say how much of a batch it took before it refused it.
    fn batch(entered: &Entered<'_>, stream: Handle, to_device: bool, spans: &[Span]) -> Sent {
        let size = |span: &Span| usize::try_from(span.bytes).unwrap_or(usize::MAX);
        let mut host: Vec<_> = spans.iter().map(|span| span.host).collect();
        let mut device: Vec<_> = spans.iter().map(|span| span.device).collect();
        let mut sizes: Vec<_> = spans.iter().map(size).collect();
        let sent = entered.copy_batch(stream, to_device, &mut host, &mut device, &mut sizes);
        Sent {
            refused: sent.err(),
            ..Sent::default()
        }
    }

    fn gather(
        &self,
        entered: &Entered<'_>,
        stream: Handle,
        to_device: bool,
        spans: &[Span],
    ) -> Result<Sent> {
        let Ok(count) = u32::try_from(spans.len()) else {
            return Err(Error::request("pieces", spans.len(), "fewer than 2^32"));
        };
        let pieces: Vec<_> = spans.iter().map(|span| piece(to_device, span)).collect();
        let mut list = self.pool.block(size_of_val(&*pieces))?;
        list.fill(&pieces);
        let bytes: u64 = spans.iter().map(|span| span.bytes).sum();
        let (blocks, threads) = grid(u64::from(count), bytes);
        entered.launch(
            self.kernel,
            stream,
            [blocks, 1024],
            list.mapped(),
            [count, threads],
        )?;
        Ok(Sent {
            list: Some(list),
            ..Sent::default()
        })
    }
}

impl Drop for Paths {
    fn drop(&mut self) {
        if let Ok(entered) = self.context.enter() {
            entered.unload(self.module);
        }
    }
}

fn piece(to_device: bool, span: &Span) -> Piece {
    let (source, target) = if to_device {
        (span.mapped, span.device)
    } else {
        (span.device, span.mapped)
    };
    Piece {
        source,
        target,
        bytes: span.bytes,
    }
}

/// Blocks of a launch and threads of a piece: a power of two, as many as the mean piece feeds.
pub(super) fn grid(pieces: u64, bytes: u64) -> (u32, u32) {
    let mean = bytes / pieces.max(1);
    let threads = mean.div_ceil(THREAD_BYTES).next_power_of_two();
    let threads = threads.clamp(WARP, BLOCK_THREADS);
    let blocks = pieces.saturating_mul(threads).div_ceil(BLOCK_THREADS);
    let small = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    (small(blocks.clamp(1, MAX_BLOCKS)), small(threads))
}
