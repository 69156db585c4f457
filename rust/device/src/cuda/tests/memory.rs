//! Memory that is pinned, and when it is let go.

use super::*;

#[test]
fn memory_is_unpinned_last_first_and_before_the_context_goes() {
    let rig = Rig::new(true);
    rig.device
        .copy(Stream::Load, Mechanism::Gather, rig.load(1))
        .unwrap();
    let ticket = rig.device.record(Stream::Load).unwrap();
    let memory = HostMemory::new(3 * SMALL_PIECES + 5).unwrap();
    rig.device.register(&memory).unwrap();
    let Rig {
        fake,
        device,
        world,
    } = rig;
    let registered: Vec<_> = fake.pinned();
    assert!(registered.contains(&(memory.region().address(), 4 * SMALL_PIECES as usize)));
    drop((ticket, world, memory));
    fake.take_calls();
    drop(device);
    let calls = fake.take_calls();
    assert_eq!(fake.pinned(), []);
    assert_eq!(fake.streams(), []);
    assert_eq!(calls.last(), Some(&Call::ContextRelease));
    let at = |call: fn(&Call) -> bool| calls.iter().position(call).unwrap();
    let streams = at(|call| matches!(call, Call::StreamDestroy(_)));
    assert!(streams < at(|call| matches!(call, Call::Unregister(_))));
    let pieces: Vec<_> = calls
        .iter()
        .filter_map(|call| match call {
            Call::Unregister(address) => Some(*address),
            _ => None,
        })
        .collect();
    let small = &pieces[..pieces.len() - 1];
    assert!(small.windows(2).all(|pair| pair[0] > pair[1]), "{small:?}");
}

#[test]
fn what_still_runs_keeps_its_memory_for_ever() {
    let rig = Rig::new(true);
    let stream = rig.stream(Stream::Store);
    rig.fake.stick(stream);
    let copy = rig.layer(1, PlanKind::Store, 1);
    rig.device
        .copy(Stream::Store, Mechanism::Gather, copy)
        .unwrap();
    let Rig {
        fake,
        device,
        world,
    } = rig;
    let pinned = fake.pinned();
    world.fill_device();
    let held = world.snapshot(&pieces(PlanKind::Store)[..1], &[]);
    let memory = world.memory.clone();
    let run = copy_of_page(&memory);
    drop((device, world, memory));
    assert_eq!(fake.pinned(), pinned);
    assert!(fake.streams().contains(&stream));
    fake.unstick(stream);
    fake.run();
    #[expect(unsafe_code, reason = "memory that the device left behind")]
    // SAFETY: leaked with the device, as this test shows; nothing runs any more.
    let found = unsafe { std::slice::from_raw_parts(run.0 as *const u8, run.1) };
    assert_eq!(found, &held[..run.1]);
}

#[test]
fn a_compute_stream_that_still_runs_keeps_pinned_memory_for_ever() {
    let rig = Rig::new(true);
    rig.fake.stick(COMPUTE);
    let word = rig.device.word().unwrap();
    rig.device.wait_value(Stream::Compute, word, 0).unwrap();
    let pinned = rig.fake.pinned();
    let Rig {
        fake,
        device,
        world,
    } = rig;
    fake.take_calls();
    let began = monotonic_ns();
    drop((device, world));
    assert!(monotonic_ns() - began < 10 * DROP_WAIT_NS);
    assert_eq!(fake.pinned(), pinned);
    let waits_for_all = |call: &Call| matches!(call, Call::Unregister(_) | Call::FreePinned(_));
    assert!(!fake.take_calls().iter().any(waits_for_all));
    fake.unstick(COMPUTE);
    fake.run(); // the flag is still there
}

/// Address and length on the host of the first plane of the first page of a store.
fn copy_of_page(memory: &CopyMemory) -> (u64, usize) {
    let planes = memory.planes();
    let kv = pieces(PlanKind::Store)[..1].to_vec();
    let plan = planes
        .plan(PlanKind::Store, kv.into(), Box::default())
        .unwrap();
    let (plane, run) = plan.runs(LayerKind::Kv(0), 0).next().unwrap();
    let host = &memory.regions().1[plane];
    (
        host.address() + run.host,
        usize::try_from(run.bytes).unwrap(),
    )
}

/// Whether the process has memory at an address.
fn is_mapped(address: u64) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| {
        let (range, _) = line.split_once(' ').unwrap();
        let (first, end) = range.split_once('-').unwrap();
        let [first, end] = [first, end].map(|text| u64::from_str_radix(text, 16).unwrap());
        (first..end).contains(&address)
    })
}

#[test]
fn memory_that_cannot_be_unpinned_stays_mapped() {
    let rig = Rig::new(true);
    let before = rig.fake.pinned();
    let memory = HostMemory::new(5 * SMALL_PIECES).unwrap();
    let address = memory.region().address();
    let context = rig.device.context.clone();
    let registration = Registration::in_pieces(&context, &memory, SMALL_PIECES).unwrap();
    rig.fake.fail("host_unregister", 1, 901);
    drop((registration, memory));
    // The other pieces are unpinned.
    assert_eq!(rig.fake.pinned().len(), before.len() + 1);
    assert!(is_mapped(address));
}

#[test]
fn a_piece_that_cannot_be_pinned_undoes_those_before_it() {
    let rig = Rig::new(true);
    let pinned = rig.fake.pinned();
    let memory = HostMemory::new(5 * SMALL_PIECES).unwrap();
    for (call, nth) in [("host_register", 3), ("host_device_pointer", 2)] {
        rig.fake.fail(call, nth, 2);
        let context = rig.device.context.clone();
        let refused = Registration::in_pieces(&context, &memory, SMALL_PIECES).err();
        let Some(Error::Config {
            field, expected, ..
        }) = refused
        else {
            panic!("{call} was not refused");
        };
        assert_eq!(field, "host bytes");
        assert!(
            expected.contains(&format!("piece {nth} of 4096 bytes")),
            "{expected}"
        );
        assert_eq!(rig.fake.pinned(), pinned);
    }
}

#[test]
fn memory_elsewhere_is_refused() {
    let rig = Rig::new(true);
    let plain = |bytes| HostMemory::new(bytes).unwrap().region();
    let here = |bytes| device_memory(&rig.fake, bytes);
    let there = |bytes| device_memory(&Fake::new(true), bytes);
    let registered = |_| rig.world.memory.regions().1[0].clone();
    for (world, field) in [
        (World::with(plain, plain), "device region"),
        (World::with(there, plain), "device region"),
        (World::with(here, plain), "host region"),
        (World::with(here, here), "host region"),
    ] {
        let refused = rig.device.check(&world.memory);
        let Err(Error::Config { field: found, .. }) = refused else {
            panic!("{refused:?}");
        };
        assert_eq!(found, field);
    }
    assert!(registered(0).bytes() > 0 && rig.device.check(&rig.world.memory).is_ok());
}
