//! From submit to the one terminal result.

use super::*;

#[test]
fn a_request_gets_exactly_one_result() {
    let s = scheduler(1, config());
    let id = s.put(spec(7, 3, 2));
    s.step(5);
    let report = s.commit_all(&s.plan(), 6);
    assert_eq!(report.finished, [(id, FinishReason::Length)]);
    let result = s.take_result(id).unwrap();
    assert_eq!((&*result.tokens, result.prompt_len), (&[5, 6][..], 3));
    let unknown = Error::UnknownRequest { id };
    assert_eq!(s.take_result(id), Err(unknown.clone()));
    assert_eq!(s.poll(id), Err(unknown));
    assert!(!s.abort(id, 0));
    s.drain(None, 0..8);
}

#[test]
fn one_token_ends_with_the_prefill() {
    let s = scheduler(1, config());
    s.put(spec(0, 200, 1));
    s.step(1);
    assert_eq!(s.result_or_phase(0), Err(Phase::Prefilling));
    s.step(1);
    assert_eq!(s.result(0).tokens, [1]);
    assert!(s.try_plan().is_none(), "no decode step");
}

#[test]
fn stop_token_as_the_first_prediction_ends_at_once() {
    let s = scheduler(1, config());
    let mut stops = spec(0, 3, 10);
    stops.sampling.stop_token_ids = Box::new([9]);
    s.put(stops);
    s.step(9);
    let result = s.result(0);
    assert_eq!(
        (result.reason, &*result.tokens),
        (FinishReason::Stop, &[9][..])
    );
    assert!(s.try_plan().is_none());
}

#[test]
fn stop_tokens_wait_for_min_tokens_and_win_over_length() {
    let s = scheduler(1, config());
    let mut stops = spec(0, 3, 3);
    stops.sampling.stop_token_ids = Box::new([9]);
    stops.sampling.min_tokens = 2;
    s.put(stops);
    for banned in [true, true, false] {
        let plan = s.step(9);
        assert_eq!(plan.sampling.banned_tokens.is_empty(), !banned);
    }
    let result = s.result(0);
    assert_eq!(
        (result.reason, result.tokens.len()),
        (FinishReason::Stop, 3)
    );
}

#[test]
fn stop_string_ends_the_row_it_names() {
    let s = scheduler(2, config());
    s.put(spec(0, 1, 9));
    s.put(spec(1, 1, 9));
    let plan = s.plan();
    let report = s.commit(plan.epoch, &[1, 1], &[false, true], 0).unwrap();
    assert_eq!(report.finished, [(RequestId(1), FinishReason::Stop)]);
    assert_eq!(s.stats().running, 1);
}

#[test]
fn context_end_gives_exactly_what_is_left() {
    let max_context = 100;
    for prompt in [1, 36, 63, 64, 98, 99] {
        let s = scheduler(
            1,
            SchedulerConfig {
                max_context,
                ..config()
            },
        );
        s.put(spec(0, prompt, 1000));
        while let Some(plan) = s.try_plan() {
            assert!(plan.positions.iter().all(|&at| at < 99));
            s.commit_all(&plan, 1);
        }
        let result = s.result(0);
        assert_eq!(result.reason, FinishReason::Length);
        assert_eq!(result.tokens.len(), max_context - prompt);
    }
}

#[test]
fn prompts_that_leave_no_room_are_refused() {
    let s = scheduler(1, config());
    for prompt in [1000, 1001] {
        assert_eq!(
            s.submit(spec(0, prompt, 1), 0),
            Err(Error::PromptTooLong {
                prompt_tokens: prompt,
                max_context: 1000
            })
        );
    }
    let empty = s.submit(spec(0, 0, 1), 0);
    assert!(matches!(
        empty,
        Err(Error::InvalidRequest {
            field: "prompt",
            ..
        })
    ));
    assert_eq!(s.stats(), SchedulerStats::default());
    s.put(spec(0, 999, 1));
}

#[test]
fn live_id_is_refused_and_the_first_is_untouched() {
    let s = scheduler(1, config());
    let id = s.put(spec(3, 5, 2));
    let duplicate = Err(Error::DuplicateRequest { id });
    assert_eq!(s.submit(spec(3, 9, 9), 0), duplicate);
    let plan = s.plan();
    assert_eq!(s.submit(spec(3, 9, 9), 0), duplicate);
    s.commit_all(&plan, 1);
    s.step(1);
    assert_eq!(s.result(3).tokens, [1, 1]);
}

