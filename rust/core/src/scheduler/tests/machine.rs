//! Random operations on the scheduler and on its model; after each, both must agree.

use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

use super::model::{Model, invalid};
use super::*;
use crate::error::Result;

const VOCAB: u32 = 6;

#[derive(Clone, Copy, Debug)]
enum Flaw {
    EmptyPrompt,
    TokenOutsideVocabulary,
    PromptOfContextLength,
    NoMaxTokens,
    MinAboveMax,
    Temperature,
    StopOutsideVocabulary,
}

#[derive(Clone, Debug)]
enum Op {
    Submit(RequestSpec, Option<Flaw>),
    Plan,
    /// The step after one of the latest three; after the oldest in flight if `None`.
    PlanAhead(Option<u64>),
    /// Tokens and stop flags of the sampled rows, as far as there are any.
    Commit(Vec<i32>, Vec<bool>),
    /// A commit of the oldest step in flight with one token or one flag too many.
    CommitWrongLength(bool),
    /// A commit or a fail of a step that may not be the oldest in flight.
    Stale(u64, bool),
    Fail,
    Abort(u64),
    Take(u64),
    Poll(u64),
    Close(FinishReason),
}

#[derive(Clone, Debug, PartialEq)]
enum Outcome {
    Submitted(Result<RequestId>),
    Planned(Result<Option<(u64, Vec<Row>)>>),
    Committed(Result<CommitReport>),
    Failed(Result<Vec<RequestId>>),
    Aborted(bool),
    Taken(Result<RequestResult>),
    Polled(Result<RequestStatus>),
    Nothing,
}

/// The model, and what its latest operation was and gave.
#[derive(Clone, Debug)]
struct Reference {
    slots: u32,
    /// Short prompts, long answers and few arrivals, so that most steps are of decode rows.
    steady: bool,
    model: Model,
    /// Epoch and arguments of the latest commit or fail.
    epoch: Epoch,
    tokens: Vec<i32>,
    stops: Vec<bool>,
    outcome: Outcome,
}

fn break_spec(spec: &mut RequestSpec, flaw: Flaw, max_context: usize) -> Error {
    let sampling = &mut spec.sampling;
    match flaw {
        Flaw::EmptyPrompt => {
            spec.prompt = Box::default();
            invalid("prompt")
        }
        Flaw::TokenOutsideVocabulary => {
            *spec.prompt.last_mut().unwrap() = VOCAB;
            invalid("prompt")
        }
        Flaw::PromptOfContextLength => {
            spec.prompt = vec![0; max_context].into();
            Error::PromptTooLong {
                prompt_tokens: max_context,
                max_context,
            }
        }
        Flaw::NoMaxTokens => {
            sampling.max_tokens = 0;
            invalid("max_tokens")
        }
        Flaw::MinAboveMax => {
            sampling.min_tokens = sampling.max_tokens + 1;
            invalid("min_tokens")
        }
        Flaw::Temperature => {
            sampling.temperature = f32::NAN;
            invalid("temperature")
        }
        Flaw::StopOutsideVocabulary => {
            sampling.stop_token_ids = Box::new([VOCAB]);
            invalid("stop_token_ids")
        }
    }
}

fn ids() -> std::ops::Range<u64> {
    0..14
}

fn flaws() -> impl Strategy<Value = Flaw> {
    prop_oneof![
        Just(Flaw::EmptyPrompt),
        Just(Flaw::TokenOutsideVocabulary),
        Just(Flaw::PromptOfContextLength),
        Just(Flaw::NoMaxTokens),
        Just(Flaw::MinAboveMax),
        Just(Flaw::Temperature),
        Just(Flaw::StopOutsideVocabulary),
    ]
}

fn submits(max_context: usize, steady: bool) -> impl Strategy<Value = Op> {
    let longest = if steady {
        8.min(max_context - 1)
    } else {
        max_context - 1
    };
    let lengths = prop_oneof![
        4 => 1..=8usize,
        3 => prop_oneof![Just(63usize), Just(64), Just(65), Just(128), Just(129)],
        3 => 1..=700usize,
        1 => Just(longest),
    ];
    let prompt = lengths.prop_flat_map(move |length| {
        proptest::collection::vec(0..VOCAB, length.min(longest)..=length.min(longest))
    });
    let max_tokens = if steady { 1..20u32 } else { 1..6u32 };
    let sampling = (
        max_tokens,
        0..6u32,
        proptest::collection::vec(0..VOCAB, 0..2),
    );
    let id = proptest::option::weighted(0.7, ids());
    let flaw = proptest::option::weighted(0.1, flaws());
    (id, prompt, sampling, any::<bool>(), flaw).prop_map(|(id, prompt, sampling, low, flaw)| {
        let (max_tokens, min_tokens, stop_token_ids) = sampling;
        let sampling = SamplingSpec {
            max_tokens,
            min_tokens: min_tokens.min(max_tokens),
            stop_token_ids: stop_token_ids.into(),
            ..SamplingSpec::default()
        };
        let class = if low {
            PriorityClass::Low
        } else {
            PriorityClass::High
        };
        let spec = RequestSpec {
            id: id.map(RequestId),
            prompt: prompt.into(),
            sampling,
            class,
        };
        Op::Submit(spec, flaw)
    })
}

