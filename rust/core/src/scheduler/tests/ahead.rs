//! A step planned while the one before it is in flight: when there is one, what is in it, and how
//! both end.

use super::*;
use crate::memory::Admission;
use crate::pages::{Addressing, PageConfig};

/// Requests that decode: `prompt` tokens each, computed, and one token generated.
fn decoding(s: &Scheduler, specs: impl IntoIterator<Item = RequestSpec>) {
    for spec in specs {
        s.put(spec);
    }
    while s.stats().waiting > 0 {
        s.step(1);
    }
}

fn paged(pages: u32, more: &MemoryConfig) -> SchedulerConfig {
    let pages = PageConfig {
        num_pages: pages,
        num_layers: 1,
        page_size: 64,
        slot_widths: 1,
        addressing: Addressing::Flat,
        cap_high: None,
        cap_low: None,
    };
    SchedulerConfig {
        memory: MemoryConfig {
            page_size: 64,
            pages: Some(pages),
            admission: Admission::Estimate { ratio: 0.05 },
            ..more.clone()
        },
        ..config()
    }
}

fn seeded(id: u64, prompt: usize, max_tokens: u32) -> RequestSpec {
    let mut spec = spec(id, prompt, max_tokens);
    spec.sampling.temperature = 1.0;
    spec.sampling.seed = id;
    spec.sampling.min_tokens = max_tokens / 2;
    spec.sampling.stop_token_ids = Box::new([9]);
    spec
}

/// Plans ahead wherever that is possible, against a scheduler that never does.
#[test]
fn plans_are_those_of_the_ordinary_order_but_for_the_tokens() {
    for memory in [config(), paged(40, &MemoryConfig::default())] {
        let ordinary = scheduler(3, memory.clone());
        let s = scheduler(3, memory);
        for (id, prompt, max_tokens) in [(0, 50, 40), (1, 80, 60), (2, 110, 80)] {
            let spec = seeded(id, prompt, max_tokens);
            ordinary.put(spec.clone());
            s.put(spec);
        }
        let (mut ahead, mut count) = (None, 0);
        while s.stats().running + s.stats().waiting > 0 {
            let plan: StepPlan = ahead.take().unwrap_or_else(|| s.plan());
            let mut same = ordinary.plan();
            assert_eq!(plan.sampling, same.sampling);
            if plan.token_sources.iter().any(|&source| source >= 0) {
                count += 1;
                assert!(same.token_ids.iter().all(|&token| token == 1));
                same.token_ids.fill(0);
                same.token_sources.clone_from(&plan.token_sources);
            }
            assert_eq!(plan, same);
            ahead = s.ahead(&plan);
            let report = s.commit_all(&plan, 1);
            assert_eq!(report, ordinary.commit_all(&same, 1));
        }
        assert!(count > 70, "{count} steps were planned ahead");
        for id in 0..3 {
            assert_eq!(s.result(id), ordinary.result(id));
        }
    }
}

#[test]
fn sources_are_sampled_rows_of_the_step_before() {
    let s = scheduler(3, config());
    decoding(&s, [spec(0, 5, 9), spec(1, 6, 2), spec(2, 7, 9)]);
    let plan = s.plan();
    let ahead = s.ahead(&plan).unwrap();
    assert_eq!(ahead.request_ids, [0, 2], "1 ends with its second token");
    assert_eq!(ahead.token_sources, [0, 2]);
    assert_eq!(ahead.token_ids, [0, 0]);
    assert_eq!(spans(&ahead), [(0, 6, 1), (2, 8, 1)]);
    s.commit_all(&plan, 1);
    s.commit_all(&ahead, 2);
    assert_eq!(s.result(1).reason, FinishReason::Length);
    assert_eq!(rows(&s.plan())[0].tokens, [2]);
}

/// Nothing may have changed where there is no plan.
fn refuses(s: &Scheduler, plan: &StepPlan, why: &str) {
    let before = (s.describe(), s.slots().dump(), s.stats());
    assert_eq!(s.ahead(plan), None, "{why}");
    assert_eq!((s.describe(), s.slots().dump(), s.stats()), before);
}

#[test]
fn only_steady_decode_is_planned_ahead() {
    let s = scheduler(3, config());
    s.put(spec(0, 5, 9));
    let prefill = s.plan();
    refuses(&s, &prefill, "a prompt");
    s.commit_all(&prefill, 1);
    let plan = s.plan();
    s.put(spec(1, 200, 2));
    refuses(&s, &plan, "one waits and a slot is free");
    s.commit_all(&plan, 1);
    let mixed = s.plan();
    refuses(&s, &mixed, "a chunk beside a decode row");
    s.commit_all(&mixed, 1);
    let last_chunk = s.plan();
    s.abort(RequestId(1), 0);
    assert!(s.ahead(&last_chunk).is_some(), "its request is gone");
}

