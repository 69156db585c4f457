//! The scheduler with pages, tiers and preemption against a machine that keeps, for every token of
//! every layer, a hash of the whole prefix it stands for. Whatever is planned, a row must find in
//! its block table, layer by layer, exactly the prefix of its own request; and every request must
//! end with the tokens it would have alone.

#![expect(
    clippy::panic,
    reason = "a helper of a test fails by panicking, as a test does"
)]

mod step;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use proptest::prelude::*;

use super::*;
use crate::copy_job::{CopyFailure, CopyOutcome};
use crate::memory::{Admission, MemoryConfig, Preemption, StoreCopy, StreamBudget};
use crate::pages::{Addressing, PageConfig, PageEntry};
use crate::plan::StepPlan;
use crate::tree::WritePolicy;
use crate::{KvPiece, StatePiece};

const PAGE: usize = 64;
const VOCAB: u64 = 50;
const CONTEXT: usize = 640;

fn mix(a: u64, b: u64) -> u64 {
    let mut x = a ^ b.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^ (x >> 31)
}

/// Hash of each prefix of `tokens`.
fn prefixes(tokens: &[u32]) -> Vec<u64> {
    let mut hash = 1;
    tokens
        .iter()
        .map(|&token| {
            hash = mix(hash, u64::from(token) + 1);
            hash
        })
        .collect()
}

fn injected(job: u64) -> CopyOutcome {
    CopyOutcome::Failed(Box::new(CopyFailure::of(job, "injected")))
}

/// The token that follows a prefix.
fn next_token(prefix: u64) -> u32 {
    u32::try_from(prefix % VOCAB).unwrap()
}

#[derive(Clone, Debug)]
struct Setup {
    layers: u32,
    pages: Option<u32>,
    width: u32,
    host_pages: u32,
    hybrid: bool,
    slots: u32,
    park: bool,
    reserve: bool,
    preempt_every: u64,
    policy: WritePolicy,
}

/// How a step is run.
#[derive(Clone, Copy, Debug, Default)]
struct How {
    ahead: bool,
    broken: bool,
    /// An abort of the so-many-th request from the end before the step ends.
    abort: Option<u64>,
    stops: u8,
}

/// Request, slot, pages written and block table of each row.
fn places(plan: &StepPlan) -> Vec<(u64, i64, Vec<u32>, Vec<u32>)> {
    let int = |value: i64| usize::try_from(value).unwrap();
    let row = |row: usize| {
        let span = int(plan.token_offsets[row])..int(plan.token_offsets[row + 1]);
        let table = int(plan.table_offsets[row])..int(plan.table_offsets[row + 1]);
        let written = plan.token_pages[span].iter();
        (
            plan.request_ids[row],
            plan.slots[row],
            written.map(|&page| u32::try_from(page).unwrap()).collect(),
            plan.block_tables[table].to_vec(),
        )
    };
    (0..plan.request_ids.len()).map(row).collect()
}

/// Device and host memory of the simulated machine.
struct Machine {
    setup: Setup,
    scheduler: Scheduler,
    /// By flat page and offset: layer and prefix of the token stored there.
    device: HashMap<(u64, u32), u64>,
    /// By layer, host page and offset.
    host: HashMap<(u32, u32, u32), u64>,
    state: HashMap<u32, u64>,
    saved: HashMap<u32, u64>,
    stores: Vec<StoreCopy>,
    /// Plans handed out, oldest first, and whether a copy of theirs failed.
    flight: VecDeque<(StepPlan, bool)>,
    /// Tokens of the latest step that ran.
    latest: Vec<i32>,
    aborted: BTreeSet<u64>,
    asked: BTreeMap<u64, (Vec<u32>, u32)>,
    known: HashMap<u64, Vec<u32>>,
    next_id: u64,
}