#[test]
fn id_works_again_after_its_result() {
    let s = scheduler(1, config());
    s.put(spec(3, 5, 1));
    s.step(1);
    s.put(spec(3, 6, 1));
    assert_eq!(
        s.result_or_phase(3),
        Err(Phase::Waiting),
        "the old result goes"
    );
    s.step(2);
    let result = s.result(3);
    assert_eq!((result.prompt_len, &*result.tokens), (6, &[2][..]));
    assert_eq!(s.stats().results, 1);
}

#[test]
fn id_reused_while_its_old_row_flies_gets_none_of_its_tokens() {
    let s = scheduler(2, config());
    s.put(spec(3, 5, 4));
    let old = s.plan();
    assert!(s.abort(RequestId(3), 0));
    s.put(spec(3, 7, 2));
    let report = s.commit_all(&old, 50);
    assert_eq!((report.finished, report.accepted), (vec![], vec![false]));
    assert_eq!(s.result_or_phase(3), Err(Phase::Waiting));
    assert_eq!(spans(&s.step(1)), [(3, 0, 7)]);
    s.step(2);
    assert_eq!(s.result(3).tokens, [1, 2]);
}

#[test]
fn given_ids_avoid_live_and_finished_ones() {
    let s = scheduler(2, config());
    let auto = || {
        let mut unnamed = spec(0, 1, 1);
        unnamed.id = None;
        s.put(unnamed).0
    };
    s.put(spec(0, 1, 1));
    s.step(1);
    s.put(spec(1, 1, 1));
    assert_eq!((auto(), auto()), (2, 3));
}

#[test]
fn another_user_of_the_table_competes_for_slots_but_cannot_touch_ours() {
    let s = scheduler(2, config());
    let direct = s.slots().share();
    let id = RequestId(5);
    direct.allocate(id).unwrap();
    s.put(spec(5, 1, 9));
    s.put(spec(6, 1, 1));
    assert_eq!(spans(&s.step(1)), [(5, 0, 1)]);
    direct.retire(Epoch(100));
    direct.free(id, None).unwrap();
    assert_eq!(direct.free(id, None), Err(Error::UnknownRequest { id }));
    s.check().unwrap();
    assert_eq!(spans(&s.step(1)), [(5, 1, 1), (6, 0, 1)]);
}

#[test]
fn full_queue_pushes_back() {
    let s = scheduler(
        1,
        SchedulerConfig {
            max_waiting: 2,
            ..config()
        },
    );
    s.put(spec(0, 1, 5));
    s.put(spec(1, 1, 5));
    let full = Err(Error::QueueFull {
        waiting: 2,
        max_waiting: 2,
    });
    assert_eq!(s.submit(spec(2, 1, 1), 0), full);
    s.plan();
    s.put(spec(2, 1, 1));
    assert_eq!(s.submit(spec(3, 1, 1), 0), full);
    assert!(s.abort(RequestId(1), 0));
    s.put(spec(3, 1, 1));
}

#[test]
fn abort_takes_effect_in_every_state() {
    let s = scheduler(2, config());
    s.put(spec(0, 10, 9)); // will decode
    s.step(1);
    s.put(spec(1, 300, 9)); // will be inside its prompt
    s.step(1);
    s.put(spec(2, 10, 9)); // waits: no slot
    let phases = [0, 1, 2].map(|id| s.result_or_phase(id));
    let expected = [Phase::Decoding, Phase::Prefilling, Phase::Waiting];
    assert_eq!(phases, expected.map(Err));
    for (id, tokens, computed) in [(2, 0, 0), (1, 0, 128), (0, 2, 10)] {
        assert!(s.abort(RequestId(id), 0));
        assert!(!s.abort(RequestId(id), 0), "idempotent");
        let result = s.result(id);
        assert_eq!(result.reason, FinishReason::Abort);
        assert_eq!(result.tokens.len(), tokens);
        assert_eq!(result.computed_prompt_tokens, computed);
        s.check().unwrap();
    }
    assert!(!s.abort(RequestId(99), 0));
    assert!(s.try_plan().is_none());
    s.drain(None, 0..3);
}