#[test]
fn penalties_need_the_token_and_logprobs_do_not() {
    let spoil: [fn(&mut SamplingSpec); 3] = [
        |sampling| sampling.repetition_penalty = 1.1,
        |sampling| sampling.presence_penalty = 0.1,
        |sampling| sampling.frequency_penalty = 0.1,
    ];
    for spoil in spoil {
        let s = scheduler(2, config());
        let mut penalised = spec(0, 5, 9);
        spoil(&mut penalised.sampling);
        decoding(&s, [penalised, spec(1, 5, 9)]);
        refuses(&s, &s.plan(), "a penalty");
    }
    let s = scheduler(2, config());
    let mut reported = spec(0, 5, 9);
    reported.sampling.logprobs = 3;
    decoding(&s, [reported]);
    assert!(s.ahead(&s.plan()).is_some());
}

#[test]
fn those_who_wait_get_the_slot_of_whoever_ends_at_once() {
    let s = scheduler(2, config());
    decoding(&s, [spec(0, 5, 3), spec(2, 5, 9)]);
    s.put(spec(1, 5, 1));
    let plan = s.plan();
    let ahead = s.ahead(&plan).unwrap();
    s.commit_all(&plan, 1);
    refuses(&s, &ahead, "0 ends with this step, and its slot is for 1");
    s.commit_all(&ahead, 1);
    assert_eq!(spans(&s.plan()), [(2, 7, 1), (1, 0, 5)]);
}

#[test]
fn the_last_step_of_all_rows_has_none_after_it() {
    for (prompt, max_tokens) in [(5, 2), (998, 9)] {
        let s = scheduler(1, config());
        s.put(spec(0, prompt, max_tokens));
        while s.result_or_phase(0) != Err(Phase::Decoding) {
            s.step(1);
        }
        refuses(&s, &s.plan(), "max_tokens, or max_context");
    }
}

#[test]
fn a_page_that_is_not_free_is_left_to_the_ordinary_plan() {
    // Two pages each is all there is; the second page of a cached prompt is not free either.
    let cached = MemoryConfig {
        prefix_cache: true,
        ..MemoryConfig::default()
    };
    let s = scheduler(2, paged(3, &cached));
    s.put(spec(0, 65, 1));
    s.step(1);
    assert_eq!(s.memory_stats().pages.unwrap().free, 2, "one is cached");
    let own = |id, salt| RequestSpec {
        prompt: (0..62).map(|at: u32| (at * salt) % 50).collect(),
        ..spec(id, 62, 20)
    };
    decoding(&s, [own(1, 3), own(2, 7)]);
    let first = s.plan();
    let second = s.ahead(&first).unwrap();
    assert_eq!(spans(&second), [(1, 63, 1), (2, 63, 1)]);
    s.commit_all(&first, 1);
    refuses(&s, &second, "two more pages, and one that could be evicted");
    s.commit_all(&second, 1);
    assert_eq!(spans(&s.plan()), [(1, 64, 1)], "the cached page goes");
}

#[test]
fn steps_end_in_order() {
    let s = scheduler(2, config());
    decoding(&s, [spec(0, 5, 9), spec(1, 5, 9)]);
    let older = s.plan();
    let newer = s.ahead(&older).unwrap();
    let stale = |epoch| Error::StalePlan { epoch };
    for epoch in [older.epoch, newer.epoch, Epoch(0), Epoch(99)] {
        assert_eq!(s.plan_ahead(epoch), Err(stale(epoch)), "two are in flight");
    }
    assert!(s.try_plan().is_none());
    let early = s.commit(newer.epoch, &[1, 1], &[], 0);
    assert_eq!(early, Err(stale(newer.epoch)));
    assert_eq!(s.fail(newer.epoch, "", 0), Err(stale(newer.epoch)));
    s.commit_all(&older, 1);
    let again = s.commit(older.epoch, &[1, 1], &[], 0);
    assert_eq!(again, Err(stale(older.epoch)));
    assert_eq!(s.plan_ahead(older.epoch), Err(stale(older.epoch)));
    assert!(s.try_plan().is_none());
    s.commit_all(&newer, 2);
    assert_eq!(rows(&s.plan())[0].tokens, [2]);
}

/// (free, in use, finishing)
fn slots(s: &Scheduler) -> (u32, u32, u32) {
    let stats = s.slots().stats();
    (stats.free, stats.in_use, stats.finishing)
}

#[test]
fn the_row_of_a_request_that_ended_runs_for_nothing_behind_its_own_fence() {
    let mut stopping = spec(0, 5, 9);
    stopping.sampling.stop_token_ids = Box::new([7]);
    let s = scheduler(3, config());
    decoding(&s, [stopping, spec(1, 5, 9), spec(2, 5, 9)]);
    let older = s.plan();
    let newer = s.ahead(&older).unwrap();
    // A stop token, a stop string, a bad token.
    let report = s.commit(older.epoch, &[7, 1, -1], &[false, true, false], 0);
    let finished: Vec<_> = report.unwrap().finished;
    assert_eq!(finished.len(), 3);
    s.check().unwrap();
    assert_eq!(slots(&s), (0, 0, 3), "not before the newer step has ended");
    s.put(spec(3, 5, 1));
    assert!(s.try_plan().is_none());
    let report = s.commit_all(&newer, 3);
    assert_eq!(report.accepted, [false; 3]);
    assert_eq!(report.finished, []);
    assert_eq!(slots(&s), (3, 0, 0));
    assert_eq!(
        (&*s.result(0).tokens, &*s.result(1).tokens),
        (&[1, 7][..], &[1, 1][..])
    );
    assert_eq!(s.stats().generated_tokens, 5);
    assert_eq!(spans(&s.plan()), [(3, 0, 5)]);
}

