//! What a job names, and the checks that need nothing but the registry.

use super::planes::Planes;
use super::{Direction, piece_error};
use crate::error::{Error, Result};
use crate::host::HostPage;

/// Tokens of one host page and where they are, or go, on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPiece {
    /// Flat page base: the raw page (HIGH, slot), or raw page + start * pages (LOW).
    pub device_page: u32,
    /// First token inside the device page: 0 where device and host pages are alike.
    pub device_token: u32,
    /// Host page; the tokens are its first ones.
    pub host_page: HostPage,
    /// 1 to tokens of a host page.
    pub tokens: u32,
}

/// The whole state of a request and the snapshot it is copied from or to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatePiece {
    /// State slot on the device.
    pub device_slot: u32,
    /// Snapshot slot on the host.
    pub host_slot: u32,
}

/// What a plan is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanKind {
    /// Host to device, all layers.
    Load,
    /// Device to host, all layers.
    Store,
    /// Host to LOW pages: layer k of the stream goes to the window's buffer `k mod width`.
    Window {
        /// Layers of the window.
        width: u32,
    },
}

impl PlanKind {
    /// Which way it copies.
    pub fn direction(self) -> Direction {
        match self {
            Self::Store => Direction::ToHost,
            Self::Load | Self::Window { .. } => Direction::ToDevice,
        }
    }
}

impl Planes {
    /// Checks the pieces of jobs that are handed over together: every page, token and slot is one
    /// of the registry, and no two destinations overlap. O(n log n).
    ///
    /// Fails with `InvalidRequest` that names the field, the value and its position.
    pub fn check(&self, kind: PlanKind, kv: &[&[KvPiece]], state: &[&[StatePiece]]) -> Result<()> {
        if let PlanKind::Window { width } = kind
            && (width == 0 || width > self.kv_shape().layers)
        {
            let expected = format!("between 1 and {} KV layers", self.kv_shape().layers);
            return Err(Error::request("width", width, expected));
        }
        let pieces = || kv.iter().flat_map(|job| job.iter());
        let states = || state.iter().flat_map(|job| job.iter());
        for (index, piece) in pieces().enumerate() {
            self.check_kv(kind, index, piece)?;
        }
        for (index, &piece) in states().enumerate() {
            self.check_state(kind, index, piece)?;
        }
        match kind.direction() {
            Direction::ToDevice => {
                let key = |p: &KvPiece| (p.device_page, p.device_token, p.tokens);
                disjoint("device_page", pieces().map(key).collect())?;
                let slots = states().map(|p| (p.device_slot, 0, 1));
                disjoint("device_slot", slots.collect())
            }
            Direction::ToHost => {
                let key = |p: &KvPiece| (p.host_page.0, 0, p.tokens);
                disjoint("host_page", pieces().map(key).collect())?;
                let slots = states().map(|p| (p.host_slot, 0, 1));
                disjoint("host_slot", slots.collect())
            }
        }
    }

    fn check_kv(&self, kind: PlanKind, index: usize, piece: &KvPiece) -> Result<()> {
        let shape = self.kv_shape();
        let below = |field, value: u32, limit: u32, what: &str| {
            if value < limit {
                return Ok(());
            }
            let expected = format!("below {limit}, the number of {what}");
            Err(piece_error(field, index, value, expected))
        };
        match kind {
            PlanKind::Load | PlanKind::Store => {
                below("device_page", piece.device_page, shape.pages, "raw pages")?;
            }
            PlanKind::Window { width } => {
                // Shapes with no pages have no legal piece.
                let start = piece.device_page.checked_div(shape.pages);
                let fits = start.is_some_and(|start| {
                    start.is_multiple_of(width)
                        && start.checked_add(width).is_some_and(|e| e <= shape.layers)
                });
                if !fits {
                    let expected = format!(
                        "raw + start * {} with a start that is a multiple of {width} and leaves \
                         room for {width} of {} layers",
                        shape.pages, shape.layers
                    );
                    return Err(piece_error(
                        "device_page",
                        index,
                        piece.device_page,
                        expected,
                    ));
                }
            }
        }
        below(
            "host_page",
            piece.host_page.0,
            shape.host_pages,
            "host pages",
        )?;
        if piece.tokens == 0 || piece.tokens > shape.host_page_tokens {
            let expected = format!("between 1 and {}, a host page", shape.host_page_tokens);
            return Err(piece_error("tokens", index, piece.tokens, expected));
        }
        let end = piece.device_token.checked_add(piece.tokens);
        if end.is_none_or(|end| end > shape.page_tokens) {
            let expected = format!(
                "with {} tokens inside a device page of {}",
                piece.tokens, shape.page_tokens
            );
            return Err(piece_error(
                "device_token",
                index,
                piece.device_token,
                expected,
            ));
        }
        Ok(())
    }

    fn check_state(&self, kind: PlanKind, index: usize, piece: StatePiece) -> Result<()> {
        let shape = self.state_shape();
        if let PlanKind::Window { .. } = kind {
            let expected = "none: state is never streamed".to_owned();
            return Err(piece_error("state", index, piece.device_slot, expected));
        }
        let sides = [
            ("device_slot", piece.device_slot, shape.slots, "state slots"),
            (
                "host_slot",
                piece.host_slot,
                shape.snapshots,
                "snapshot slots",
            ),
        ];
        for (field, value, limit, what) in sides {
            if value >= limit {
                let expected = format!("below {limit}, the number of {what}");
                return Err(piece_error(field, index, value, expected));
            }
        }
        Ok(())
    }
}

/// Whether ranges (owner, first, length) are disjoint.
fn disjoint(field: &'static str, mut ranges: Vec<(u32, u32, u32)>) -> Result<()> {
    ranges.sort_unstable();
    let clash = ranges.windows(2).find(|pair| {
        let (owner, first, len) = pair[0];
        owner == pair[1].0 && u64::from(first) + u64::from(len) > u64::from(pair[1].1)
    });
    match clash {
        None => Ok(()),
        Some(pair) => Err(Error::request(
            field,
            pair[0].0,
            "a destination that no other piece writes",
        )),
    }
}
