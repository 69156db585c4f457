//! What goes into a step, and in which order.

use std::collections::BTreeSet;

use super::*;

#[test]
fn small_requests_do_not_overtake_a_head_that_finds_no_slot() {
    let s = scheduler(1, config());
    s.put(spec(0, 10, 3));
    s.step(1);
    s.put(spec(1, 500, 1));
    for id in 2..52 {
        s.put(spec(id, 1, 1));
    }
    assert_eq!(spans(&s.step(1)), [(0, 10, 1)]);
    assert_eq!(spans(&s.step(1)), [(0, 11, 1)]);
    assert_eq!(s.result(0).reason, FinishReason::Length);
    assert_eq!(spans(&s.step(1)), [(1, 0, 128)], "the head comes first");
    let mut admitted = Vec::new();
    while s.stats().running + s.stats().waiting > 0 {
        admitted.extend(spans(&s.step(1)).into_iter().map(|(id, ..)| id));
    }
    admitted.dedup();
    assert_eq!(admitted, (1..52).collect::<Vec<u64>>());
}

#[test]
fn small_requests_do_not_overtake_a_head_that_finds_no_budget() {
    let s = scheduler(4, config());
    s.put(spec(0, 100, 1));
    s.put(spec(1, 200, 1));
    s.put(spec(2, 5, 1));
    assert_eq!(spans(&s.step(1)), [(0, 0, 100)], "28 left: no block of 64");
    assert_eq!(spans(&s.step(1)), [(1, 0, 128)]);
    assert_eq!(spans(&s.step(1)), [(1, 128, 72), (2, 0, 5)]);
}

#[test]
fn admission_order_is_submit_order() {
    let s = scheduler(5, config());
    let mut random = Random(5);
    let mut order: Vec<u64> = Vec::new();
    let mut seen = BTreeSet::new();
    let mut id = 0;
    for _ in 0..20_000 {
        if id == 1000 && s.stats().running + s.stats().waiting == 0 {
            break;
        }
        for _ in 0..random.below(4) {
            if id < 1000 && s.stats().waiting < 100 {
                let prompt = usize::try_from(1 + random.below(300)).unwrap();
                s.put(spec(
                    id,
                    prompt,
                    u32::try_from(1 + random.below(6)).unwrap(),
                ));
                id += 1;
            }
        }
        if let Some(plan) = s.try_plan() {
            order.extend(plan.request_ids.iter().filter(|&&id| seen.insert(id)));
            s.commit_all(&plan, 1);
        }
    }
    assert_eq!(order, (0..1000).collect::<Vec<u64>>());
}

#[test]
fn chunks_are_cut_at_multiples_of_64_in_absolute_position() {
    for (budget, lengths) in [
        (64, [1, 63, 300]),
        (192, [100, 191, 500]),
        (512, [1, 999, 700]),
    ] {
        let s = scheduler(
            3,
            SchedulerConfig {
                max_batch_tokens: budget,
                ..config()
            },
        );
        for (id, length) in (0..).zip(lengths) {
            s.put(spec(id, length, 1));
        }
        let mut computed = [0; 3];
        while s.stats().running + s.stats().waiting > 0 {
            let plan = s.step(1);
            let planned: usize = spans(&plan).iter().map(|&(.., tokens)| tokens).sum();
            assert!((1..=budget).contains(&planned));
            for (id, start, tokens) in spans(&plan) {
                let id = usize::try_from(id).unwrap();
                assert_eq!(start, computed[id], "chunks are consecutive");
                computed[id] += tokens;
                assert!(computed[id].is_multiple_of(64) || computed[id] == lengths[id]);
            }
        }
        assert_eq!(computed, lengths);
    }
}

#[test]
fn rows_that_decode_are_in_every_step_of_a_long_prefill() {
    const PROMPT: usize = 64 * 1024;
    const BUDGET: usize = 512;
    let s = scheduler(
        8,
        SchedulerConfig {
            max_batch_tokens: BUDGET,
            max_context: 2 * PROMPT,
            ..config()
        },
    );
    for id in 0..4 {
        s.put(spec(id, 8, 10_000));
    }
    s.step(1);
    s.put(spec(4, PROMPT, 1));
    for step in 0..PROMPT / BUDGET {
        let plan = s.step(1);
        assert_eq!(plan.request_ids, [0, 1, 2, 3, 4]);
        assert_eq!(plan.num_decode, 4);
        assert_eq!(plan.token_ids.len(), 4 + BUDGET, "the documented bound");
        assert_eq!(plan.sample_rows.len() == 5, step == PROMPT / BUDGET - 1);
    }
    assert_eq!(s.result(4).computed_prompt_tokens, PROMPT);
}