#[test]
fn an_abort_between_plan_and_plan_ahead_leaves_no_row() {
    let s = scheduler(2, config());
    decoding(&s, [spec(0, 5, 9), spec(1, 5, 9)]);
    let older = s.plan();
    s.abort(RequestId(0), 0);
    let newer = s.ahead(&older).unwrap();
    assert_eq!(
        (&*newer.request_ids, &*newer.token_sources),
        (&[1][..], &[1][..])
    );
    assert_eq!(s.commit_all(&older, 1).accepted, [false, true]);
    assert_eq!(slots(&s), (1, 1, 0), "the newer step has no row there");
    s.commit_all(&newer, 1);
}

#[test]
fn aborted_with_two_steps_in_flight() {
    let s = scheduler(2, config());
    decoding(&s, [spec(0, 5, 9), spec(1, 5, 9)]);
    let older = s.plan();
    let newer = s.ahead(&older).unwrap();
    assert!(s.abort(RequestId(0), 0));
    assert!(!s.abort(RequestId(0), 0));
    assert_eq!(s.commit_all(&older, 1).accepted, [false, true]);
    assert_eq!(slots(&s), (0, 1, 1));
    assert_eq!(s.commit_all(&newer, 1).accepted, [false, true]);
    assert_eq!(slots(&s), (1, 1, 0));
    assert_eq!(s.result(0).tokens, [1]);
}

#[test]
fn closed_with_two_steps_in_flight() {
    let s = scheduler(2, config());
    decoding(&s, [spec(0, 5, 9), spec(1, 5, 9)]);
    let older = s.plan();
    let newer = s.ahead(&older).unwrap();
    s.close("end", FinishReason::Abort, 0);
    s.check().unwrap();
    assert_eq!(s.commit_all(&older, 1).accepted, [false, false]);
    refuses(&s, &newer, "nobody is left");
    assert_eq!(slots(&s), (0, 0, 2));
    assert_eq!(s.commit_all(&newer, 1).accepted, [false, false]);
    s.drain(None, 0..2);
}

#[test]
fn a_failed_step_fails_its_rows_and_the_next_one_still_has_to_end() {
    for commits in [true, false] {
        let s = scheduler(2, config());
        decoding(&s, [spec(0, 5, 9), spec(1, 5, 9)]);
        let older = s.plan();
        let newer = s.ahead(&older).unwrap();
        let failed = s.fail(older.epoch, "out of memory", 0);
        assert_eq!(failed, Ok(vec![RequestId(0), RequestId(1)]));
        s.check().unwrap();
        assert_eq!(slots(&s), (0, 0, 2));
        if commits {
            assert_eq!(s.commit_all(&newer, 1).accepted, [false, false]);
        } else {
            assert_eq!(s.fail(newer.epoch, "out of memory", 0), Ok(vec![]));
        }
        s.drain(None, 0..2);
    }
}

#[test]
fn pages_of_a_row_that_runs_for_nothing_are_not_handed_out() {
    let s = scheduler(2, paged(3, &MemoryConfig::default()));
    decoding(&s, [spec(0, 62, 20), spec(1, 62, 20)]);
    let first = s.plan();
    let second = s.ahead(&first).unwrap();
    // 0 ends with the first step, and its page is what 1 lacks in the third.
    s.commit(first.epoch, &[1, 1], &[true, false], 0).unwrap();
    s.check().unwrap();
    assert_eq!(s.memory_stats().pages.unwrap().high.pending, 1);
    let third = s.ahead(&second).unwrap();
    assert_eq!(spans(&third), [(1, 64, 1)]);
    assert!(!third.token_pages.contains(&second.token_pages[0]));
    s.commit_all(&second, 1);
    assert_eq!(s.memory_stats().pages.unwrap().high.pending, 0);
    s.commit_all(&third, 1);
}

#[test]
fn the_test_switch_preempts_as_without_planning_ahead() {
    let memory = MemoryConfig {
        preempt_every: 3,
        ..MemoryConfig::default()
    };
    let s = scheduler(1, SchedulerConfig { memory, ..config() });
    s.put(spec(0, 5, 9));
    s.step(1);
    let second = s.plan();
    refuses(&s, &second, "the third preempts");
    s.commit_all(&second, 1);
    s.step(1);
    assert_eq!(s.stats().preemptions, 1);
}
