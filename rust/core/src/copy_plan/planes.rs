//! Registry of planes: every tensor that a page or a snapshot consists of, by shape and stride.
//! Copies iterate over it, never over a list of their own, so a new plane cannot be forgotten.

use crate::error::{Error, Result};

/// Largest flat page base plus one: bit 31 of a block-table entry is the LOW flag.
const MAX_FLAT_PAGES: u64 = 1 << 31;

/// What KV planes have in common. Host pages are `[layers, host_pages, host_page_tokens, bytes]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvShape {
    /// Layers with KV (L).
    pub layers: u32,
    /// Raw pages on the device (N), or slots.
    pub pages: u32,
    /// Tokens of a device page; `max_context` in slot mode.
    pub page_tokens: u32,
    /// Pages in host memory.
    pub host_pages: u32,
    /// Tokens of a host page, at most `page_tokens`.
    pub host_page_tokens: u32,
}

/// One KV tensor: device `[layers, pages, page_tokens, token_bytes]`, tokens of a page contiguous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvPlane {
    /// Unique name: `k`, `v`, `k_scale`, ...
    pub name: String,
    /// Bytes of one token in one layer.
    pub token_bytes: u64,
    /// Bytes from a layer to the next on the device.
    pub layer_stride: u64,
    /// Bytes from a page to the next on the device.
    pub page_stride: u64,
}

/// What state planes have in common; all zero without linear-attention layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateShape {
    /// Layers with state.
    pub layers: u32,
    /// Slots on the device.
    pub slots: u32,
    /// Snapshot slots in host memory.
    pub snapshots: u32,
}

/// One state tensor: device `[layers, slots, bytes]`, host `[layers, snapshots, bytes]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatePlane {
    /// Unique name: `recurrent`, `conv`, ...
    pub name: String,
    /// Bytes of one slot in one layer.
    pub bytes: u64,
    /// Bytes from a layer to the next on the device.
    pub layer_stride: u64,
    /// Bytes from a slot to the next on the device.
    pub slot_stride: u64,
}

/// What a layer of the model keeps, and its index among the layers of that kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Attention: KV.
    Kv(u32),
    /// Linear attention: state.
    State(u32),
}

/// Validated registry.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::struct_field_names, reason = "the fields are the planes")]
pub struct Planes {
    kv: KvShape,
    kv_planes: Vec<KvPlane>,
    state: StateShape,
    state_planes: Vec<StatePlane>,
    model_layers: Vec<LayerKind>,
}

impl Planes {
    /// Checks shapes, strides and the layer list; every extent fits 64 bits afterwards.
    ///
    /// Fails with `Config` that names the plane and the field.
    pub fn new(
        kv: KvShape,
        kv_planes: Vec<KvPlane>,
        state: StateShape,
        state_planes: Vec<StatePlane>,
        model_layers: Vec<LayerKind>,
    ) -> Result<Self> {
        let planes = Self {
            kv,
            kv_planes,
            state,
            state_planes,
            model_layers,
        };
        planes.check_shapes()?;
        planes.check_names()?;
        planes.check_layers()?;
        for plane in &planes.kv_planes {
            planes.check_kv_plane(plane)?;
        }
        for plane in &planes.state_planes {
            planes.check_state_plane(plane)?;
        }
        Ok(planes)
    }

    fn check_shapes(&self) -> Result<()> {
        let kv = &self.kv;
        let flat = u64::from(kv.layers) * u64::from(kv.pages);
        if flat > MAX_FLAT_PAGES {
            let expected = format!("layers * pages <= {MAX_FLAT_PAGES}: page bases have 31 bits");
            return Err(Error::config("pages", kv.pages, expected));
        }
        let sizes = [
            ("pages", kv.pages),
            ("page_tokens", kv.page_tokens),
            ("host_page_tokens", kv.host_page_tokens),
        ];
        if let Some((field, value)) = sizes.into_iter().find(|&(_, v)| kv.layers > 0 && v == 0) {
            return Err(Error::config(field, value, "at least 1"));
        }
        if kv.host_page_tokens > kv.page_tokens {
            let expected = format!("at most page_tokens = {}", kv.page_tokens);
            return Err(Error::config(
                "host_page_tokens",
                kv.host_page_tokens,
                expected,
            ));
        }
        let kinds = [
            ("kv_planes", kv.layers, self.kv_planes.len()),
            ("state_planes", self.state.layers, self.state_planes.len()),
        ];
        for (field, layers, planes) in kinds {
            if (layers == 0) != (planes == 0) {
                let expected = format!("planes exactly if there are layers; there are {layers}");
                return Err(Error::config(field, planes, expected));
            }
        }
        Ok(())
    }

    fn check_names(&self) -> Result<()> {
        let mut names: Vec<_> = (0..self.len()).map(|plane| self.name(plane)).collect();
        names.sort_unstable();
        match names.windows(2).find(|pair| pair[0] == pair[1]) {
            None => Ok(()),
            Some(pair) => Err(Error::config("plane", pair[0], "a name of its own")),
        }
    }

    fn check_layers(&self) -> Result<()> {
        let (mut kv, mut state) = (0, 0);
        for (index, layer) in self.model_layers.iter().enumerate() {
            let (next, at) = match layer {
                LayerKind::Kv(at) => (&mut kv, at),
                LayerKind::State(at) => (&mut state, at),
            };
            if at != next {
                let expected = format!("index {next}: layers of a kind are numbered in order");
                let value = format_args!("{layer:?} at {index}");
                return Err(Error::config("model_layers", value, expected));
            }
            *next += 1;
        }
        if (kv, state) != (self.kv.layers, self.state.layers) {
            let expected = format!(
                "{} KV and {} state layers",
                self.kv.layers, self.state.layers
            );
            let value = format_args!("{kv} and {state}");
            return Err(Error::config("model_layers", value, expected));
        }
        Ok(())
    }