impl Machine {
    fn new(setup: Setup) -> Self {
        let memory = MemoryConfig {
            page_size: 64,
            pages: setup.pages.map(|num_pages| PageConfig {
                num_pages,
                num_layers: setup.layers,
                page_size: 64,
                slot_widths: setup.width,
                addressing: Addressing::Flat,
                cap_high: None,
                cap_low: None,
            }),
            prefix_cache: true,
            policy: setup.policy,
            host_pages: setup.host_pages,
            snapshots: if setup.hybrid { 6 } else { 0 },
            staging: if setup.hybrid { 2 } else { 0 },
            state_slots: setup.slots,
            hybrid: setup.hybrid,
            snapshot_interval: 128,
            page_bytes: 1000,
            admission: if setup.reserve {
                Admission::Reserve
            } else {
                Admission::Estimate { ratio: 0.3 }
            },
            preemption: if setup.park {
                Preemption::Park
            } else {
                Preemption::Recompute
            },
            preempt_every: setup.preempt_every,
            load_back_threshold: 1,
            stream: StreamBudget {
                bytes_per_ms: 1500.0,
                low_step_ms: 3.0,
                low_max_wait_steps: 3,
                ..StreamBudget::default()
            },
        };
        let config = SchedulerConfig {
            max_batch_tokens: 256,
            max_waiting: 1000,
            max_results: 100_000,
            max_context: CONTEXT,
            vocab_size: u32::try_from(VOCAB).unwrap(),
            policy: Policy::Priority,
            memory,
        };
        Self {
            scheduler: scheduler(setup.slots, config),
            setup,
            device: HashMap::new(),
            host: HashMap::new(),
            state: HashMap::new(),
            saved: HashMap::new(),
            stores: Vec::new(),
            flight: VecDeque::new(),
            latest: Vec::new(),
            aborted: BTreeSet::new(),
            asked: BTreeMap::new(),
            known: HashMap::new(),
            next_id: 0,
        }
    }

