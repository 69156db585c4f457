//! Copy planner: what a job names (pages, slots) as runs of bytes. Pure functions, no locks.
//!
//! A plan lists the runs of layer 0 of every plane; those of layer l are the same runs moved by a
//! constant stride on either side, so a layer costs two additions and nothing is listed twice.
//!
//! Invariants: the runs of a plane cover the bytes asked for, each once and nothing else; no two
//! runs touch on both sides; no run mixes planes; a plan depends on its input alone. Destinations
//! that overlap, and pages or slots outside the registry, are refused. Every offset is below an
//! extent that [`Planes::new`] has checked to fit 64 bits.

mod choice;
mod pieces;
mod planes;
#[cfg(all(test, not(loom)))]
mod tests;

pub use choice::{Mechanism, Thresholds};
pub use pieces::{KvPiece, PlanKind, StatePiece};
pub use planes::{KvPlane, KvShape, LayerKind, Planes, StatePlane, StateShape};

use crate::error::{Error, Result};

/// Bytes that are contiguous on both sides, as offsets from the bases of their plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Offset in the host plane.
    pub host: u64,
    /// Offset in the device plane.
    pub device: u64,
    /// Length.
    pub bytes: u64,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Host to device.
    ToDevice,
    /// Device to host.
    ToHost,
}

/// The runs of one plane in layer 0 and how far apart layers are.
#[derive(Clone, Debug)]
struct PlaneRuns {
    /// Index in the registry: KV planes first, then state planes.
    plane: usize,
    runs: Box<[Run]>,
    host_stride: u64,
    device_stride: u64,
    bytes: u64,
}

/// A planned job: the runs of any layer, and the pieces they were made of.
#[derive(Clone, Debug)]
pub struct CopyPlan {
    kind: PlanKind,
    kv_pieces: Box<[KvPiece]>,
    state_pieces: Box<[StatePiece]>,
    kv: Vec<PlaneRuns>,
    state: Vec<PlaneRuns>,
}

impl Planes {
    /// Plans one job. Fails with `InvalidRequest` as [`Planes::check`] does.
    pub fn plan(
        &self,
        kind: PlanKind,
        kv: Box<[KvPiece]>,
        state: Box<[StatePiece]>,
    ) -> Result<CopyPlan> {
        self.check(kind, &[&kv], &[&state])?;
        let to_host = kind.direction() == Direction::ToHost;
        let kv_planes = self.kv_planes().iter().enumerate();
        let kv_runs = kv_planes.map(|(plane, p)| {
            let runs = kv.iter().map(|piece| self.kv_run(p, piece));
            let host_stride = self.kv_host_layer_bytes(p);
            PlaneRuns::new(plane, runs, to_host, host_stride, p.layer_stride)
        });
        let first_state = self.kv_planes().len();
        let state_planes = (first_state..).zip(self.state_planes());
        let state_runs = state_planes.map(|(plane, p)| {
            let runs = state.iter().map(|&piece| Planes::state_run(p, piece));
            let host_stride = self.state_host_layer_bytes(p);
            PlaneRuns::new(plane, runs, to_host, host_stride, p.layer_stride)
        });
        Ok(CopyPlan {
            kind,
            kv: kv_runs.collect(),
            state: state_runs.collect(),
            kv_pieces: kv,
            state_pieces: state,
        })
    }

    fn kv_run(&self, plane: &KvPlane, piece: &KvPiece) -> Run {
        let shape = self.kv_shape();
        let (start, raw) = (
            piece.device_page / shape.pages,
            piece.device_page % shape.pages,
        );
        Run {
            host: u64::from(piece.host_page.0)
                * u64::from(shape.host_page_tokens)
                * plane.token_bytes,
            device: u64::from(start) * plane.layer_stride
                + u64::from(raw) * plane.page_stride
                + u64::from(piece.device_token) * plane.token_bytes,
            bytes: u64::from(piece.tokens) * plane.token_bytes,
        }
    }

    fn state_run(plane: &StatePlane, piece: StatePiece) -> Run {
        Run {
            host: u64::from(piece.host_slot) * plane.bytes,
            device: u64::from(piece.device_slot) * plane.slot_stride,
            bytes: plane.bytes,
        }
    }

    /// What lies at `offset` of a device plane: (page or slot, layer). For error messages.
    pub fn locate(&self, plane: usize, offset: u64) -> Option<(u32, u32)> {
        let state = plane.wrapping_sub(self.kv_planes().len());
        let kv = self.kv_planes().get(plane);
        let (layer_stride, stride) =
            kv.map(|kv| (kv.layer_stride, kv.page_stride)).or_else(|| {
                let state = self.state_planes().get(state)?;
                Some((state.layer_stride, state.slot_stride))
            })?;
        let within = offset % layer_stride / stride;
        Some((
            u32::try_from(within).ok()?,
            u32::try_from(offset / layer_stride).ok()?,
        ))
    }
}

