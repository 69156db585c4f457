//! What waits for what, and what a failure takes with it.

use super::*;

#[test]
fn a_store_is_behind_the_forward_and_the_forward_behind_a_load() {
    let rig = Rig::new(false);
    let (store, load) = (rig.stream(Stream::Store), rig.stream(Stream::Load));
    let after = rig.device.record(Stream::Compute).unwrap();
    rig.device.wait(Stream::Store, &after).unwrap();
    let copy = rig.layer(1, PlanKind::Store, 1);
    rig.device
        .copy(Stream::Store, Mechanism::Gather, copy)
        .unwrap();
    let stored = rig.device.record(Stream::Store).unwrap();
    rig.device
        .copy(Stream::Load, Mechanism::Gather, rig.load(2))
        .unwrap();
    let loaded = rig.device.record(Stream::Load).unwrap();
    rig.device.join(&loaded, Duration::ZERO).unwrap();
    let calls = rig.fake.take_calls();
    let event = |ticket: &Ticket| ticket.event::<Event>().unwrap().raw;
    let [first, .., last] = &calls[..] else {
        panic!("{calls:?}");
    };
    assert_eq!(*first, Call::Record(event(&after), COMPUTE));
    assert_eq!(calls[1], Call::Wait(store, event(&after)));
    assert!(matches!(calls[2], Call::Launch(stream, ..) if stream == store));
    assert_eq!(calls[3], Call::Record(event(&stored), store));
    assert!(matches!(calls[4], Call::Launch(stream, ..) if stream == load));
    assert_eq!(calls[5], Call::Record(event(&loaded), load));
    assert_eq!(*last, Call::Wait(COMPUTE, event(&loaded)));
    assert_eq!(calls.len(), 7);
    for ticket in [&after, &stored, &loaded] {
        assert_eq!(rig.progress(ticket), Progress::Pending);
    }
    rig.fake.run();
    for ticket in [&after, &stored, &loaded] {
        assert_eq!(rig.progress(ticket), Progress::Done);
    }
    // Over, and known to be: nothing to wait for.
    rig.device.join(&loaded, Duration::ZERO).unwrap();
    assert_eq!(rig.fake.take_calls(), []);
}

/// Whether the store carried what the forward wrote before it, in an order drawn by `seed`.
fn stores_what_was_written(seed: u64, wait: bool) -> bool {
    let rig = Rig::new(false);
    rig.world.fill_device();
    let copy = rig.layer(1, PlanKind::Store, 1);
    let transfer = copy.transfers(Mechanism::Plain).next().unwrap().unwrap();
    let (device, host) = (
        transfer.device.address() + transfer.run.device,
        transfer.host.address() + transfer.run.host,
    );
    rig.fake.compute(device, b"written");
    let after = rig.device.record(Stream::Compute).unwrap();
    if wait {
        rig.device.wait(Stream::Store, &after).unwrap();
    }
    rig.device
        .copy(Stream::Store, Mechanism::Gather, copy)
        .unwrap();
    let mut draw = seed;
    loop {
        draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        if !rig.fake.step(draw >> 33) {
            break;
        }
    }
    #[expect(unsafe_code, reason = "test memory")]
    // SAFETY: inside the host region; nothing runs any more.
    let found = unsafe { (host as *const [u8; 7]).read() };
    found == *b"written"
}

#[test]
fn a_store_carries_what_was_written_before_it_in_every_legal_order() {
    let seeds = || 0..64_u64;
    assert!(seeds().all(|seed| stores_what_was_written(seed, true)));
    assert!(!seeds().all(|seed| stores_what_was_written(seed, false)));
}

