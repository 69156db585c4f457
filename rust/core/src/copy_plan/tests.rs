//! Plans against byte lists that are written out one by one.
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails by panicking, as a test does"
)]

use proptest::prelude::*;

use super::*;
use crate::host::HostPage;

const KV_BYTES: [u64; 3] = [3, 8, 1];
const STATE_BYTES: [u64; 2] = [5, 2];

#[derive(Clone, Copy, Debug)]
struct Shape {
    kv: KvShape,
    state: StateShape,
    /// Unused bytes behind every page and slot of a device plane.
    gap: u64,
}

impl Shape {
    fn planes(&self) -> Planes {
        let kv_planes = KV_BYTES.iter().enumerate().map(|(index, &token_bytes)| {
            let page_stride = u64::from(self.kv.page_tokens) * token_bytes + self.gap;
            KvPlane {
                name: format!("kv{index}"),
                token_bytes,
                page_stride,
                layer_stride: page_stride * u64::from(self.kv.pages),
            }
        });
        let state_planes = STATE_BYTES.iter().enumerate().map(|(index, &bytes)| {
            let slot_stride = bytes + self.gap;
            StatePlane {
                name: format!("state{index}"),
                bytes,
                slot_stride,
                layer_stride: slot_stride * u64::from(self.state.slots),
            }
        });
        let kv_layers = (0..self.kv.layers).map(LayerKind::Kv);
        let state_layers = (0..self.state.layers).map(LayerKind::State);
        let layers = state_layers.chain(kv_layers).collect();
        let (kv_planes, state_planes) = (kv_planes.collect(), state_planes.collect());
        Planes::new(self.kv, kv_planes, self.state, state_planes, layers).unwrap()
    }

    /// Every byte of a layer as (plane, device, host).
    fn bytes_of(
        &self,
        layer: LayerKind,
        k: u64,
        width: Option<u32>,
        kv: &[KvPiece],
        state: &[StatePiece],
    ) -> Vec<(usize, u64, u64)> {
        let mut bytes = Vec::new();
        match layer {
            LayerKind::Kv(layer) => {
                let layer = u64::from(layer);
                let add = width.map_or(layer, |width| k % u64::from(width));
                for (plane, size) in KV_BYTES.into_iter().enumerate() {
                    for piece in kv {
                        for token in 0..u64::from(piece.tokens) {
                            let flat =
                                u64::from(piece.device_page) + add * u64::from(self.kv.pages);
                            let page = u64::from(self.kv.page_tokens) * size + self.gap;
                            let at = u64::from(piece.device_token) + token;
                            let host_page = layer * u64::from(self.kv.host_pages)
                                + u64::from(piece.host_page.0);
                            let host_at = host_page * u64::from(self.kv.host_page_tokens) + token;
                            let byte = |b| (plane, flat * page + at * size + b, host_at * size + b);
                            bytes.extend((0..size).map(byte));
                        }
                    }
                }
            }
            LayerKind::State(layer) => {
                for (index, size) in STATE_BYTES.into_iter().enumerate() {
                    for piece in state {
                        let slot = u64::from(layer * self.state.slots + piece.device_slot);
                        let host = u64::from(layer * self.state.snapshots + piece.host_slot);
                        let plane = KV_BYTES.len() + index;
                        let byte = |b| (plane, slot * (size + self.gap) + b, host * size + b);
                        bytes.extend((0..size).map(byte));
                    }
                }
            }
        }
        bytes.sort_unstable();
        bytes
    }
}

fn expand(runs: impl Iterator<Item = (usize, Run)>) -> Vec<(usize, u64, u64)> {
    let bytes = runs.flat_map(|(plane, run)| {
        (0..run.bytes).map(move |byte| (plane, run.device + byte, run.host + byte))
    });
    let mut bytes: Vec<_> = bytes.collect();
    bytes.sort_unstable();
    bytes
}

#[derive(Clone, Debug)]
struct Case {
    shape: Shape,
    kind: PlanKind,
    kv: Vec<KvPiece>,
    state: Vec<StatePiece>,
}