#[test]
fn slot_of_a_row_aborted_in_flight_is_fenced_until_the_commit() {
    let s = scheduler(1, config());
    s.put(spec(0, 10, 9));
    let plan = s.plan();
    s.put(spec(1, 10, 9));
    assert!(s.abort(RequestId(0), 0));
    assert_eq!(s.slots().stats().finishing, 1);
    assert!(s.try_plan().is_none());
    s.slots().allocate(RequestId(77)).unwrap_err();
    let report = s.commit_all(&plan, 1);
    assert_eq!(report.accepted, [false]);
    assert_eq!(s.slots().stats().finishing, 0);
    let next = s.plan();
    assert_eq!((next.request_ids, next.slots), (vec![1], vec![0]));
}

#[test]
fn abort_of_one_row_leaves_the_others_alone() {
    let s = scheduler(8, config());
    for id in 0..8 {
        s.put(spec(id, 2, 3));
    }
    s.step(1);
    let plan = s.plan();
    assert!(s.abort(RequestId(3), 0));
    s.commit_all(&plan, 2);
    s.put(spec(8, 2, 1));
    let next = s.step(3);
    let last = rows(&next).pop().unwrap();
    assert_eq!((last.id, last.slot), (8, 3), "reused after one step");
    for id in [0, 1, 2, 4, 5, 6, 7] {
        assert_eq!(s.result(id).tokens, [1, 2, 3]);
    }
    assert_eq!(s.slots().stats().free, 8);
}

#[test]
fn all_rows_may_end_in_one_step() {
    let s = scheduler(8, config());
    for id in 0..8 {
        s.put(spec(id, 2, 1));
    }
    s.step(1);
    assert_eq!((s.stats().results, s.slots().stats().free), (8, 8));
}

#[test]
fn failed_step_ends_its_rows_only() {
    let s = scheduler(2, config());
    for id in 0..3 {
        s.put(spec(id, 10, 2));
    }
    let plan = s.plan();
    assert!(s.abort(RequestId(1), 0));
    let failed = s.fail(plan.epoch, "out of memory", 0);
    assert_eq!(failed, Ok(vec![RequestId(0)]));
    assert_eq!(s.result(0).reason, FinishReason::Error);
    assert_eq!(s.result(0).message.as_deref(), Some("out of memory"));
    assert_eq!(s.result(1).reason, FinishReason::Abort);
    assert_eq!(s.slots().stats().free, 2);
    s.put(spec(3, 10, 1));
    assert_eq!(s.step(1).request_ids, [2, 3]);
}

#[test]
fn bad_token_ends_its_row_only() {
    for bad in [-1, i32::MIN, 100] {
        let s = scheduler(2, config());
        s.put(spec(0, 1, 9));
        s.put(spec(1, 1, 9));
        let plan = s.plan();
        let report = s.commit(plan.epoch, &[bad, 4], &[], 0).unwrap();
        assert_eq!(report.finished, [(RequestId(0), FinishReason::Error)]);
        assert_eq!(report.accepted, [false, true]);
        assert!(s.result(0).tokens.is_empty());
        assert_eq!(s.stats().generated_tokens, 1);
        assert_eq!(s.step(4).request_ids, [1]);
    }
}

#[test]
fn stale_or_misshapen_commits_change_nothing() {
    let s = scheduler(2, config());
    s.put(spec(0, 1, 9));
    let plan = s.plan();
    let before = s.stats();
    let stale = |epoch| Err(Error::StalePlan { epoch });
    for epoch in [Epoch(0), Epoch(2)] {
        assert_eq!(s.commit(epoch, &[1], &[], 0), stale(epoch));
        assert_eq!(s.fail(epoch, "", 0).map(drop), stale(epoch).map(drop));
    }
    for (tokens, stops) in [(&[][..], &[][..]), (&[1, 1], &[]), (&[1], &[true, true])] {
        let refused = s.commit(plan.epoch, tokens, stops, 0);
        assert!(matches!(refused, Err(Error::InvalidRequest { .. })));
    }
    assert_eq!(s.stats(), before);
    s.commit_all(&plan, 1);
    assert_eq!(s.commit(plan.epoch, &[1], &[], 0), stale(plan.epoch));
}

