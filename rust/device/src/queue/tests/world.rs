//! A small hybrid model in memory: KV in every other layer, planes of odd sizes.
#![expect(clippy::cast_possible_truncation, reason = "test memory is small")]

use std::sync::Arc;

use headrace_core::{
    KvPiece, KvPlane, KvShape, LayerKind, Planes, StatePiece, StatePlane, StateShape,
};

use crate::host::HostMemory;
use crate::regions::{CopyMemory, Region};

pub(crate) const KV_LAYERS: u32 = 5;
pub(crate) const PAGES: u32 = 7;
pub(crate) const HOST_PAGES: u32 = 9;
pub(crate) const PAGE: u32 = 4;
const SLOTS: u32 = 3;
const SNAPSHOTS: u32 = 4;
/// Bytes per token of the KV planes, per slot of the state planes (rows of HST-17).
const KV_BYTES: [u64; 3] = [196, 656, 6];
const STATE_BYTES: [u64; 2] = [1000, 77];
const POISON: u8 = 0xEE;

pub(crate) struct World {
    pub(crate) memory: Arc<CopyMemory>,
}

impl World {
    pub(crate) fn new() -> Self {
        let region = |bytes| HostMemory::new(bytes).unwrap().region();
        Self::with(region, region)
    }

    /// device, host: a region of a length.
    pub(crate) fn with(device: impl FnMut(u64) -> Region, host: impl FnMut(u64) -> Region) -> Self {
        let kv = KvShape {
            layers: KV_LAYERS,
            pages: PAGES,
            page_tokens: PAGE,
            host_pages: HOST_PAGES,
            host_page_tokens: PAGE,
        };
        let kv_planes = KV_BYTES.iter().enumerate().map(|(index, &token_bytes)| {
            let page_stride = u64::from(PAGE) * token_bytes;
            KvPlane {
                name: format!("kv{index}"),
                token_bytes,
                page_stride,
                layer_stride: page_stride * u64::from(PAGES),
            }
        });
        let state = StateShape {
            layers: KV_LAYERS,
            slots: SLOTS,
            snapshots: SNAPSHOTS,
        };
        let state_planes = STATE_BYTES
            .iter()
            .enumerate()
            .map(|(index, &bytes)| StatePlane {
                name: format!("state{index}"),
                bytes,
                slot_stride: bytes,
                layer_stride: bytes * u64::from(SLOTS),
            });
        let both = |layer| [LayerKind::State(layer), LayerKind::Kv(layer)];
        let layers = (0..KV_LAYERS).flat_map(both).collect();
        let planes = Planes::new(
            kv,
            kv_planes.collect(),
            state,
            state_planes.collect(),
            layers,
        );
        let planes = planes.unwrap();
        let extents: Vec<_> = (0..planes.len())
            .map(|plane| planes.extent(plane))
            .collect();
        let (on_device, on_host): (Vec<_>, Vec<_>) = extents.into_iter().unzip();
        let device = on_device.into_iter().map(device).collect();
        let host = on_host.into_iter().map(host).collect();
        let memory = Arc::new(CopyMemory::new(planes, device, host).unwrap());
        Self { memory }
    }

    pub(crate) fn layers(&self) -> usize {
        self.memory.planes().model_layers().len()
    }

    pub(crate) fn fill_host(&self) {
        fill(self.memory.regions().1, 1);
    }

    pub(crate) fn fill_device(&self) {
        fill(self.memory.regions().0, 2);
    }

    pub(crate) fn poison_device(&self) {
        for region in self.memory.regions().0 {
            write(region, |_| POISON);
        }
    }

    /// Both sides of every byte of a layer, by arithmetic of its own: (plane, device, host).
    fn places(
        &self,
        model_layer: usize,
        kv: &[KvPiece],
        state: &[StatePiece],
        device_layer: Option<u64>,
    ) -> Vec<(usize, u64, u64)> {
        let mut places = Vec::new();
        match self.memory.planes().model_layers()[model_layer] {
            LayerKind::Kv(layer) => {
                for (plane, &bytes) in KV_BYTES.iter().enumerate() {
                    for piece in kv {
                        let pages = u64::from(device_layer.map_or(layer, |l| l as u32))
                            * u64::from(PAGES)
                            + u64::from(piece.device_page);
                        let host_pages = u64::from(layer * HOST_PAGES + piece.host_page.0);
                        for byte in 0..u64::from(piece.tokens) * bytes {
                            let page_bytes = u64::from(PAGE) * bytes;
                            let skip = u64::from(piece.device_token) * bytes;
                            let device = pages * page_bytes + skip + byte;
                            places.push((plane, device, host_pages * page_bytes + byte));
                        }
                    }
                }
            }
            LayerKind::State(layer) => {
                for (index, &bytes) in STATE_BYTES.iter().enumerate() {
                    for piece in state {
                        let device = u64::from(layer * SLOTS + piece.device_slot) * bytes;
                        let host = u64::from(layer * SNAPSHOTS + piece.host_slot) * bytes;
                        let plane = KV_BYTES.len() + index;
                        places.extend((0..bytes).map(|b| (plane, device + b, host + b)));
                    }
                }
            }
        }
        places
    }