    fn submit(&mut self, prompt: Vec<u32>, max_tokens: u32, class: PriorityClass) -> bool {
        let id = self.next_id;
        let spec = RequestSpec {
            id: Some(RequestId(id)),
            prompt: prompt.clone().into(),
            sampling: SamplingSpec {
                max_tokens,
                ..SamplingSpec::default()
            },
            class,
        };
        match self.scheduler.submit(spec, 0) {
            Ok(_) => {
                self.next_id += 1;
                self.asked.insert(id, (prompt.clone(), max_tokens));
                self.known.insert(id, prompt);
                true
            }
            Err(Error::OutOfPages { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    }

    /// Flat page of a block-table entry at a layer.
    fn flat(&self, entry: u32, layer: u32, k0: u64) -> u64 {
        let entry = PageEntry(entry);
        let Some(pages) = self.setup.pages else {
            return u64::from(entry.base()) + u64::from(layer) * u64::from(self.setup.slots);
        };
        let step = if entry.is_low() {
            (k0 + u64::from(layer)) % u64::from(self.setup.width)
        } else {
            u64::from(layer)
        };
        u64::from(entry.base()) + step * u64::from(pages)
    }

    fn copy_in(&mut self, piece: KvPiece, layer: u32, low: bool, k0: u64) {
        let entry = piece.device_page | if low { 1 << 31 } else { 0 };
        let flat = self.flat(entry, layer, k0);
        for at in 0..piece.tokens {
            let value = self.host.get(&(layer, piece.host_page.0, at)).copied();
            let place = (flat, piece.device_token + at);
            match value {
                Some(value) => self.device.insert(place, value),
                None => self.device.remove(&place),
            };
        }
    }

    fn copy_out(&mut self, store: &StoreCopy) {
        for piece in &store.kv {
            for layer in 0..self.setup.layers {
                let flat = self.flat(piece.device_page, layer, 0);
                for at in 0..piece.tokens {
                    let value = self.device.get(&(flat, piece.device_token + at)).copied();
                    let place = (layer, piece.host_page.0, at);
                    match value {
                        Some(value) => self.host.insert(place, value),
                        None => self.host.remove(&place),
                    };
                }
            }
        }
        for piece in &store.state {
            let value = self.state.get(&piece.device_slot).copied().unwrap_or(0);
            self.saved.insert(piece.host_slot, value);
        }
    }

    fn abort(&mut self, back: u64) {
        if let Some(id) = self.next_id.checked_sub(back + 1) {
            let aborted = self.scheduler.abort(RequestId(id), 0);
            assert_eq!(aborted, aborted && self.aborted.insert(id));
        }
    }

    /// Ends the store at `at`.
    fn end_store(&mut self, at: usize, ok: bool) {
        let store = self.stores.remove(at);
        let outcome = if ok {
            self.copy_out(&store);
            CopyOutcome::Done
        } else {
            injected(store.job)
        };
        self.scheduler.complete(store.job, outcome);
    }

    /// Runs everything to its end and checks that nothing is left behind.
    fn drain(&mut self) {
        let mut idle = 0;
        for _ in 0..200_000 {
            let ran = self.step(|| false, How::default());
            while !self.stores.is_empty() {
                self.end_store(0, true);
            }
            idle = if ran { 0 } else { idle + 1 };
            if idle > 2 {
                break;
            }
        }
        let stats = self.scheduler.stats();
        assert_eq!(
            (stats.waiting, stats.running),
            (0, 0),
            "{}",
            self.scheduler.describe()
        );
        self.scheduler.check_idle().unwrap();
        for (id, (prompt, max_tokens)) in &self.asked {
            let Ok(RequestStatus::Finished(result)) = self.scheduler.poll(RequestId(*id)) else {
                panic!("request {id} has no result");
            };
            if let Some(error) = result
                .message
                .as_ref()
                .filter(|e| e.starts_with("OutOfPages"))
            {
                assert!(error.contains(" 0 can be had"), "{error}");
            }
            let mut tokens = prompt.clone();
            for _ in 0..result.tokens.len() {
                tokens.push(next_token(*prefixes(&tokens).last().unwrap()));
            }
            assert_eq!(result.tokens, tokens[prompt.len()..], "request {id}");
            if result.reason == FinishReason::Length {
                let room = CONTEXT - prompt.len();
                assert_eq!(result.tokens.len(), room.min(*max_tokens as usize));
                let cached = result.cached.device + result.cached.host + result.cached.streamed;
                assert_eq!(result.computed_prompt_tokens + cached, prompt.len());
            }
        }
    }
}

/// Prompts with a few shared beginnings.
fn prompt(family: u32, shared: usize, own: usize, salt: u32) -> Vec<u32> {
    let common = (0..shared).map(|at| (u32::try_from(at).unwrap() * 7 + family) % 50);
    let rest = (0..own).map(|at| (u32::try_from(at).unwrap() * 3 + salt) % 50);
    common.chain(rest).collect()
}

#[derive(Clone, Debug)]
enum Op {
    Submit {
        family: u32,
        shared: usize,
        own: usize,
        salt: u32,
        max_tokens: u32,
        low: bool,
    },
    Step {
        fails: u8,
        how: How,
    },
    Abort(u64),
    EndStore {
        at: usize,
        ok: bool,
    },
}

fn how() -> impl Strategy<Value = How> {
    let abort = proptest::option::weighted(0.1, 0..6u64);
    let stops = prop_oneof![8 => Just(0u8), 1 => any::<u8>()];
    (proptest::bool::weighted(0.7), 0..60u8, abort, stops).prop_map(
        |(ahead, broken, abort, stops)| How {
            ahead,
            broken: broken == 0,
            abort,
            stops,
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0..3u32, 0..5usize, 1..90usize, 0..50u32, 1..70u32, any::<bool>()).prop_map(
            |(family, shared, own, salt, max_tokens, low)| Op::Submit {
                family, shared: shared * 64 + shared, own, salt, max_tokens, low,
            }
        ),
        12 => (0..20u8, how()).prop_map(|(fails, how)| Op::Step { fails, how }),
        1 => (0..12u64).prop_map(Op::Abort),
        5 => (0..8usize, 0..10u8).prop_map(|(at, ok)| Op::EndStore { at, ok: ok > 0 }),
    ]
}

fn setup() -> impl Strategy<Value = Setup> {
    let policy = prop_oneof![
        4 => Just(WritePolicy::WriteThrough),
        1 => Just(WritePolicy::Selective { hits: 2 }),
        1 => Just(WritePolicy::WriteBack),
        1 => Just(WritePolicy::None),
    ];
    (
        (
            2..6u32,
            prop_oneof![1 => Just(None), 4 => (2..20u32).prop_map(Some)],
            1..4u32,
        ),
        (
            prop_oneof![1 => Just(0u32), 1 => Just(8u32), 2 => 8..40u32],
            any::<bool>(),
            1..5u32,
        ),
        (any::<bool>(), any::<bool>(), 0..4u64, policy),
    )
        .prop_map(
            |((layers, pages, width), (host_pages, hybrid, slots), rest)| Setup {
                layers,
                pages,
                width: width.min(layers),
                host_pages,
                hybrid,
                slots,
                park: rest.0,
                reserve: rest.1,
                preempt_every: rest.2,
                policy: rest.3,
            },
        )
}

fn run(setup: Setup, ops: Vec<Op>) {
    let mut machine = Machine::new(setup);
    for op in ops {
        match op {
            Op::Submit {
                family,
                shared,
                own,
                salt,
                max_tokens,
                low,
            } => {
                let class = if low {
                    PriorityClass::Low
                } else {
                    PriorityClass::High
                };
                machine.submit(prompt(family, shared, own, salt), max_tokens, class);
            }
            Op::Step { fails, how } => {
                let mut count = 0;
                let fails = move || {
                    count += 1;
                    fails != 0 && count % (u32::from(fails) + 1) == 1 && fails < 4
                };
                machine.step(fails, how);
            }
            Op::Abort(back) => {
                machine.abort(back);
            }
            Op::EndStore { at, ok } => {
                if !machine.stores.is_empty() {
                    let at = at % machine.stores.len();
                    machine.end_store(at, ok);
                }
            }
        }
        machine.scheduler.check().unwrap();
    }
    machine.drain();
}

proptest! {
    #![proptest_config(ProptestConfig {
        // 128 in an ordinary run; `PROPTEST_CASES` sets twice the number of a longer one.
        cases: ProptestConfig::default().cases.div_ceil(2),
        max_shrink_iters: 3000,
        ..ProptestConfig::default()
    })]

