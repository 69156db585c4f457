//! The bytes of a plan by every mechanism.

use super::*;

/// The bytes of spans as (host, device) pairs.
fn bytes_of(spans: &[Span]) -> Vec<(u64, u64)> {
    let bytes = |s: &Span| {
        let (host, device) = (s.host, s.device);
        (0..s.bytes).map(move |at| (host + at, device + at))
    };
    let mut all: Vec<_> = spans.iter().flat_map(bytes).collect();
    all.sort_unstable();
    all
}

#[test]
fn every_mechanism_is_given_exactly_the_bytes_of_the_plan() {
    let rig = Rig::new(false);
    for kind in [
        PlanKind::Load,
        PlanKind::Store,
        PlanKind::Window { width: 2 },
    ] {
        for layer in 0..rig.world.layers() {
            let copy = rig.layer(1, kind, layer);
            let (device, host) = rig.world.memory.regions();
            let whole = |(plane, run): (usize, Run)| Span {
                host: host[plane].address() + run.host,
                mapped: 0,
                device: device[plane].address() + run.device,
                bytes: run.bytes,
            };
            let planned: Vec<_> = copy.plan.runs(copy.layer, copy.k).map(whole).collect();
            let expected = bytes_of(&planned);
            assert_eq!(expected.len() as u64, copy.bytes());
            for how in ALL {
                let spans = rig.device.spans(how, &copy).unwrap();
                assert_eq!(bytes_of(&spans), expected, "{how:?} {kind:?} {layer}");
                for span in spans {
                    assert_eq!(span.mapped, span.host + super::fake::MAPPED);
                    assert!(how != Mechanism::Gather || span.bytes <= PIECE_BYTES);
                }
            }
        }
    }
}

#[test]
fn long_pieces_are_cut_for_the_kernel_and_edges_for_all() {
    let rig = Rig::new(false);
    let memory = HostMemory::new(1 << 20).unwrap();
    let context = rig.device.context.clone();
    let registration = Registration::in_pieces(&context, &memory, 1 << 18).unwrap();
    let first = memory.region().address() + 100;
    let lengths = |most| -> Vec<u64> {
        let parts = registration.parts(first, 300_000, most);
        parts.map(|part| part.bytes).collect()
    };
    assert_eq!(lengths(u64::MAX), [262_044, 300_000 - 262_044]);
    let cut = lengths(PIECE_BYTES);
    assert_eq!(cut.iter().sum::<u64>(), 300_000);
    // Whole blocks, the piece's end, what is left of that block, and the rest.
    assert_eq!(
        cut,
        [65_536, 65_536, 65_536, 65_436, 100, 300_000 - 262_144]
    );
}

#[test]
fn the_grid_gives_a_piece_the_threads_it_feeds() {
    assert_eq!(grid(1, 1), (1, 32));
    assert_eq!(grid(1000, 1000 * 2048), (16, 32));
    assert_eq!(grid(1000, 1000 * 4096), (16, 64));
    assert_eq!(grid(40, 40 * 4096), (3, 64));
    assert_eq!(grid(5, 5 * 65_536), (5, 1024));
    assert_eq!(grid(500, 500 * 65_536), (16, 1024));
    assert_eq!(grid(3, 3 * 196), (1, 32));
}

#[test]
fn lists_are_kept_until_their_kernels_have_run_and_then_used_again() {
    let rig = Rig::new(false);
    let pinned = rig.fake.pinned().len();
    rig.world.fill_host();
    rig.world.poison_device();
    for round in 0..3 {
        let mut tickets = Vec::new();
        for layer in 0..rig.world.layers() {
            let copy = rig.layer(round, PlanKind::Load, layer);
            rig.device
                .copy(Stream::Load, Mechanism::Gather, copy)
                .unwrap();
            tickets.push(rig.device.record(Stream::Load).unwrap());
        }
        rig.fake.run();
        assert_eq!(rig.progress(tickets.last().unwrap()), Progress::Done);
    }
    for layer in 0..rig.world.layers() {
        let kind = PlanKind::Load;
        rig.world.check_layer(layer, &pieces(kind), &states(kind));
    }
    rig.world
        .check_poisoned_but(&pieces(PlanKind::Load), &states(PlanKind::Load));
    assert_eq!(rig.fake.pinned().len(), pinned);
}