    fn check(&self, places: &[(usize, u64, u64)]) {
        let (device, host) = self.memory.regions();
        let (device, host) = (all_bytes(device), all_bytes(host));
        for &(plane, d, h) in places {
            let (found, wanted) = (device[plane][d as usize], host[plane][h as usize]);
            assert_eq!(found, wanted, "plane {plane}, device {d}, host {h}");
        }
    }

    pub(crate) fn check_layer(&self, layer: usize, kv: &[KvPiece], state: &[StatePiece]) {
        self.check(&self.places(layer, kv, state, None));
    }

    pub(crate) fn check_window(&self, layer: usize, kv: &[KvPiece], k0: u32, width: u32) {
        if let LayerKind::Kv(index) = self.memory.planes().model_layers()[layer] {
            let buffer = u64::from((k0 + index) % width);
            self.check(&self.places(layer, kv, &[], Some(buffer)));
        }
    }

    fn all_places(&self, kv: &[KvPiece], state: &[StatePiece]) -> Vec<(usize, u64, u64)> {
        let layers = 0..self.layers();
        layers
            .flat_map(|layer| self.places(layer, kv, state, None))
            .collect()
    }

    pub(crate) fn bytes(&self, kv: &[KvPiece], state: &[StatePiece]) -> u64 {
        self.all_places(kv, state).len() as u64
    }

    /// The device bytes of pieces in all layers.
    pub(crate) fn snapshot(&self, kv: &[KvPiece], state: &[StatePiece]) -> Vec<u8> {
        let device = all_bytes(self.memory.regions().0);
        let places = self.all_places(kv, state);
        places
            .iter()
            .map(|&(plane, d, _)| device[plane][d as usize])
            .collect()
    }

    /// Flips a bit of the first byte on the host that pieces have in a plane, in the last layer;
    /// the result flips it back.
    #[expect(unsafe_code, reason = "test memory")]
    pub(crate) fn corrupt_host(
        &self,
        plane: usize,
        kv: &[KvPiece],
        state: &[StatePiece],
    ) -> impl Fn() + use<> {
        let places = self.all_places(kv, state);
        let of_plane = places.iter().rev().find(|place| place.0 == plane);
        let at = of_plane.unwrap().2 as usize;
        let region = self.memory.regions().1[plane].clone();
        let flip = move || {
            // SAFETY: inside the region; no copy of the test runs meanwhile.
            unsafe {
                let byte = pointer(&region).add(at);
                byte.write(byte.read() ^ 1);
            }
        };
        flip();
        flip
    }

    pub(crate) fn check_poisoned_but(&self, kv: &[KvPiece], state: &[StatePiece]) {
        let mut device = all_bytes(self.memory.regions().0);
        for (plane, at, _) in self.all_places(kv, state) {
            device[plane][at as usize] = POISON;
        }
        assert!(device.iter().flatten().all(|&byte| byte == POISON));
    }
}

/// Bytes that differ between places and planes.
fn fill(regions: &[Region], seed: u64) {
    for (plane, region) in (seed * 100..).zip(regions) {
        write(region, |at| {
            let mixed = (at + plane * 7919).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            (mixed >> 40) as u8 & 0x7F
        });
    }
}

fn pointer(region: &Region) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(region.address() as usize)
}

#[expect(unsafe_code, reason = "test memory")]
fn write(region: &Region, value: impl Fn(u64) -> u8) {
    for at in 0..region.bytes() {
        // SAFETY: inside the region; no copy of the test runs meanwhile.
        unsafe { pointer(region).add(at as usize).write(value(at)) };
    }
}

#[expect(unsafe_code, reason = "test memory")]
fn all_bytes(regions: &[Region]) -> Vec<Vec<u8>> {
    let bytes = |region: &Region| {
        let at = |at: u64| {
            // SAFETY: inside the region. A copy into another layer may run: volatile, byte by byte.
            unsafe { pointer(region).add(at as usize).read_volatile() }
        };
        (0..region.bytes()).map(at).collect()
    };
    regions.iter().map(bytes).collect()
}