/// Legal jobs: a random set of destinations with random sources, in random order.
fn case() -> impl Strategy<Value = Case> {
    let sizes = (
        1..6u32,
        1..5u32,
        1..4u32,
        1..6u32,
        1..3u32,
        0..3u64,
        0..3u32,
    );
    let sizes = (sizes, 0..3usize, any::<u64>(), 1..6u32);
    sizes.prop_map(
        |((layers, pages, host_tokens, host_pages, blocks, gap, states), which, seed, w)| {
            let shape = Shape {
                kv: KvShape {
                    layers,
                    pages,
                    page_tokens: host_tokens * blocks,
                    host_pages,
                    host_page_tokens: host_tokens,
                },
                state: StateShape {
                    layers: 2,
                    slots: 1 + states,
                    snapshots: 3,
                },
                gap,
            };
            let width = w.min(layers);
            let kind = [PlanKind::Load, PlanKind::Store, PlanKind::Window { width }][which];
            let mut seed = seed;
            let mut draw = |n: u32| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                u32::try_from(seed >> 33).unwrap() % n
            };
            let starts = match kind {
                PlanKind::Window { width } => layers / width,
                _ => 1,
            };
            let mut kv = Vec::new();
            for start in 0..starts {
                for page in 0..pages {
                    for block in 0..blocks {
                        let tokens = 1 + draw(host_tokens);
                        let host_page = match kind {
                            PlanKind::Store => u32::try_from(kv.len()).unwrap(),
                            _ => draw(host_pages),
                        };
                        if draw(3) > 0 && host_page < host_pages {
                            kv.push(KvPiece {
                                device_page: page + start * width * u32::from(starts > 1) * pages,
                                device_token: block * host_tokens,
                                host_page: HostPage(host_page),
                                tokens: if draw(3) > 0 { host_tokens } else { tokens },
                            });
                        }
                    }
                }
            }
            for last in (1..kv.len()).rev() {
                if draw(2) > 0 {
                    kv.swap(last, draw(u32::try_from(last).unwrap()) as usize);
                }
            }
            let state = match kind {
                PlanKind::Window { .. } => Vec::new(),
                _ => (0..shape.state.slots.min(3))
                    .map(|slot| StatePiece {
                        device_slot: slot,
                        host_slot: slot,
                    })
                    .collect(),
            };
            Case {
                shape,
                kind,
                kv,
                state,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// HST-16.
    #[test]
    fn runs_cover_the_bytes_asked_for_once_and_are_merged(case in case(), first in 0..1000u64) {
        let Case { shape, kind, kv, state } = case;
        let planes = shape.planes();
        let plan = planes.plan(kind, kv.clone().into(), state.clone().into()).unwrap();
        let width = match kind {
            PlanKind::Window { width } => Some(width),
            _ => None,
        };
        for (k, &layer) in (first..).zip(planes.model_layers()) {
            let wanted = shape.bytes_of(layer, k, width, &kv, &state);
            let runs: Vec<_> = plan.runs(layer, k).collect();
            prop_assert_eq!(expand(runs.iter().copied()), wanted.clone());
            prop_assert_eq!(expand(plan.gather(&planes, layer, k)), wanted.clone());
            prop_assert_eq!(plan.layer_bytes(layer), wanted.len() as u64);
            prop_assert_eq!(plan.layer_runs(layer), runs.len() as u64);
            prop_assert_eq!(plan.layer_pieces(layer), plan.gather(&planes, layer, k).count() as u64);
            for (a, one) in &runs {
                let (device, host) = planes.extent(*a);
                prop_assert!(one.device + one.bytes <= device && one.host + one.bytes <= host);
                for (b, other) in &runs {
                    let touch = one.device + one.bytes == other.device
                        && one.host + one.bytes == other.host;
                    prop_assert!(a != b || !touch, "{:?} and {:?} are one run", one, other);
                }
            }
        }
    }

    #[test]
    fn a_plan_depends_on_its_input_alone(case in case()) {
        let Case { shape, kind, kv, state } = case;
        let planes = shape.planes();
        let runs = |kv: Vec<KvPiece>| -> Vec<(usize, Run)> {
            let plan = planes.plan(kind, kv.into(), state.clone().into()).unwrap();
            plan.runs(LayerKind::Kv(0), 0).collect()
        };
        let mut turned = kv.clone();
        turned.reverse();
        prop_assert_eq!(runs(kv.clone()), runs(kv));
        prop_assert_eq!(runs(turned.clone()), runs(turned));
    }

    #[test]
    fn a_destination_named_twice_is_refused(case in case(), index in any::<prop::sample::Index>()) {
        let Case { shape, kind, mut kv, .. } = case;
        prop_assume!(!kv.is_empty());
        let twice = kv[index.index(kv.len())];
        kv.push(twice);
        let refused = shape.planes().check(kind, &[&kv], &[]);
        let is_overlap = matches!(refused, Err(Error::InvalidRequest { .. }));
        prop_assert!(is_overlap, "{:?}", refused);
    }
}

fn small() -> Shape {
    Shape {
        kv: KvShape {
            layers: 5,
            pages: 4,
            page_tokens: 8,
            host_pages: 6,
            host_page_tokens: 4,
        },
        state: StateShape {
            layers: 1,
            slots: 2,
            snapshots: 3,
        },
        gap: 0,
    }
}

fn piece(device_page: u32, device_token: u32, host_page: u32, tokens: u32) -> KvPiece {
    KvPiece {
        device_page,
        device_token,
        host_page: HostPage(host_page),
        tokens,
    }
}

#[test]
fn a_prefix_in_consecutive_host_pages_is_one_run_a_plane() {
    let planes = small().planes();
    let pieces = [piece(2, 4, 3, 4), piece(2, 0, 2, 4), piece(3, 0, 4, 3)];
    let plan = planes
        .plan(PlanKind::Load, pieces.into(), [].into())
        .unwrap();
    assert_eq!(plan.layer_runs(LayerKind::Kv(0)), KV_BYTES.len() as u64);
    assert_eq!(
        plan.layer_pieces(LayerKind::Kv(0)),
        3 * KV_BYTES.len() as u64
    );
}

#[test]
fn pieces_outside_the_registry_are_named() {
    let planes = small().planes();
    let window = PlanKind::Window { width: 2 };
    let refused = [
        (PlanKind::Load, piece(4, 0, 0, 4), "device_page"),
        (PlanKind::Store, piece(u32::MAX, 0, 0, 4), "device_page"),
        (PlanKind::Load, piece(0, 0, 6, 4), "host_page"),
        (PlanKind::Load, piece(0, 0, 0, 5), "tokens"),
        (PlanKind::Load, piece(0, 0, 0, 0), "tokens"),
        (PlanKind::Load, piece(0, 5, 0, 4), "device_token"),
        (PlanKind::Load, piece(0, u32::MAX, 0, 4), "device_token"),
        (window, piece(4, 0, 0, 4), "device_page"), // start 1 is not a multiple of 2
        (window, piece(16, 0, 0, 4), "device_page"), // start 4 leaves room for one layer
        (window, piece(u32::MAX, 0, 0, 4), "device_page"),
        (PlanKind::Window { width: 0 }, piece(0, 0, 0, 4), "width"),
        (PlanKind::Window { width: 6 }, piece(0, 0, 0, 4), "width"),
    ];
    for (kind, piece, named) in refused {
        let error = planes.plan(kind, [piece].into(), [].into()).err();
        let field = match &error {
            Some(Error::InvalidRequest { field, .. }) => *field,
            _ => "",
        };
        assert_eq!(field, named, "{error:?}");
    }
    let state = |device_slot, host_slot| StatePiece {
        device_slot,
        host_slot,
    };
    for (kind, state) in [
        (PlanKind::Load, state(2, 0)),
        (PlanKind::Store, state(0, 3)),
        (window, state(0, 0)),
    ] {
        assert!(planes.plan(kind, [].into(), [state].into()).is_err());
    }
    assert!(
        planes
            .plan(window, [piece(8 + 3, 4, 5, 4)].into(), [].into())
            .is_ok()
    );
}

#[test]
fn a_plane_beyond_64_bits_or_with_overlapping_strides_is_refused() {
    let shape = small();
    let with = |change: &dyn Fn(&mut KvPlane)| {
        let mut plane = KvPlane {
            name: "k".to_owned(),
            token_bytes: 2,
            layer_stride: 64,
            page_stride: 16,
        };
        change(&mut plane);
        let layers = (0..5).map(LayerKind::Kv).collect();
        Planes::new(
            shape.kv,
            vec![plane],
            StateShape::default(),
            Vec::new(),
            layers,
        )
    };
    assert!(with(&|_| ()).is_ok());
    let broken: [&dyn Fn(&mut KvPlane); 6] = [
        &|p| p.token_bytes = 0,
        &|p| p.token_bytes = 3,
        &|p| p.token_bytes = u64::MAX / 2,
        &|p| p.page_stride = 15,
        &|p| p.layer_stride = 63,
        &|p| p.layer_stride = u64::MAX / 3,
    ];
    for change in broken {
        assert!(matches!(
            with(change),
            Err(Error::Config { field: "plane", .. })
        ));
    }
}

#[test]
fn layers_must_be_numbered_in_order_and_names_differ() {
    let shape = small();
    let new = |layers: Vec<LayerKind>| {
        let full = shape.planes();
        let (kv, state) = (full.kv_planes().to_vec(), full.state_planes().to_vec());
        Planes::new(shape.kv, kv, shape.state, state, layers)
    };
    let mut layers = shape.planes().model_layers().to_vec();
    assert!(new(layers.clone()).is_ok());
    layers.swap(1, 2);
    assert!(new(layers.clone()).is_err());
    layers.truncate(1);
    assert!(new(layers).is_err());

    let full = shape.planes();
    let twin = [full.kv_planes()[0].clone(), full.kv_planes()[0].clone()];
    let layers = full.model_layers().to_vec();
    let state = full.state_planes().to_vec();
    let twice = Planes::new(shape.kv, twin.to_vec(), shape.state, state, layers);
    assert!(matches!(twice, Err(Error::Config { field: "plane", .. })));
}

#[test]
fn the_mechanism_follows_the_mean_run() {
    let measured = Thresholds {
        plain_bytes: 1000,
        batch_bytes: Some(100),
    };
    let chosen = |bytes, runs| measured.choose(bytes, runs);
    assert_eq!(chosen(1000, 1), Mechanism::Plain);
    assert_eq!(chosen(1999, 2), Mechanism::Batch);
    assert_eq!(chosen(200, 2), Mechanism::Batch);
    assert_eq!(chosen(199, 2), Mechanism::Gather);
    assert_eq!(chosen(0, 0), Mechanism::Gather);
    let no_batch = Thresholds {
        batch_bytes: None,
        ..measured
    };
    assert_eq!(no_batch.choose(500, 1), Mechanism::Gather);
}
