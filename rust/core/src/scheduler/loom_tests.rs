//! Every interleaving of two or three threads. A wait of the model has no time limit, so a wake-up
//! that is lost is a deadlock, which the model reports.

use std::sync::Arc;
use std::time::Duration;

use loom::thread;

use super::*;
use crate::request::{RequestResult, RequestStatus};
use crate::sampling::SamplingSpec;

const A: RequestId = RequestId(1);
const B: RequestId = RequestId(2);

fn scheduler(slots: u32) -> Arc<Scheduler> {
    scheduler_with(slots, MemoryConfig::default())
}

fn scheduler_with(slots: u32, memory: MemoryConfig) -> Arc<Scheduler> {
    let config = SchedulerConfig {
        max_batch_tokens: 128,
        max_waiting: 4,
        max_results: 8,
        max_context: 80,
        vocab_size: 4,
        policy: Policy::Fcfs,
        memory,
    };
    let slots = SlotAllocator::new(slots).unwrap();
    Arc::new(Scheduler::new(config, &slots).unwrap())
}

fn submit(s: &Scheduler, id: RequestId) {
    submit_prompt(s, id, 1);
}

fn submit_prompt(s: &Scheduler, id: RequestId, tokens: usize) {
    let spec = RequestSpec {
        id: Some(id),
        prompt: vec![1; tokens].into(),
        sampling: SamplingSpec {
            max_tokens: 1,
            ..SamplingSpec::default()
        },
        ..RequestSpec::default()
    };
    assert_eq!(s.submit(spec, 0), Ok(id));
}

fn next(s: &Scheduler) -> Result<StepPlan> {
    loop {
        if let NextPlan::Plan(plan) = s.next_plan(Duration::ZERO, || 0)? {
            return Ok(*plan);
        }
    }
}

fn commit(s: &Scheduler, plan: &StepPlan) -> CommitReport {
    let tokens = vec![1; plan.sample_rows.len()];
    s.commit(plan.epoch, &tokens, &[], 0).unwrap()
}

fn wait(s: &Scheduler, id: RequestId) -> Arc<RequestResult> {
    loop {
        if let RequestStatus::Finished(result) = s.wait(id, Duration::ZERO).unwrap() {
            return result;
        }
    }
}

/// Runs `act` on a thread of its own.
fn beside<T: 'static>(
    s: &Arc<Scheduler>,
    act: impl FnOnce(&Scheduler) -> T + 'static,
) -> thread::JoinHandle<T> {
    let s = s.clone();
    thread::spawn(move || act(&s))
}

/// Nothing lives, every slot is free, and the results are those of `ids`.
fn check_drained(s: &Scheduler, ids: &[RequestId]) {
    s.check().unwrap();
    let (stats, slots) = (s.stats(), s.slots().stats());
    assert_eq!((stats.waiting, stats.running), (0, 0));
    assert_eq!((slots.free, slots.finishing), (slots.total, 0));
    for &id in ids {
        s.take_result(id).unwrap();
    }
    assert_eq!(s.stats().results, 0);
}

#[test]
fn submit_wakes_the_planner() {
    loom::model(|| {
        let s = scheduler(1);
        let submitter = beside(&s, |s| submit(s, A));
        let plan = next(&s).unwrap();
        assert_eq!(plan.request_ids, [A.0]);
        commit(&s, &plan);
        submitter.join().unwrap();
        check_drained(&s, &[A]);
    });
}

#[test]
fn two_submits_are_both_planned() {
    loom::model(|| {
        let s = scheduler(1);
        let first = beside(&s, |s| submit(s, A));
        let second = beside(&s, |s| submit(s, B));
        for _ in 0..2 {
            let plan = next(&s).unwrap();
            commit(&s, &plan);
        }
        first.join().unwrap();
        second.join().unwrap();
        check_drained(&s, &[A, B]);
    });
}

#[test]
fn commit_wakes_a_planner_that_finds_no_slot() {
    loom::model(|| {
        let s = scheduler(1);
        submit(&s, A);
        submit(&s, B);
        let plan = next(&s).unwrap();
        let planner = beside(&s, |s| next(s).unwrap());
        commit(&s, &plan);
        let plan = planner.join().unwrap();
        assert_eq!(plan.request_ids, [B.0]);
        commit(&s, &plan);
        check_drained(&s, &[A, B]);
    });
}

#[test]
fn abort_beside_a_commit_gives_one_result() {
    loom::model(|| {
        let s = scheduler(1);
        submit(&s, A);
        let plan = next(&s).unwrap();
        let aborter = beside(&s, |s| s.abort(A, 0));
        let report = commit(&s, &plan);
        let aborted = aborter.join().unwrap();
        assert_eq!(report.finished.len(), usize::from(!aborted));
        assert_eq!(report.accepted, [!aborted]);
        check_drained(&s, &[A]);
    });
}

#[test]
fn abort_beside_a_fail_gives_one_result() {
    loom::model(|| {
        let s = scheduler(1);
        submit(&s, A);
        let plan = next(&s).unwrap();
        let aborter = beside(&s, |s| s.abort(A, 0));
        let failed = s.fail(plan.epoch, "failed", 0).unwrap();
        let aborted = aborter.join().unwrap();
        assert_eq!(failed.len(), usize::from(!aborted));
        check_drained(&s, &[A]);
    });
}