    /// PAG-03, HST-04 (a state on its way to the host is read when its copy ends, whole steps
    /// later), HST-15, LEK-04, LEK-07.
    #[test]
    fn every_row_finds_its_own_prefix_and_nothing_is_lost(
        setup in setup(),
        ops in prop::collection::vec(op(), 1..120),
    ) {
        run(setup, ops);
    }
}

/// So many pages, five of which are the cached prompt of a request that is gone.
fn with_a_prefix(pages: u32, host_pages: u32, reserve: bool, policy: WritePolicy) -> Machine {
    let mut machine = Machine::new(Setup {
        layers: 2,
        pages: Some(pages),
        width: 1,
        host_pages,
        hybrid: false,
        slots: 2,
        park: false,
        reserve,
        preempt_every: 0,
        policy,
    });
    machine.submit(prompt(0, 320, 0, 0), 1, PriorityClass::High);
    while machine.step(|| false, How::default()) {}
    machine
}

/// Eight pages. Four of the five are read by a store, whose end makes that of the fifth due.
fn with_a_store(reserve: bool) -> Machine {
    let machine = with_a_prefix(8, 20, reserve, WritePolicy::WriteThrough);
    assert_eq!(machine.stores.len(), 1);
    machine
}

/// SCH-13, Q6: a store that would take pages from a request that was promised them waits for it.
#[test]
fn what_is_reserved_is_not_stored_meanwhile() {
    for (ahead, aborted) in [(false, false), (false, true), (true, true)] {
        let how = How {
            ahead,
            ..How::default()
        };
        let mut machine = with_a_store(true);
        machine.submit(prompt(1, 0, 10, 0), 246, PriorityClass::High);
        machine.step(|| false, How::default());
        machine.end_store(0, true);
        machine.submit(prompt(1, 0, 10, 0), 182, PriorityClass::High);
        machine.step(|| false, How::default());
        machine.step(|| false, how);
        if aborted {
            machine.abort(1);
            while machine.stores.is_empty() {
                assert!(machine.step(|| false, how));
            }
            assert_eq!(machine.scheduler.stats().running, 1, "the other goes on");
        } else {
            while machine.scheduler.stats().running > 0 {
                assert!(machine.step(|| false, How::default()));
                assert!(machine.stores.is_empty() || machine.scheduler.stats().running < 2);
            }
            assert_eq!(machine.scheduler.stats().deferred_rows, 0);
        }
        machine.drain();
    }
}

/// Nobody gives way for a page that is there once a copy ends.
#[test]
fn a_page_that_a_copy_reads_is_waited_for() {
    let mut machine = with_a_store(false);
    for family in 1..3 {
        machine.submit(prompt(family, 0, 60, 0), 100, PriorityClass::High);
    }
    while machine.step(|| false, How::default()) {}
    let stats = machine.scheduler.stats();
    assert_eq!((stats.running, stats.preemptions), (2, 0));
    machine.drain();
    assert_eq!(machine.scheduler.stats().preemptions, 0);
}

/// Also if it was reserved: a store that has to come before a page can be had is not held back.
#[test]
fn a_page_that_leaves_for_the_host_is_reserved_all_the_same() {
    let mut machine = with_a_prefix(8, 20, true, WritePolicy::WriteBack);
    assert!(machine.stores.is_empty());
    machine.submit(prompt(1, 0, 10, 0), 500, PriorityClass::High);
    machine.drain();
    let stats = machine.scheduler.stats();
    assert_eq!((stats.preemptions, stats.finished_length), (0, 2));
}

/// The last page of the prefix goes to the host, which has no room for the two before it: these are
/// locked by that copy, and can be had behind it.
#[test]
fn a_page_that_cannot_leave_for_the_host_is_had_without() {
    let mut machine = with_a_prefix(6, 1, false, WritePolicy::WriteBack);
    machine.submit(prompt(1, 0, 300, 0), 10, PriorityClass::High);
    machine.drain();
    assert_eq!(machine.scheduler.stats().finished_length, 2);
}