#[test]
fn what_is_refused_at_once_is_not_enqueued() {
    let rig = Rig::new(true);
    for (call, how, name) in [
        ("memcpy_to_device", Mechanism::Plain, "cuMemcpyHtoDAsync"),
        ("launch_kernel", Mechanism::Gather, "cuLaunchKernel"),
    ] {
        rig.fake.fail(call, 0, INVALID_VALUE);
        let refused = rig.device.copy(Stream::Load, how, rig.load(1)).unwrap_err();
        let text = "invalid argument (CUDA error 1)".to_owned();
        assert_eq!(refused, Error::Device { call: name, text });
        assert_eq!(rig.fake.take_calls(), []);
        let ticket = rig.device.record(Stream::Load).unwrap();
        assert_eq!(rig.progress(&ticket), Progress::Done);
        rig.fake.take_calls();
    }
}

#[test]
fn what_is_refused_halfway_fails_behind_its_ticket_and_alone() {
    let rig = Rig::new(false);
    let device = &rig.device;
    rig.fake.fail("memcpy_to_device", 2, INVALID_VALUE);
    device
        .copy(Stream::Load, Mechanism::Plain, rig.load(1))
        .unwrap();
    let calls = rig.fake.take_calls();
    assert_eq!(calls.len(), 2, "two of its runs are enqueued: {calls:?}");
    device
        .copy(Stream::Load, Mechanism::Gather, rig.load(2))
        .unwrap();
    let first = device.record(Stream::Load).unwrap();
    rig.fake.fail("memcpy_batch", 0, INVALID_VALUE);
    device
        .copy(Stream::Load, Mechanism::Batch, rig.load(3))
        .unwrap();
    let second = device.record(Stream::Load).unwrap();
    device
        .copy(Stream::Load, Mechanism::Gather, rig.load(4))
        .unwrap();
    let third = device.record(Stream::Load).unwrap();
    assert_eq!(rig.progress(&first), Progress::Pending);
    rig.fake.run();
    let text = "cuMemcpyHtoDAsync: invalid argument (CUDA error 1)".to_owned();
    assert_eq!(texts(&rig.progress(&first)), [(1, text)]);
    let text = "cuMemcpyBatchAsync: invalid argument (CUDA error 1)".to_owned();
    assert_eq!(texts(&rig.progress(&second)), [(3, text)]);
    assert_eq!(rig.progress(&third), Progress::Done);
}

#[test]
fn an_error_of_the_gpu_fails_what_is_pending_on_the_stream() {
    let rig = Rig::new(false);
    let device = &rig.device;
    let tickets = [1, 2].map(|job| {
        device
            .copy(Stream::Load, Mechanism::Gather, rig.load(job))
            .unwrap();
        device.record(Stream::Load).unwrap()
    });
    device
        .copy(Stream::Window, Mechanism::Gather, rig.load(3))
        .unwrap();
    let other = device.record(Stream::Window).unwrap();
    rig.fake.fail("event_query", 0, 700);
    let text = "cuEventQuery: an illegal memory access was encountered (CUDA error 700)";
    for (ticket, job) in tickets.iter().zip([1, 2]) {
        assert_eq!(texts(&rig.progress(ticket)), [(job, text.to_owned())]);
    }
    assert_eq!(rig.progress(&other), Progress::Pending);
    rig.fake.fail("event_query", 0, 700);
    let compute = device.record(Stream::Compute).unwrap();
    assert_eq!(rig.progress(&compute), Progress::Lost(text.to_owned()));
    rig.fake.run();
    assert_eq!(rig.progress(&other), Progress::Done);
}

#[test]
fn an_abandoned_stream_loses_its_tickets_and_a_fresh_one_serves() {
    let rig = Rig::new(true);
    let (device, fake) = (&rig.device, &rig.fake);
    let old = rig.stream(Stream::Load);
    device
        .copy(Stream::Load, Mechanism::Gather, rig.load(1))
        .unwrap();
    let done = device.record(Stream::Load).unwrap();
    fake.stick(old);
    device
        .copy(Stream::Load, Mechanism::Gather, rig.load(2))
        .unwrap();
    let lost = device.record(Stream::Load).unwrap();
    device.abandon(Stream::Load);
    assert_eq!(rig.progress(&done), Progress::Done);
    assert!(matches!(rig.progress(&lost), Progress::Lost(_)));
    assert_ne!(rig.stream(Stream::Load), old);
    fake.take_calls();
    device.join(&lost, Duration::ZERO).unwrap();
    assert_eq!(
        fake.take_calls(),
        [],
        "nobody waits for what may never come"
    );
    device
        .copy(Stream::Load, Mechanism::Gather, rig.load(3))
        .unwrap();
    let fresh = device.record(Stream::Load).unwrap();
    assert_eq!(rig.progress(&fresh), Progress::Done);
    // Its memory is kept until it has ended after all.
    assert!(fake.streams().contains(&old));
    fake.unstick(old);
    fake.run();
    device.abandon(Stream::Window);
    assert!(!fake.streams().contains(&old));
    assert!(matches!(rig.progress(&lost), Progress::Lost(_)));
}