#[test]
fn two_aborts_end_a_request_once() {
    loom::model(|| {
        let s = scheduler(1);
        submit(&s, A);
        let other = beside(&s, |s| s.abort(A, 0));
        let aborted = s.abort(A, 0);
        assert_ne!(aborted, other.join().unwrap());
        check_drained(&s, &[A]);
    });
}

#[test]
fn abort_beside_the_planner_conserves_the_slot() {
    loom::model(|| {
        let s = scheduler(1);
        submit(&s, A);
        submit(&s, B);
        let aborter = beside(&s, |s| s.abort(A, 0));
        let plan = next(&s).unwrap();
        commit(&s, &plan);
        if plan.request_ids == [A.0] {
            let plan = next(&s).unwrap();
            commit(&s, &plan);
        }
        aborter.join().unwrap();
        check_drained(&s, &[A, B]);
    });
}

#[test]
fn commit_wakes_the_waiter() {
    loom::model(|| {
        let s = scheduler(1);
        submit(&s, A);
        let plan = next(&s).unwrap();
        let waiter = beside(&s, |s| wait(s, A).reason);
        commit(&s, &plan);
        assert_eq!(waiter.join().unwrap(), FinishReason::Length);
        check_drained(&s, &[A]);
    });
}

#[test]
fn close_wakes_the_waiter() {
    loom::model(|| {
        let s = scheduler(1);
        submit(&s, A);
        let waiter = beside(&s, |s| wait(s, A).reason);
        s.close("end", FinishReason::Abort, 0);
        assert_eq!(waiter.join().unwrap(), FinishReason::Abort);
        check_drained(&s, &[A]);
    });
}

#[test]
fn close_wakes_the_planner_and_a_waiter() {
    loom::model(|| {
        let s = scheduler(1);
        submit(&s, A);
        let plan = next(&s).unwrap();
        let planner = beside(&s, |s| next(s).is_err());
        let waiter = beside(&s, |s| wait(s, A).reason);
        s.close("end", FinishReason::Error, 0);
        assert!(planner.join().unwrap());
        assert_eq!(waiter.join().unwrap(), FinishReason::Error);
        assert_eq!(commit(&s, &plan).accepted, [false]);
        check_drained(&s, &[A]);
    });
}

#[test]
fn submit_beside_close_is_refused_or_ended() {
    loom::model(|| {
        let s = scheduler(1);
        let closer = beside(&s, |s| s.close("end", FinishReason::Abort, 0));
        let spec = RequestSpec {
            id: Some(A),
            prompt: Box::new([1]),
            ..RequestSpec::default()
        };
        let accepted = s.submit(spec, 0).is_ok();
        closer.join().unwrap();
        check_drained(&s, if accepted { &[A] } else { &[] });
    });
}

#[test]
fn the_end_of_a_copy_wakes_a_planner_that_waits_for_its_slot() {
    loom::model(|| {
        let memory = MemoryConfig {
            prefix_cache: true,
            host_pages: 2,
            ..MemoryConfig::default()
        };
        let s = scheduler_with(1, memory);
        submit_prompt(&s, A, 65);
        let plan = next(&s).unwrap();
        commit(&s, &plan);
        // A has ended, but a copy still reads its slot.
        let stores = s.take_stores();
        assert_eq!(stores.len(), 1);
        submit(&s, B);
        let job = stores[0].job;
        let copies = beside(&s, move |s| s.complete(job, CopyOutcome::Done));
        let plan = next(&s).unwrap();
        assert_eq!(plan.request_ids, [B.0]);
        copies.join().unwrap();
        commit(&s, &plan);
        check_drained(&s, &[A, B]);
    });
}

/// A request that generates `max_tokens` tokens and decodes: its first step is committed.
fn decoding(s: &Scheduler, id: RequestId, max_tokens: u32) {
    let spec = RequestSpec {
        id: Some(id),
        prompt: Box::new([1]),
        sampling: SamplingSpec {
            max_tokens,
            ..SamplingSpec::default()
        },
        ..RequestSpec::default()
    };
    assert_eq!(s.submit(spec, 0), Ok(id));
    let plan = next(s).unwrap();
    commit(s, &plan);
}

#[test]
fn abort_beside_two_steps_in_flight_conserves_the_slot() {
    loom::model(|| {
        let s = scheduler(1);
        decoding(&s, A, 3);
        let older = next(&s).unwrap();
        let aborter = beside(&s, |s| s.abort(A, 0));
        let newer = s.plan_ahead(older.epoch).unwrap();
        let first = commit(&s, &older).accepted[0];
        s.check().unwrap();
        if let Some(newer) = newer {
            assert!(commit(&s, &newer).accepted[0] <= first);
        }
        aborter.join().unwrap();
        check_drained(&s, &[A]);
    });
}

#[test]
fn close_beside_two_steps_in_flight_ends_the_request_once() {
    loom::model(|| {
        let s = scheduler(1);
        decoding(&s, A, 3);
        let older = next(&s).unwrap();
        let newer = s.plan_ahead(older.epoch).unwrap().unwrap();
        let closer = beside(&s, |s| s.close("end", FinishReason::Abort, 0));
        commit(&s, &older);
        commit(&s, &newer);
        closer.join().unwrap();
        check_drained(&s, &[A]);
    });
}