impl Reference {
    /// Tokens and stops cut to what the oldest step in flight samples.
    fn arguments(&mut self, tokens: &[i32], stops: &[bool]) {
        let samples = self.model.samples();
        self.epoch = self.model.oldest();
        self.tokens = tokens.iter().copied().cycle().take(samples).collect();
        self.stops = stops.iter().copied().cycle().take(samples).collect();
    }

    fn commit(&mut self) -> Outcome {
        let (tokens, stops) = (self.tokens.clone(), self.stops.clone());
        Outcome::Committed(self.model.commit(self.epoch, &tokens, &stops))
    }
}

impl ReferenceStateMachine for Reference {
    type State = Self;
    type Transition = Op;

    fn init_state() -> BoxedStrategy<Self> {
        let policy = prop_oneof![Just(Policy::Fcfs), Just(Policy::Priority)];
        let max_context = prop_oneof![1 => 2..70usize, 4 => 100..700usize];
        (
            1..=8usize,
            1..=12usize,
            0..=15usize,
            max_context,
            policy,
            (1..=9u32, any::<bool>()),
        )
            .prop_map(
                |(blocks, max_waiting, spare_results, max_context, policy, (slots, steady))| {
                    let config = SchedulerConfig {
                        max_batch_tokens: blocks * CHUNK_ALIGN,
                        max_waiting,
                        max_results: max_waiting + slots as usize + spare_results,
                        max_context,
                        vocab_size: VOCAB,
                        policy,
                        memory: MemoryConfig::default(),
                    };
                    Self {
                        slots,
                        steady,
                        model: Model::new(config, slots as usize),
                        epoch: Epoch(0),
                        tokens: Vec::new(),
                        stops: Vec::new(),
                        outcome: Outcome::Nothing,
                    }
                },
            )
            .boxed()
    }

    fn transitions(state: &Self) -> BoxedStrategy<Op> {
        let token = prop_oneof![12 => 0..6i32, 1 => prop_oneof![Just(-1), Just(6), Just(i32::MIN)]];
        let tokens = proptest::collection::vec(token, 9);
        let stops = prop_oneof![
            2 => Just(Vec::new()),
            1 => proptest::collection::vec(proptest::bool::weighted(0.2), 9),
        ];
        let finish = prop_oneof![Just(FinishReason::Abort), Just(FinishReason::Error)];
        let epoch = state.model.epoch;
        prop_oneof![
            if state.steady { 20 } else { 120 } => submits(state.model.config.max_context, state.steady),
            120 => Just(Op::Plan),
            120 => Just(Op::PlanAhead(None)),
            6 => (epoch.saturating_sub(2)..epoch + 2).prop_map(|epoch| Op::PlanAhead(Some(epoch))),
            120 => (tokens, stops).prop_map(|(tokens, stops)| Op::Commit(tokens, stops)),
            6 => any::<bool>().prop_map(Op::CommitWrongLength),
            6 => (epoch.saturating_sub(2)..epoch + 2, any::<bool>())
                .prop_map(|(epoch, fail)| Op::Stale(epoch, fail)),
            5 => Just(Op::Fail),
            30 => ids().prop_map(Op::Abort),
            15 => ids().prop_map(Op::Take),
            15 => ids().prop_map(Op::Poll),
            1 => finish.prop_map(Op::Close),
        ]
        .boxed()
    }

    fn apply(mut state: Self, op: &Op) -> Self {
        state.model.now += 1;
        state.outcome = match op {
            Op::Submit(spec, flaw) => {
                let mut spec = spec.clone();
                let max_context = state.model.config.max_context;
                let flaw = flaw.map(|flaw| break_spec(&mut spec, flaw, max_context));
                Outcome::Submitted(state.model.submit(spec, flaw))
            }
            Op::Plan => {
                let rows = state.model.plan();
                let epoch = state.model.epoch;
                Outcome::Planned(rows.map(|rows| rows.map(|rows| (epoch, rows))))
            }
            Op::PlanAhead(epoch) => {
                state.epoch = epoch.map_or(state.model.oldest(), Epoch);
                let rows = state.model.plan_ahead(state.epoch);
                let epoch = state.model.epoch;
                Outcome::Planned(rows.map(|rows| rows.map(|rows| (epoch, rows))))
            }
            Op::Commit(tokens, stops) => {
                state.arguments(tokens, stops);
                state.commit()
            }
            Op::CommitWrongLength(in_tokens) => {
                state.arguments(&[0], &[false]);
                if *in_tokens {
                    state.tokens.push(0);
                } else {
                    state.stops.push(false);
                }
                state.commit()
            }
            Op::Stale(epoch, fail) => {
                state.arguments(&[0], &[]);
                state.epoch = Epoch(*epoch);
                if *fail {
                    Outcome::Failed(state.model.fail(state.epoch, "stale"))
                } else {
                    state.commit()
                }
            }
            Op::Fail => {
                state.epoch = state.model.oldest();
                Outcome::Failed(state.model.fail(state.epoch, "out of memory"))
            }
            Op::Abort(id) => Outcome::Aborted(state.model.abort(RequestId(*id))),
            Op::Take(id) => Outcome::Taken(state.model.take(RequestId(*id))),
            Op::Poll(id) => Outcome::Polled(state.model.status(RequestId(*id))),
            Op::Close(finish) => {
                state.model.close("done", *finish);
                Outcome::Nothing
            }
        };
        state
    }
}

