//! The protocol on the simulated device: random interleavings, every edge left out once, and the
//! exact times of streaming on the virtual clock.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a helper of a test fails by panicking, as a test does, and says which seed"
)]

mod engine;
mod pipeline;

use super::edges::Edge;
use engine::{Coverage, Slip, Trace};

/// Seeds within which a missing edge must show.
const TRIES: u64 = 1000;
/// Random traces of a normal test run; ten times as many in the soak.
const TRACES: u64 = 1000;

fn survives(seed: u64) -> Coverage {
    match Trace::new(seed, None, None).run() {
        Ok(coverage) => coverage,
        Err(what) => panic!("seed {seed}: {what}"),
    }
}

fn traces(seeds: std::ops::Range<u64>) {
    let mut all = Coverage::default();
    for seed in seeds {
        all.add(&survives(seed));
    }
    // A trace that never met what it is there for proves nothing.
    assert!(all.is_full(), "{all:?}");
}

#[test]
fn no_random_trace_breaks_an_order_rule() {
    traces(0..TRACES);
}

#[test]
#[ignore = "the long run: make soak, or cargo test -- --ignored"]
fn no_random_trace_breaks_an_order_rule_in_ten_thousand() {
    traces(0..10 * TRACES);
}

/// Some seed must fail, in the way that the edge prevents.
fn is_needed(what: &str, edge: Option<Edge>, slip: Option<Slip>) {
    let found = (0..TRIES).find_map(|seed| {
        let error = Trace::new(seed, edge, slip).run().err()?;
        Some((seed, error))
    });
    let Some((seed, error)) = found else {
        panic!("{what}: no seed below {TRIES} fails without it");
    };
    println!("{what}: seed {seed}: {error}");
}

macro_rules! needed {
    ($($name:ident: $edge:expr, $slip:expr;)*) => {
        $(#[test]
        fn $name() {
            is_needed(stringify!($name), $edge, $slip);
        })*
    };
}

// HST-01: the edges of a store are among them.
needed! {
    forward_waits_for_the_load: Some(Edge::LoadReady), None;
    forward_waits_for_the_window: Some(Edge::WindowReady), None;
    gate_is_closed_until_submitted: Some(Edge::GateClosed), None;
    window_waits_for_its_readers: Some(Edge::ConsumedWait), None;
    waiting_for_readers_not_recorded_is_a_no_op: Some(Edge::ConsumedRecorded), None;
    window_waits_for_the_step_before: Some(Edge::ConsumedAcross), None;
    store_waits_for_its_ticket: Some(Edge::StoreAfter), None;
    outcome_comes_after_the_ticket: Some(Edge::OutcomeAfterTicket), None;
    failure_is_reported: Some(Edge::FailureReported), None;
    refusal_is_reported: Some(Edge::RefusalReported), None;
    failure_opens_the_gates: Some(Edge::FailureOpensGates), None;
    lost_pages_are_left_alone: Some(Edge::LostPages), None;
    submitted_jobs_are_not_cancelled: Some(Edge::CancelBeforeSubmit), None;
    pages_are_fenced_by_the_step: None, Some(Slip::ReuseBeforeRetired);
    unsettled_pages_stay_lost: None, Some(Slip::ReuseUnsettled);
    store_ticket_is_behind_the_last_writer: None, Some(Slip::TicketBeforeWriter);
    source_of_a_store_is_not_written: None, Some(Slip::WriteUnderStore);
    stored_pages_are_published_when_done: None, Some(Slip::LoadBeforePublished);
    every_reader_passes_its_gate: None, Some(Slip::SecondPath);
    layer_is_released_after_its_readers: None, Some(Slip::ReleaseBeforeReader);
    streams_run_in_order: None, Some(Slip::StreamOutOfOrder);
    memory_is_unmapped_after_the_last_job: None, Some(Slip::UnmapBeforeDrain);
    every_plane_is_registered: None, Some(Slip::PlaneForgotten);
}
