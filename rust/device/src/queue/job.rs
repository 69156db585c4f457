//! Jobs as they are handed over, and what is checked then.

use headrace_core::{Error, KvPiece, PlanKind, Planes, Result, StatePiece};

/// Host to device, all layers, gated layer by layer.
#[derive(Clone, Debug)]
pub struct LoadJob {
    /// Id, unique among the jobs that live.
    pub job: u64,
    /// KV to load.
    pub kv: Vec<KvPiece>,
    /// State to load.
    pub state: Vec<StatePiece>,
}

/// Host to the LOW pages of a step, one layer at a time.
#[derive(Clone, Debug)]
pub struct WindowJob {
    /// Id, unique among the jobs that live.
    pub job: u64,
    /// All LOW pages of the step, shared ones once.
    pub pieces: Vec<KvPiece>,
    /// Running index of the step's first KV layer: not below the end of the window before.
    pub k0: u64,
    /// Layers of the window.
    pub width: u32,
}

/// Device to host, all layers.
#[derive(Clone, Debug)]
pub struct StoreJob {
    /// Id, unique among the jobs that live.
    pub job: u64,
    /// KV to store.
    pub kv: Vec<KvPiece>,
    /// State to store.
    pub state: Vec<StatePiece>,
}

pub(super) fn check_pieces(
    planes: &Planes,
    kind: PlanKind,
    kv: &[KvPiece],
    state: &[StatePiece],
) -> Result<()> {
    not_empty(kv.len() + state.len())?;
    planes.check(kind, &[kv], &[state])
}

pub(super) fn check_loads(planes: &Planes, loads: &[LoadJob]) -> Result<()> {
    for load in loads {
        not_empty(load.kv.len() + load.state.len())?;
    }
    let kv: Vec<_> = loads.iter().map(|load| &*load.kv).collect();
    let state: Vec<_> = loads.iter().map(|load| &*load.state).collect();
    planes.check(PlanKind::Load, &kv, &state)
}

pub(super) fn check_window(planes: &Planes, window: &WindowJob) -> Result<()> {
    let width = window.width;
    check_pieces(planes, PlanKind::Window { width }, &window.pieces, &[])?;
    let layers = u64::from(planes.kv_shape().layers);
    match window.k0.checked_add(layers) {
        Some(_) => Ok(()),
        None => Err(Error::request(
            "k0",
            window.k0,
            "an index below 2^64 - layers",
        )),
    }
}

fn not_empty(pieces: usize) -> Result<()> {
    if pieces == 0 {
        return Err(Error::request("pieces", 0, "at least one piece in a job"));
    }
    Ok(())
}