#[test]
fn without_a_fresh_stream_copies_are_refused() {
    let rig = Rig::new(true);
    rig.fake.fail("stream_create", 0, 2);
    rig.device.abandon(Stream::Load);
    let copy = rig
        .device
        .copy(Stream::Load, Mechanism::Gather, rig.load(1));
    assert!(matches!(
        copy,
        Err(Error::Device {
            call: "cuStreamCreate",
            ..
        })
    ));
    assert!(rig.device.record(Stream::Load).is_err());
    rig.device
        .copy(Stream::Window, Mechanism::Gather, rig.load(1))
        .unwrap();
}

#[test]
fn tickets_words_and_streams_of_others_are_refused() {
    let (one, other) = (Rig::new(true), Rig::new(true));
    let ticket = other.device.record(Stream::Load).unwrap();
    assert!(one.device.wait(Stream::Load, &ticket).is_err());
    assert!(one.device.query(&ticket).is_err());
    assert!(one.device.write_value(Stream::Load, Word(0), 1).is_err());
    let copy = one
        .device
        .copy(Stream::Compute, Mechanism::Plain, one.load(1));
    assert!(matches!(
        copy,
        Err(Error::InvalidRequest {
            field: "stream",
            ..
        })
    ));
}

#[test]
fn flags_are_waited_for_before_they_are_written_and_wrap() {
    let rig = Rig::new(false);
    let device = &rig.device;
    let words = [(); 3].map(|()| device.word().unwrap());
    let mut value = u32::MAX - 1;
    device.write_value(Stream::Load, words[1], value).unwrap();
    rig.fake.run();
    for _ in 0..4 {
        value = value.wrapping_add(1);
        device.wait_value(Stream::Compute, words[1], value).unwrap();
        let reader = device.record(Stream::Compute).unwrap();
        device.write_value(Stream::Window, words[0], value).unwrap();
        rig.fake.run();
        assert_eq!(rig.progress(&reader), Progress::Pending);
        device.write_value(Stream::Window, words[1], value).unwrap();
        rig.fake.run();
        assert_eq!(rig.progress(&reader), Progress::Done);
    }
}

#[test]
fn injected_failures_and_delays_meet_the_copy_they_are_for() {
    let rig = Rig::new(false);
    let device = &rig.device;
    let delay = Injection::Delay(Duration::from_millis(1));
    device.inject(Stream::Load, 1, Injection::Fail).unwrap();
    device.inject(Stream::Load, 2, delay).unwrap();
    assert!(device.inject(Stream::Load, 0, Injection::Hang).is_err());
    let tickets = [1, 2, 3].map(|job| {
        device
            .copy(Stream::Load, Mechanism::Gather, rig.load(job))
            .unwrap();
        device.record(Stream::Load).unwrap()
    });
    let delays = |calls: Vec<Call>| {
        calls
            .iter()
            .filter(|c| matches!(c, Call::HostFn(_)))
            .count()
    };
    assert_eq!(delays(rig.fake.take_calls()), 1);
    rig.fake.run();
    assert_eq!(rig.progress(&tickets[0]), Progress::Done);
    let text = "injected failure".to_owned();
    assert_eq!(texts(&rig.progress(&tickets[1])), [(2, text)]);
    assert_eq!(rig.progress(&tickets[2]), Progress::Done);
}