/// An invalid field is compared by name.
fn without_words<T>(result: Result<T>) -> Result<T> {
    result.map_err(|error| match error {
        Error::InvalidRequest { field, .. } => invalid(field),
        other => other,
    })
}

struct Machine;

impl StateMachineTest for Machine {
    type SystemUnderTest = Scheduler;
    type Reference = Reference;

    fn init_test(reference: &Reference) -> Scheduler {
        scheduler(reference.slots, reference.model.config.clone())
    }

    fn apply(scheduler: Scheduler, reference: &Reference, op: Op) -> Scheduler {
        let Reference {
            model,
            epoch,
            tokens,
            stops,
            ..
        } = reference;
        let (epoch, now) = (*epoch, model.now);
        let committed = |scheduler: &Scheduler| {
            Outcome::Committed(without_words(scheduler.commit(epoch, tokens, stops, now)))
        };
        let before = (scheduler.stats(), scheduler.slots().dump());
        let outcome = match op {
            Op::Submit(mut spec, flaw) => {
                if let Some(flaw) = flaw {
                    break_spec(&mut spec, flaw, model.config.max_context);
                }
                Outcome::Submitted(without_words(scheduler.submit(spec, now)))
            }
            Op::Plan => {
                let next = scheduler.next_plan(NOW, || now);
                Outcome::Planned(next.map(|next| match next {
                    NextPlan::Plan(plan) => Some((plan.epoch.0, rows(&plan))),
                    NextPlan::TimedOut => None,
                }))
            }
            Op::PlanAhead(_) => {
                let ahead = scheduler.plan_ahead(epoch);
                Outcome::Planned(ahead.map(|plan| plan.map(|plan| (plan.epoch.0, rows(&plan)))))
            }
            Op::Commit(..) | Op::CommitWrongLength(_) | Op::Stale(_, false) => {
                committed(&scheduler)
            }
            Op::Stale(_, true) => Outcome::Failed(scheduler.fail(epoch, "stale", now)),
            Op::Fail => Outcome::Failed(scheduler.fail(epoch, "out of memory", now)),
            Op::Abort(id) => Outcome::Aborted(scheduler.abort(RequestId(id), now)),
            Op::Take(id) => {
                let taken = scheduler.take_result(RequestId(id));
                Outcome::Taken(taken.map(|result| (*result).clone()))
            }
            Op::Poll(id) => Outcome::Polled(scheduler.poll(RequestId(id))),
            Op::Close(finish) => {
                scheduler.close("done", finish, now);
                Outcome::Nothing
            }
        };
        let refused = matches!(
            outcome,
            Outcome::Submitted(Err(_))
                | Outcome::Planned(Err(_) | Ok(None))
                | Outcome::Committed(Err(_))
                | Outcome::Failed(Err(_))
                | Outcome::Aborted(false)
        );
        if refused {
            let after = (scheduler.stats(), scheduler.slots().dump());
            assert_eq!(after, before, "a refused call changes nothing");
        }
        assert_eq!(outcome, reference.outcome);
        scheduler
    }

    fn check_invariants(scheduler: &Scheduler, reference: &Reference) {
        scheduler.check().unwrap();
        assert_eq!(scheduler.stats(), reference.model.stats());
        let slots = scheduler.slots().stats();
        let counts = [slots.free, slots.in_use, slots.finishing].map(|count| count as usize);
        assert_eq!(counts, reference.model.slot_counts());
        for id in ids() {
            let id = RequestId(id);
            assert_eq!(scheduler.poll(id), reference.model.status(id));
        }
    }

    /// Abort all, drain: nothing is left (LEK-07).
    fn teardown(scheduler: Scheduler, reference: Reference) {
        let auto_ids = reference.model.stats.submitted + ids().end;
        for id in 0..auto_ids {
            scheduler.abort(RequestId(id), 0);
        }
        let flies = scheduler.slots().stats().finishing > 0;
        let mut failed = 0;
        for epoch in reference.model.oldest().0..=reference.model.epoch {
            failed += usize::from(scheduler.fail(Epoch(epoch), "drain", 0).is_ok());
        }
        assert!(failed > 0 || !flies);
        scheduler.drain(None, 0..auto_ids);
    }
}

prop_state_machine! {
    #[test]
    fn behaves_like_the_naive_scheduler(sequential 1..120 => Machine);
}