#[test]
fn a_driver_without_batches_gathers_and_never_promises_them() {
    let fake = Fake::new(true);
    let rig = Rig::over(fake, false, |config| {
        config.thresholds = Some(only(Mechanism::Batch));
    });
    assert_eq!(rig.device.thresholds(), only(Mechanism::Gather));
    rig.device
        .copy(Stream::Load, Mechanism::Batch, rig.load(1))
        .unwrap();
    assert!(matches!(rig.fake.take_calls()[..], [Call::Launch(..)]));
}

#[test]
fn a_batch_says_where_its_sides_are() {
    let rig = Rig::new(true);
    rig.device
        .copy(Stream::Load, Mechanism::Batch, rig.load(1))
        .unwrap();
    let store = rig.layer(2, PlanKind::Store, 1);
    rig.device
        .copy(Stream::Store, Mechanism::Batch, store)
        .unwrap();
    let ordinal = i32::try_from(rig.fake.ordinal).unwrap();
    let expected = [true, false].map(|to_device| CopyAttributes::new(to_device, ordinal));
    assert_eq!(rig.fake.attributes(), expected);
    assert_eq!(size_of::<CopyAttributes>(), 24);
}

#[test]
fn lists_of_unequal_length_are_refused_before_any_driver_call() {
    let rig = Rig::new(true);
    let stream = rig.stream(Stream::Load);
    let entered = rig.device.context.enter().unwrap();
    for (host, device) in [(1, 2), (2, 1), (3, 3)] {
        let (mut host, mut device) = (vec![0; host], vec![0; device]);
        let refused = entered.copy_batch(stream, true, &mut host, &mut device, &mut [1, 1]);
        assert!(matches!(
            refused,
            Err(Error::Device {
                call: "cuMemcpyBatchAsync",
                ..
            })
        ));
    }
    assert_eq!(rig.fake.take_calls(), []);
}

#[test]
fn the_queue_moves_every_plane_both_ways_by_every_mechanism() {
    for how in ALL {
        let rig = Rig::with(Fake::new(true), |config| {
            config.thresholds = Some(only(how));
        });
        let (sender, outcomes) = channel();
        let sender = std::sync::Mutex::new(sender);
        let config = |copy_check| QueueConfig {
            deadline: LONG,
            max_jobs: 8,
            copy_check,
            on_done: Box::new(|_, _| {}),
        };
        let memory = rig.world.memory.clone();
        let refused = CopyQueue::new(rig.device.clone(), memory.clone(), config(true));
        let refused = refused.err();
        assert!(matches!(
            refused,
            Some(Error::Config {
                field: "copy_check",
                ..
            })
        ));
        let told = QueueConfig {
            on_done: Box::new(move |job, outcome| {
                sender.lock().unwrap().send((job, outcome)).unwrap();
            }),
            ..config(false)
        };
        let queue = CopyQueue::new(rig.device.clone(), memory, told).unwrap();
        let (kv, state) = (pieces(PlanKind::Store), states(PlanKind::Store));
        rig.world.fill_device();
        let before = rig.world.snapshot(&kv, &state);
        let store = StoreJob {
            job: 1,
            kv: kv.clone(),
            state: state.clone(),
        };
        let after = queue.record_compute().unwrap();
        queue.submit_store(store, after).unwrap();
        queue.drain(LONG).unwrap();
        rig.world.poison_device();
        let load = LoadJob {
            job: 2,
            kv: kv.clone(),
            state: state.clone(),
        };
        let window = WindowJob {
            job: 3,
            pieces: vec![KvPiece {
                device_page: 1,
                ..kv[1]
            }],
            k0: 0,
            width: 2,
        };
        let step = queue.start_step(vec![load], Some(window.clone())).unwrap();
        for layer in 0..rig.world.layers() {
            step.before_layer(layer).unwrap();
            rig.world.check_layer(layer, &kv, &state);
            rig.world.check_window(layer, &window.pieces, 0, 2);
            step.after_layer(layer).unwrap();
        }
        assert_eq!(step.finish().unwrap(), Vec::<u64>::new());
        assert_eq!(rig.world.snapshot(&kv, &state), before);
        for job in 1..=3 {
            let told = outcomes.recv_timeout(LONG).unwrap();
            assert!(
                told.1 == CopyOutcome::Done && (1..=3).contains(&told.0),
                "{job}"
            );
        }
        let counted = queue.stats();
        for stream in [counted.load, counted.window, counted.store] {
            let others: u64 = stream.copies.iter().sum::<u64>() - stream.copies[how as usize];
            assert_eq!(others, 0, "{how:?}: {:?}", stream.copies);
            assert!(stream.copies[how as usize] > 0);
        }
        assert!(matches!(
            rig.world.memory.planes().model_layers()[1],
            LayerKind::Kv(0)
        ));
    }
}
