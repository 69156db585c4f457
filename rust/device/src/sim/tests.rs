//! The simulated device by itself.

use super::*;

fn kernel(name: &str, reads: &[(u64, u64)], writes: &[(u64, u64)], cost_ns: u64) -> Kernel {
    Kernel {
        name: name.to_owned(),
        reads: reads
            .iter()
            .map(|&(address, version)| Read {
                address,
                bytes: CELL,
                version,
                job: None,
            })
            .collect(),
        writes: writes
            .iter()
            .map(|&(address, version)| Write {
                address,
                bytes: CELL,
                version,
            })
            .collect(),
        cost_ns,
    }
}

fn run(sim: &SimDevice) {
    while sim.tick() {}
}

#[test]
fn a_kernel_that_finds_another_version_is_a_violation() {
    let sim = SimDevice::new(Box::new(|_| 1));
    sim.launch(kernel("writer", &[], &[(64, 7)], 5));
    sim.launch(kernel("reader", &[(64, 7)], &[], 5));
    run(&sim);
    assert_eq!((sim.violations(), sim.clock_ns()), (vec![], 10));
    sim.launch(kernel("late", &[(64, 8)], &[], 5));
    run(&sim);
    assert_eq!(sim.violations().len(), 1);
}

#[test]
fn use_of_unmapped_memory_is_a_violation() {
    let sim = SimDevice::new(Box::new(|_| 1));
    sim.unmap(0, 64);
    sim.launch(kernel("reader", &[(8, 0)], &[], 1));
    run(&sim);
    assert_eq!(sim.violations().len(), 1);
}

#[test]
fn a_stream_waits_for_a_recorded_ticket_and_for_a_word() {
    let sim = SimDevice::new(Box::new(|_| 1));
    let word = sim.word().unwrap();
    // Legal before anybody has enqueued the write.
    sim.wait_value(Stream::Load, word, 3).unwrap();
    let behind = sim.record(Stream::Load).unwrap();
    assert!(!sim.tick());
    assert_eq!(sim.query(&behind).unwrap(), Progress::Pending);
    sim.launch(kernel("first", &[], &[(8, 1)], 100));
    sim.write_value(Stream::Compute, word, 4).unwrap();
    run(&sim);
    assert_eq!(sim.query(&behind).unwrap(), Progress::Done);
    assert!(sim.wait_value(Stream::Load, Word(9), 1).is_err());

    sim.wait(Stream::Store, &behind).unwrap();
    let last = sim.record(Stream::Store).unwrap();
    run(&sim);
    assert_eq!(sim.query(&last).unwrap(), Progress::Done);
}

#[test]
fn words_compare_cyclically() {
    assert!(word_reached(5, 5) && word_reached(6, 5) && !word_reached(4, 5));
    assert!(word_reached(2, u32::MAX) && !word_reached(u32::MAX, 2));
    assert!(!word_reached(0, 1) && word_reached(0, 0));
}

#[test]
fn tickets_of_another_device_are_refused() {
    let sim = SimDevice::new(Box::new(|_| 1));
    let other = crate::cpu::CpuDevice::new(None).unwrap();
    let ticket = other.record(Stream::Load).unwrap();
    assert!(sim.wait(Stream::Load, &ticket).is_err());
    assert!(sim.query(&ticket).is_err());
    assert!(other.query(&sim.record(Stream::Load).unwrap()).is_err());
}

#[test]
fn any_legal_order_is_reached_by_choice_and_none_other() {
    // Two streams of one operation each: both orders of their ends.
    let mut orders = BTreeSet::new();
    for choices in 0..64_usize {
        let sim = SimDevice::new(Box::new(|_| 1));
        let compute = sim.record(Stream::Compute).unwrap();
        let load = sim.record(Stream::Load).unwrap();
        let mut left = choices;
        let mut choose = |n: usize| {
            let chosen = left % n;
            left /= n;
            chosen
        };
        assert!(sim.step(&mut choose));
        let over = |ticket| sim.query(ticket).unwrap().is_over();
        orders.insert((over(&compute), over(&load)));
        assert!(sim.step(&mut choose));
        assert!(!sim.step(&mut choose));
    }
    assert_eq!(orders, BTreeSet::from([(true, false), (false, true)]));
}