#[test]
fn all_decode_rows_go_together_at_any_width() {
    for running in [1, 2, 3, 8, 9, 255, 256] {
        let s = scheduler(
            256,
            SchedulerConfig {
                max_batch_tokens: 512,
                max_waiting: 256,
                ..config()
            },
        );
        for id in 0..running {
            s.put(spec(id, 1, 10));
        }
        assert_eq!(s.step(1).num_decode, 0);
        let plan = s.step(1);
        assert_eq!(plan.request_ids, (0..running).collect::<Vec<u64>>());
        assert_eq!(plan.num_decode, plan.request_ids.len());
        assert_eq!(plan.sample_rows.len(), plan.num_decode);
        assert!(crate::decode_width(plan.num_decode) >= plan.num_decode);
    }
}

#[test]
fn decode_row_feeds_the_newest_token_at_the_next_position() {
    let s = scheduler(1, config());
    s.put(spec(0, 3, 5));
    s.step(42);
    let plan = s.plan();
    assert_eq!((plan.token_ids, plan.positions), (vec![42], vec![3]));
}

#[test]
fn there_is_one_step_in_flight_at_a_time() {
    let s = scheduler(2, config());
    s.put(spec(0, 1, 5));
    let plan = s.plan();
    s.put(spec(1, 1, 5));
    assert!(s.try_plan().is_none());
    s.commit_all(&plan, 1);
    assert_eq!(spans(&s.plan()), [(0, 1, 1), (1, 0, 1)]);
}

#[test]
fn high_goes_before_low_and_does_not_preempt() {
    let priority = SchedulerConfig {
        policy: Policy::Priority,
        ..config()
    };
    let s = scheduler(2, priority);
    let low = |id, prompt| RequestSpec {
        class: PriorityClass::Low,
        ..spec(id, prompt, 2)
    };
    s.put(low(0, 300));
    s.put(low(1, 10));
    assert_eq!(spans(&s.step(1)), [(0, 0, 128)]);
    s.put(spec(2, 40, 2));
    s.put(spec(3, 40, 2));
    let plan = s.step(1);
    assert_eq!(spans(&plan), [(2, 0, 40), (0, 128, 64)], "3 finds no slot");
    assert_eq!(s.stats().running, 2);
    assert_eq!(spans(&s.step(1)), [(2, 40, 1), (0, 192, 108)]);
    assert_eq!(spans(&s.step(1)), [(0, 300, 1), (3, 0, 40)], "before 1");
}

#[test]
fn low_rows_stay_behind_a_high_head_that_finds_no_budget() {
    let priority = SchedulerConfig {
        policy: Policy::Priority,
        ..config()
    };
    let s = scheduler(3, priority);
    s.put(RequestSpec {
        class: PriorityClass::Low,
        ..spec(0, 138, 1)
    });
    s.step(1);
    s.put(spec(1, 100, 1));
    s.put(spec(2, 150, 1));
    assert_eq!(spans(&s.step(1)), [(1, 0, 100)]);
    assert_eq!(spans(&s.step(1)), [(2, 0, 128)]);
    assert_eq!(spans(&s.step(1)), [(2, 128, 22), (0, 128, 10)]);
}

#[test]
fn room_that_a_chunk_cannot_use_goes_to_the_next_in_line() {
    let s = scheduler(3, config());
    for (id, prompt) in [(0, 30), (1, 200), (2, 20), (3, 20)] {
        s.put(spec(id, prompt, 1));
    }
    let plan = s.step(1);
    assert_eq!(spans(&plan), [(0, 0, 30), (1, 0, 64), (2, 0, 20)]);
    assert_eq!(spans(&s.step(1)), [(1, 64, 128)]);
}

#[test]
fn classes_do_not_matter_under_fcfs() {
    let s = scheduler(1, config());
    s.put(RequestSpec {
        class: PriorityClass::Low,
        ..spec(0, 1, 1)
    });
    s.put(spec(1, 1, 1));
    assert_eq!(s.step(1).request_ids, [0]);
}

/// Plans of a fixed random trace.
fn trace(policy: Policy) -> Vec<StepPlan> {
    let s = scheduler(4, SchedulerConfig { policy, ..config() });
    let mut random = Random(11);
    let mut plans = Vec::new();
    for _ in 0..2000 {
        match random.below(4) {
            0 if s.stats().waiting < 100 => {
                let prompt = usize::try_from(1 + random.below(400)).unwrap();
                let mut spec = spec(0, prompt, u32::try_from(1 + random.below(9)).unwrap());
                spec.id = None;
                spec.class = [PriorityClass::High, PriorityClass::Low][prompt % 2];
                s.put(spec);
            }
            1 => drop(s.abort(RequestId(random.below(400)), 0)),
            _ => {
                if let Some(plan) = s.try_plan() {
                    let token = i32::try_from(random.below(100)).unwrap();
                    s.commit_all(&plan, token);
                    plans.push(plan);
                }
            }
        }
    }
    plans
}

#[test]
fn same_trace_gives_the_same_plans() {
    for policy in [Policy::Fcfs, Policy::Priority] {
        let other = std::thread::spawn(move || trace(policy));
        let plans = trace(policy);
        assert!(plans.len() > 500);
        assert!(plans == other.join().unwrap());
    }
}