    fn check_kv_plane(&self, plane: &KvPlane) -> Result<()> {
        let kv = &self.kv;
        let page = u64::from(kv.page_tokens).checked_mul(plane.token_bytes);
        let host = [kv.layers, kv.host_pages, kv.host_page_tokens];
        let strides = Strides {
            layers: kv.layers,
            layer_stride: plane.layer_stride,
            units: kv.pages,
            unit_stride: plane.page_stride,
            unit_bytes: page,
        };
        strides.check(&plane.name, plane.token_bytes, &host)
    }

    fn check_state_plane(&self, plane: &StatePlane) -> Result<()> {
        let host = [self.state.layers, self.state.snapshots];
        let strides = Strides {
            layers: self.state.layers,
            layer_stride: plane.layer_stride,
            units: self.state.slots,
            unit_stride: plane.slot_stride,
            unit_bytes: Some(plane.bytes),
        };
        strides.check(&plane.name, plane.bytes, &host)
    }

    /// Common shape of the KV planes.
    pub fn kv_shape(&self) -> &KvShape {
        &self.kv
    }

    /// Common shape of the state planes.
    pub fn state_shape(&self) -> &StateShape {
        &self.state
    }

    /// KV planes, indices 0 and up.
    pub fn kv_planes(&self) -> &[KvPlane] {
        &self.kv_planes
    }

    /// State planes; their indices follow those of the KV planes.
    pub fn state_planes(&self) -> &[StatePlane] {
        &self.state_planes
    }

    /// What every layer of the model keeps.
    pub fn model_layers(&self) -> &[LayerKind] {
        &self.model_layers
    }

    /// Number of planes.
    pub fn len(&self) -> usize {
        self.kv_planes.len() + self.state_planes.len()
    }

    /// Whether there is nothing to copy at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Name of a plane by index; empty for an index that is none.
    pub fn name(&self, plane: usize) -> &str {
        let state = plane.wrapping_sub(self.kv_planes.len());
        let kv = self.kv_planes.get(plane).map(|p| p.name.as_str());
        kv.or_else(|| self.state_planes.get(state).map(|p| p.name.as_str()))
            .unwrap_or_default()
    }

    /// Bytes that plane `plane` spans on the (device, host).
    pub fn extent(&self, plane: usize) -> (u64, u64) {
        if let Some(kv) = self.kv_planes.get(plane) {
            let layers = u64::from(self.kv.layers);
            let last_page = u64::from(self.kv.pages.saturating_sub(1)) * kv.page_stride;
            let device = (layers - 1) * kv.layer_stride
                + last_page
                + u64::from(self.kv.page_tokens) * kv.token_bytes;
            return (device, layers * self.kv_host_layer_bytes(kv));
        }
        let index = plane.wrapping_sub(self.kv_planes.len());
        self.state_planes.get(index).map_or((0, 0), |state| {
            let layers = u64::from(self.state.layers);
            let last_slot = u64::from(self.state.slots.saturating_sub(1)) * state.slot_stride;
            let device = (layers - 1) * state.layer_stride + last_slot + state.bytes;
            (device, layers * self.state_host_layer_bytes(state))
        })
    }

    pub(super) fn kv_host_layer_bytes(&self, plane: &KvPlane) -> u64 {
        u64::from(self.kv.host_pages) * u64::from(self.kv.host_page_tokens) * plane.token_bytes
    }

    pub(super) fn state_host_layer_bytes(&self, plane: &StatePlane) -> u64 {
        u64::from(self.state.snapshots) * plane.bytes
    }
}

/// Strides of a device plane of pages or slots.
struct Strides {
    layers: u32,
    layer_stride: u64,
    units: u32,
    unit_stride: u64,
    unit_bytes: Option<u64>,
}

impl Strides {
    /// Units and layers do not overlap, and neither side leaves 64 bits.
    fn check(&self, name: &str, bytes: u64, host: &[u32]) -> Result<()> {
        if bytes == 0 {
            return Err(Error::config(
                "plane",
                name,
                "at least one byte a token or slot",
            ));
        }
        let host_bytes = host
            .iter()
            .try_fold(bytes, |product, &n| product.checked_mul(u64::from(n)));
        let layer_bytes = self.unit_bytes.and_then(|unit| {
            let last = u64::from(self.units.saturating_sub(1)).checked_mul(self.unit_stride)?;
            last.checked_add(unit)
        });
        let device_bytes = layer_bytes.and_then(|layer| {
            let last = u64::from(self.layers.saturating_sub(1)).checked_mul(self.layer_stride)?;
            last.checked_add(layer)
        });
        let (Some(unit), Some(layer), Some(_), Some(_)) =
            (self.unit_bytes, layer_bytes, device_bytes, host_bytes)
        else {
            return Err(Error::config(
                "plane",
                name,
                "a plane of less than 2^64 bytes",
            ));
        };
        let strides = [
            ("page or slot stride", self.unit_stride, unit),
            ("layer stride", self.layer_stride, layer),
        ];
        for (what, stride, least) in strides {
            if stride < least {
                let value = format_args!("{name} ({what} of {stride} bytes)");
                let expected = format!("at least {least} bytes, so that nothing overlaps");
                return Err(Error::config("plane", value, expected));
            }
        }
        Ok(())
    }
}
