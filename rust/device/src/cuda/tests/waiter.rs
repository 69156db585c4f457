//! Waits for events with an end.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::cuda::waiter::EventWaiter;

/// A GPU with an event that was recorded behind work on the compute stream.
fn queued(fake: &Fake) -> (EventWaiter, Handle) {
    let waiter = EventWaiter::with_driver(Fake::driver(true), fake.ordinal).unwrap();
    let context = Context::retain(Fake::driver(true), fake.ordinal).unwrap();
    let entered = context.enter().unwrap();
    let event = entered.new_event().unwrap();
    entered.record(event, COMPUTE).unwrap();
    (waiter, event)
}

#[test]
fn what_is_over_is_not_waited_for_and_what_never_ends_is_given_up() {
    let fake = Fake::new(false);
    fake.stick(COMPUTE);
    let (waiter, event) = queued(&fake);
    let limit = Duration::from_millis(120); // beyond the spin
    let began = monotonic_ns();
    assert!(!waiter.wait(event as u64, began, limit).unwrap());
    assert!(monotonic_ns() - began >= 120_000_000);
    fake.unstick(COMPUTE);
    assert!(!waiter.wait(event as u64, began, Duration::ZERO).unwrap());
    fake.run();
    assert!(waiter.wait(event as u64, began, Duration::ZERO).unwrap());
    assert_eq!(depth(), 0, "the context is as it was");
}

#[test]
fn the_end_of_a_step_ends_waits_that_spin_yield_and_pause() {
    for step_ms in [0, 5, 80] {
        let fake = Fake::new(false);
        let (waiter, event) = queued(&fake);
        let ran = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                assert!(waiter.wait(event as u64, monotonic_ns(), LONG).unwrap());
                assert!(ran.load(Ordering::Acquire), "too early");
            });
            std::thread::park_timeout(Duration::from_millis(step_ms));
            ran.store(true, Ordering::Release);
            fake.run();
            waiting.join().unwrap();
        });
    }
}

#[test]
fn closing_ends_the_waits_of_every_thread_and_no_look_at_what_is_over() {
    for began_ago_ns in [0, 5_000_000, 80_000_000] {
        let fake = Fake::new(false);
        let (waiter, event) = queued(&fake);
        std::thread::scope(|scope| {
            let waits = [LONG, Duration::MAX].map(|limit| {
                let waiter = &waiter;
                let began_ns = monotonic_ns().saturating_sub(began_ago_ns);
                scope.spawn(move || waiter.wait(event as u64, began_ns, limit))
            });
            std::thread::park_timeout(Duration::from_millis(5));
            waiter.close();
            for wait in waits {
                let refused = wait.join().unwrap().unwrap_err();
                let text = "engine is closed: closed while a step was on the GPU";
                assert_eq!(refused.to_string(), text);
            }
        });
        let refused = waiter.wait(event as u64, 0, Duration::ZERO);
        assert!(matches!(refused, Err(Error::Closed { .. })));
        fake.run();
        assert!(waiter.wait(event as u64, 0, Duration::ZERO).unwrap());
    }
}

#[test]
fn a_fault_of_the_device_is_an_error() {
    let fake = Fake::new(false);
    let (waiter, event) = queued(&fake);
    fake.fail("event_query", 0, 700);
    let refused = waiter.wait(event as u64, 0, LONG).unwrap_err();
    let text = "cuEventQuery: an illegal memory access was encountered (CUDA error 700)";
    assert_eq!(refused.to_string(), text);
    let refused = EventWaiter::with_driver(Fake::driver(true), 1 << 20).err();
    assert!(matches!(
        refused,
        Some(Error::Config {
            field: "ordinal",
            ..
        })
    ));
}