impl PlaneRuns {
    /// Merged: in order of the destination, which is free of overlap, a run that touches another
    /// on both sides comes right after it.
    fn new(
        plane: usize,
        runs: impl Iterator<Item = Run>,
        to_host: bool,
        host_stride: u64,
        device_stride: u64,
    ) -> Self {
        let mut runs: Vec<Run> = runs.collect();
        let bytes = runs.iter().map(|run| run.bytes).sum();
        runs.sort_unstable_by_key(|run| if to_host { run.host } else { run.device });
        runs.dedup_by(|next, last| {
            let touch =
                last.host + last.bytes == next.host && last.device + last.bytes == next.device;
            if touch {
                last.bytes += next.bytes;
            }
            touch
        });
        Self {
            plane,
            runs: runs.into(),
            host_stride,
            device_stride,
            bytes,
        }
    }
}

impl CopyPlan {
    /// Which way it copies.
    pub fn direction(&self) -> Direction {
        self.kind.direction()
    }

    /// The pieces it was planned from.
    pub fn pieces(&self) -> (&[KvPiece], &[StatePiece]) {
        (&self.kv_pieces, &self.state_pieces)
    }

    fn planes_of(&self, layer: LayerKind) -> &[PlaneRuns] {
        match layer {
            LayerKind::Kv(_) => &self.kv,
            LayerKind::State(_) => &self.state,
        }
    }

    /// The merged runs of a layer as (plane, run). `k` is the running index of a streamed layer,
    /// which a window plan needs to find the buffer; others ignore it.
    pub fn runs(&self, layer: LayerKind, k: u64) -> impl Iterator<Item = (usize, Run)> + '_ {
        let (LayerKind::Kv(index) | LayerKind::State(index)) = layer;
        let host_layer = u64::from(index);
        let device_layer = self.device_layer(host_layer, k);
        self.planes_of(layer).iter().flat_map(move |plane| {
            let host = host_layer * plane.host_stride;
            let device = device_layer * plane.device_stride;
            let moved = move |run: &Run| Run {
                host: run.host + host,
                device: run.device + device,
                bytes: run.bytes,
            };
            plane.runs.iter().map(move |run| (plane.plane, moved(run)))
        })
    }

    /// The same bytes piece by piece, all planes of a piece together: the work items of a gather
    /// kernel.
    pub fn gather<'a>(
        &'a self,
        planes: &'a Planes,
        layer: LayerKind,
        k: u64,
    ) -> impl Iterator<Item = (usize, Run)> + 'a {
        let (LayerKind::Kv(index) | LayerKind::State(index)) = layer;
        let host_layer = u64::from(index);
        let device_layer = self.device_layer(host_layer, k);
        let moved = move |plane: &PlaneRuns, run: Run| Run {
            host: run.host + host_layer * plane.host_stride,
            device: run.device + device_layer * plane.device_stride,
            bytes: run.bytes,
        };
        let kv_pieces = match layer {
            LayerKind::Kv(_) => &*self.kv_pieces,
            LayerKind::State(_) => &[],
        };
        let state_pieces = match layer {
            LayerKind::Kv(_) => &[],
            LayerKind::State(_) => &*self.state_pieces,
        };
        let kv = kv_pieces.iter().flat_map(move |piece| {
            let of_plane = self.kv.iter().zip(planes.kv_planes());
            of_plane
                .map(move |(runs, plane)| (runs.plane, moved(runs, planes.kv_run(plane, piece))))
        });
        let state = state_pieces.iter().flat_map(move |&piece| {
            let of_plane = self.state.iter().zip(planes.state_planes());
            of_plane.map(move |(runs, plane)| {
                (runs.plane, moved(runs, Planes::state_run(plane, piece)))
            })
        });
        kv.chain(state)
    }

    fn device_layer(&self, layer: u64, k: u64) -> u64 {
        match self.kind {
            PlanKind::Window { width } => k % u64::from(width),
            PlanKind::Load | PlanKind::Store => layer,
        }
    }

    /// Bytes of one layer of this kind.
    pub fn layer_bytes(&self, layer: LayerKind) -> u64 {
        self.planes_of(layer).iter().map(|plane| plane.bytes).sum()
    }

    /// Runs of one layer of this kind, after merging.
    pub fn layer_runs(&self, layer: LayerKind) -> u64 {
        let runs = self.planes_of(layer).iter();
        runs.map(|plane| plane.runs.len() as u64).sum()
    }

    /// Pieces of one layer of this kind, before merging: one per plane.
    pub fn layer_pieces(&self, layer: LayerKind) -> u64 {
        let pieces = match layer {
            LayerKind::Kv(_) => self.kv_pieces.len(),
            LayerKind::State(_) => self.state_pieces.len(),
        };
        (pieces * self.planes_of(layer).len()) as u64
    }
}

fn piece_error(field: &'static str, index: usize, value: u32, expected: String) -> Error {
    Error::request(field, format_args!("{value} (piece {index})"), expected)
}