#[test]
fn results_nobody_polls_are_bounded() {
    let s = scheduler(
        50,
        SchedulerConfig {
            max_results: 1000,
            ..config()
        },
    );
    for id in 0..100_000 {
        s.put(spec(id, 1, 1));
        if id % 50 == 49 {
            let plan = s.try_plan().unwrap();
            let tokens = vec![1; plan.sample_rows.len()];
            s.commit(plan.epoch, &tokens, &[], 0).unwrap();
        }
    }
    let stats = s.stats();
    assert_eq!((stats.results, stats.results_dropped), (1000, 99_000));
    assert!(s.poll(RequestId(98_999)).is_err(), "the oldest went");
    assert_eq!(s.result(99_000).reason, FinishReason::Length);
    s.drain(None, 0..0);
}

#[test]
fn close_ends_waiting_prefilling_and_decoding_requests() {
    for finish in [FinishReason::Abort, FinishReason::Error] {
        let s = scheduler(2, config());
        s.put(spec(0, 10, 9));
        s.step(1);
        s.put(spec(1, 300, 9));
        s.put(spec(2, 10, 9));
        let plan = s.plan();
        s.close("power cut", finish, 5);
        s.close("another", FinishReason::Abort, 6);
        for (id, tokens) in [(0, 1), (1, 0), (2, 0)] {
            let result = s.result(id);
            assert_eq!((result.reason, result.tokens.len()), (finish, tokens));
            assert_eq!(result.message.as_deref(), Some("power cut"));
            assert_eq!(result.stamps.finished_ns, Some(5));
        }
        let closed = Error::Closed {
            reason: "power cut".to_owned(),
        };
        assert_eq!(s.submit(spec(3, 1, 1), 0), Err(closed.clone()));
        assert_eq!(s.next_plan(NOW, || 0).unwrap_err(), closed);
        let report = s.commit_all(&plan, 1);
        assert_eq!(report.accepted, [false], "a step in flight may still end");
        s.drain(None, 0..3);
    }
}

#[test]
fn close_keeps_the_result_of_every_request_in_the_smallest_store() {
    let s = scheduler(
        1,
        SchedulerConfig {
            max_waiting: 4,
            max_results: 5,
            ..config()
        },
    );
    s.put(spec(0, 1, 9));
    s.step(1);
    for id in 1..5 {
        s.put(spec(id, 1, 9));
    }
    s.close("end", FinishReason::Abort, 0);
    assert_eq!(s.result(0).tokens, [1]);
    for id in 1..5 {
        assert_eq!(s.result(id).reason, FinishReason::Abort);
    }
}

#[test]
fn stamps_tell_when_things_happened() {
    let s = scheduler(1, config());
    let id = s.submit(spec(0, 1, 2), 10).unwrap();
    for (planned, committed) in [(20, 30), (40, 50)] {
        let NextPlan::Plan(plan) = s.next_plan(NOW, || planned).unwrap() else {
            panic!("no plan");
        };
        s.commit(plan.epoch, &[1], &[], committed).unwrap();
    }
    let expected = Stamps {
        submitted_ns: 10,
        first_planned_ns: Some(20),
        first_token_ns: Some(30),
        finished_ns: Some(50),
    };
    assert_eq!(s.take_result(id).unwrap().stamps, expected);
}

#[test]
fn limits_that_cannot_work_are_named() {
    let base = config;
    let bad = [
        (
            "max_batch_tokens",
            SchedulerConfig {
                max_batch_tokens: 0,
                ..base()
            },
        ),
        (
            "max_batch_tokens",
            SchedulerConfig {
                max_batch_tokens: 100,
                ..base()
            },
        ),
        (
            "max_waiting",
            SchedulerConfig {
                max_waiting: 0,
                ..base()
            },
        ),
        (
            "max_results",
            SchedulerConfig {
                max_results: 0,
                ..base()
            },
        ),
        (
            "max_context",
            SchedulerConfig {
                max_context: 1,
                ..base()
            },
        ),
        (
            "vocab_size",
            SchedulerConfig {
                vocab_size: 0,
                ..base()
            },
        ),
    ];
    for (name, config) in bad {
        let slots = SlotAllocator::new(1).unwrap();
        match Scheduler::new(config, &slots).map(drop) {
            Err(Error::Config { field, .. }) => assert_eq!(field, name),
            other => panic!("{name}: {other:?}"),
        }
    }
}
