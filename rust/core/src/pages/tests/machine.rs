//! Random calls on the allocator, on a twin and on the model; after each, all must agree.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

use super::model::{Model, Slot, invalid};
use super::*;
use crate::error::Error;
use PriorityClass::{High, Low};

#[derive(Clone, Debug)]
enum Call {
    Alloc(usize, Option<u32>, PriorityClass),
    AllocMany(Vec<(usize, Option<u32>)>, PriorityClass),
    Free(Vec<PageEntry>, Owner, Epoch),
    Transfer(Vec<PageEntry>, Owner, Owner),
    Pin(Vec<PageEntry>),
    Unpin(Vec<PageEntry>),
    Retire(Epoch),
    SetCap(PriorityClass, u32),
    Reclaim(u32),
    Restore,
}

#[derive(Clone, Debug, PartialEq)]
enum Outcome {
    Pages(Result<TracedPages>),
    Plan(Result<Vec<u32>>),
    Done(Result<()>),
}

impl Outcome {
    fn error(&self) -> Option<&Error> {
        match self {
            Self::Pages(result) => result.as_ref().err(),
            Self::Plan(result) => result.as_ref().err(),
            Self::Done(result) => result.as_ref().err(),
        }
    }

    /// Fields are compared, words are not.
    fn without_words(self) -> Self {
        fn bare<T>(result: Result<T>) -> Result<T> {
            result.map_err(|error| match error {
                Error::InvalidRequest { field, .. } => invalid(field),
                Error::Config { field, .. } => Error::config(field, "", ""),
                other => other,
            })
        }
        match self {
            Self::Pages(result) => Self::Pages(bare(result)),
            Self::Plan(result) => Self::Plan(bare(result)),
            Self::Done(result) => Self::Done(bare(result)),
        }
    }
}

/// A stream of numbers that every choice is made from.
trait Dice {
    fn next(&mut self) -> u32;

    fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n.max(1)
    }

    fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == n - 1
    }
}

impl Dice for std::vec::IntoIter<u32> {
    fn next(&mut self) -> u32 {
        Iterator::next(self).unwrap_or(0)
    }
}

/// splitmix64.
struct Random(u64);

impl Dice for Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        u32::try_from((z ^ (z >> 31)) >> 32).unwrap()
    }
}

fn draw_config(dice: &mut impl Dice) -> PageConfig {
    let num_pages = 1 + u32::try_from(dice.below(24)).unwrap();
    let num_layers = dice.of(&[4, 8, 15, 16, 36, 64]);
    let cap = |dice: &mut dyn FnMut(usize) -> usize| {
        let cap = dice(2 * num_pages as usize + 2);
        u32::try_from(cap).ok().filter(|&cap| cap <= num_pages)
    };
    PageConfig {
        num_pages,
        num_layers,
        page_size: dice.of(&[64, 128, 256]),
        slot_widths: dice.of(&[1, 2, 3, 4]),
        addressing: dice.of(&[Addressing::Flat, Addressing::Flat, Addressing::Strict]),
        cap_high: cap(&mut |n| dice.below(n)),
        cap_low: cap(&mut |n| dice.below(n)),
    }
}

fn draw_call(model: &Model, dice: &mut impl Dice) -> Call {
    let class = dice.of(&[Low, Low, Low, High]);
    let owner = dice.of(&[Owner::Request, Owner::Request, Owner::Tree, Owner::Copy]);
    match dice.below(100) {
        0..30 => {
            let (n, start) = draw_item(model, class, dice);
            Call::Alloc(n, start, class)
        }
        30..42 => {
            let items = 0..dice.below(6);
            let items = items.map(|_| draw_item(model, class, dice)).collect();
            Call::AllocMany(items, class)
        }
        42..66 => {
            let slots = model.live.iter().filter(|&(_, &o)| o == owner);
            let slots: Vec<Slot> = slots.map(|(&slot, _)| slot).collect();
            let late = u64::try_from(dice.below(4)).unwrap();
            let epoch = dice.of(&[0, 0, model.retired.0, model.retired.0 + late]);
            Call::Free(draw_entries(model, slots, dice), owner, Epoch(epoch))
        }
        66..76 => {
            let slots = model.live.iter().filter(|&(_, &o)| o == owner);
            let slots: Vec<Slot> = slots.map(|(&slot, _)| slot).collect();
            let to = dice.of(&[Owner::Request, Owner::Tree, Owner::Copy]);
            Call::Transfer(draw_entries(model, slots, dice), owner, to)
        }
        76..82 => {
            let slots = model.live.keys().copied().collect();
            Call::Pin(draw_entries(model, slots, dice))
        }
        82..88 => {
            let slots = model.pins.keys().copied().collect();
            Call::Unpin(draw_entries(model, slots, dice))
        }
        88..93 => {
            let ahead = u64::try_from(dice.below(3)).unwrap();
            Call::Retire(Epoch((model.retired.0 + ahead).saturating_sub(1)))
        }
        93..96 => {
            let pages = model.config.num_pages;
            let cap = u32::try_from(dice.below(pages as usize)).unwrap();
            let class = dice.of(&[Low, High]);
            Call::SetCap(class, dice.of(&[cap, pages, pages + 1]))
        }
        96..98 => Call::Reclaim(u32::try_from(dice.below(model.class.len() + 2)).unwrap()),
        _ => Call::Restore,
    }
}

fn draw_item(model: &Model, class: PriorityClass, dice: &mut impl Dice) -> (usize, Option<u32>) {
    let start = match dice.below(16) {
        0..6 => None,
        6..15 => Some(dice.of(&model.starts(class))),
        _ => Some(u32::try_from(dice.below(70)).unwrap()),
    };
    let n = match dice.below(16) {
        0..8 => dice.below(4),
        8..12 => dice.below(12),
        12..15 => (model.available(class) + dice.below(3)).saturating_sub(1),
        _ => dice.of(&[1_000, usize::MAX]),
    };
    (n, start)
}

/// Some of `slots`, now and then with one that does not belong there.
fn draw_entries(model: &Model, mut slots: Vec<Slot>, dice: &mut impl Dice) -> Vec<PageEntry> {
    let foreign = model.live.keys().filter(|slot| !slots.contains(slot));
    let foreign: Vec<Slot> = foreign.copied().collect();
    let most = if dice.one_in(8) { slots.len() } else { 5 };
    let count = dice.below(most.min(slots.len()) + 1);
    for i in 0..count {
        let pick = i + dice.below(slots.len() - i);
        slots.swap(i, pick);
    }
    slots.truncate(count);
    let mut entries: Vec<_> = slots.iter().map(|&slot| model.entry_of(slot)).collect();
    if dice.one_in(3) {
        let raw = u32::try_from(dice.below(model.config.num_pages as usize)).unwrap();
        let class = dice.of(&[Low, High]);
        let start = dice.of(&model.starts(class));
        let entry = match dice.below(8) {
            0..2 if !entries.is_empty() => dice.of(&entries),
            2..6 if !foreign.is_empty() => model.entry_of(dice.of(&foreign)),
            6 => PageEntry(dice.next()),
            _ => model.entry((raw, start), class),
        };
        entries.insert(dice.below(entries.len() + 1), entry);
    }
    entries
}

fn apply_to_model(model: &mut Model, call: &Call) -> Outcome {
    match call {
        Call::Alloc(n, start, class) => {
            let mut pages = model.alloc_many(&[(*n, *start)], *class);
            if let Err(Error::OutOfPages { item, .. }) = &mut pages {
                *item = None;
            }
            Outcome::Pages(pages)
        }
        Call::AllocMany(items, class) => Outcome::Pages(model.alloc_many(items, *class)),
        Call::Free(entries, owner, epoch) => Outcome::Done(model.free(entries, *owner, *epoch)),
        Call::Transfer(entries, from, to) => Outcome::Done(model.transfer(entries, *from, *to)),
        Call::Pin(entries) => Outcome::Done(model.pin(entries)),
        Call::Unpin(entries) => Outcome::Done(model.unpin(entries)),
        Call::Retire(epoch) => {
            model.retire(*epoch);
            Outcome::Done(Ok(()))
        }
        Call::SetCap(class, cap) => Outcome::Done(model.set_cap(*class, *cap)),
        Call::Reclaim(k) => Outcome::Plan(model.reclaim_plan(*k)),
        Call::Restore => Outcome::Done(Ok(())),
    }
}

/// Two allocators that get the same calls; only the twin is asked for steps and restored.
struct Pair {
    real: PageAllocator,
    twin: PageAllocator,
}

impl Pair {
    fn new(config: &PageConfig) -> Self {
        let new = || PageAllocator::new(config.clone()).unwrap();
        let (real, twin) = (new(), new());
        Self { real, twin }
    }

    fn both<T: PartialEq + std::fmt::Debug>(&self, call: impl Fn(&PageAllocator) -> T) -> T {
        let result = call(&self.real);
        assert_eq!(call(&self.twin), result);
        result
    }

    fn apply(&mut self, call: &Call) -> Outcome {
        match call {
            Call::Alloc(n, start, class) => {
                let traced = self.twin.alloc_traced(&[(*n, *start)], *class);
                let traced = traced.map_err(|mut error| {
                    if let Error::OutOfPages { item, .. } = &mut error {
                        assert_eq!(item.take(), Some(0));
                    }
                    error
                });
                let plain = self.real.alloc(*n, *class, *start);
                assert_eq!(plain, traced.clone().map(|mut items| items.remove(0).0));
                Outcome::Pages(traced)
            }
            Call::AllocMany(items, class) => {
                let traced = self.twin.alloc_traced(items, *class);
                let plain = self.real.alloc_many(items, *class);
                let pages = traced.clone();
                let pages = pages.map(|items| items.into_iter().map(|item| item.0).collect());
                assert_eq!(plain, pages);
                Outcome::Pages(traced)
            }
            Call::Free(entries, owner, epoch) => {
                Outcome::Done(self.both(|pages| pages.free(entries, *owner, *epoch)))
            }
            Call::Transfer(entries, from, to) => {
                Outcome::Done(self.both(|pages| pages.transfer(entries, *from, *to)))
            }
            Call::Pin(entries) => Outcome::Done(self.both(|pages| pages.pin(entries))),
            Call::Unpin(entries) => Outcome::Done(self.both(|pages| pages.unpin(entries))),
            Call::Retire(epoch) => {
                self.both(|pages| pages.retire(*epoch));
                Outcome::Done(Ok(()))
            }
            Call::SetCap(class, cap) => {
                Outcome::Done(self.both(|pages| pages.set_cap(*class, *cap)))
            }
            Call::Reclaim(k) => Outcome::Plan(self.both(|pages| pages.reclaim_plan(*k))),
            Call::Restore => {
                self.twin = PageAllocator::restore(&self.twin.dump()).unwrap();
                Outcome::Done(Ok(()))
            }
        }
    }

    /// One call on all three, and everything compared.
    fn step(&mut self, model: &mut Model, call: &Call) -> Outcome {
        let before = self.real.dump();
        let expected = apply_to_model(model, call);
        let outcome = self.apply(call).without_words();
        assert_eq!(outcome, expected, "{call:?}\n{before:?}");
        if outcome.error().is_some() || matches!(call, Call::Reclaim(_)) {
            assert_eq!(self.real.dump(), before, "{call:?}");
        }
        self.agrees_with(model);
        outcome
    }

    fn agrees_with(&self, model: &Model) {
        self.real.check().unwrap();
        self.twin.check().unwrap();
        assert_eq!(self.real.digest(), self.twin.digest());
        assert_eq!(self.real.dump(), model.dump());
        assert_eq!(self.real.stats(), model.stats());
        for class in [High, Low] {
            assert_eq!(self.real.available(class), model.available(class));
        }
        conserves_layers(&self.real);
    }

    /// Everyone lets go: the pool is as new (I14, I17).
    fn drain(&self, model: &Model) {
        for (&slot, &pins) in &model.pins {
            for _ in 0..pins {
                self.real.unpin(&[model.entry_of(slot)]).unwrap();
            }
        }
        for (&slot, &owner) in &model.live {
            let entry = model.entry_of(slot);
            self.real.free(&[entry], owner, Epoch(0)).unwrap();
        }
        self.real.retire(Epoch(u64::MAX));
        self.real.check().unwrap();
        let dump = self.real.dump();
        assert_eq!(dump.free, [(0, model.config.num_pages)]);
        assert_eq!(dump.pages, []);
    }
}

#[derive(Clone, Debug)]
struct Reference {
    start: PageConfig,
    model: Model,
}

impl ReferenceStateMachine for Reference {
    type State = Self;
    type Transition = Call;

    fn init_state() -> BoxedStrategy<Self> {
        let dice = proptest::collection::vec(any::<u32>(), 7);
        dice.prop_map(|dice| {
            let start = draw_config(&mut dice.into_iter());
            let model = Model::new(start.clone());
            Self { start, model }
        })
        .boxed()
    }

    fn transitions(state: &Self) -> BoxedStrategy<Call> {
        let model = state.model.clone();
        let dice = proptest::collection::vec(any::<u32>(), 40);
        dice.prop_map(move |dice| draw_call(&model, &mut dice.into_iter()))
            .boxed()
    }

    fn apply(mut state: Self, call: &Call) -> Self {
        apply_to_model(&mut state.model, call);
        state
    }
}

struct Machine;

impl StateMachineTest for Machine {
    type SystemUnderTest = (Pair, Model);
    type Reference = Reference;

    fn init_test(reference: &Reference) -> (Pair, Model) {
        let pair = Pair::new(&reference.start);
        (pair, Model::new(reference.start.clone()))
    }

    fn apply((mut pair, mut model): (Pair, Model), _: &Reference, call: Call) -> (Pair, Model) {
        pair.step(&mut model, &call);
        (pair, model)
    }

    fn teardown((pair, model): (Pair, Model), _: Reference) {
        pair.drain(&model);
    }
}

prop_state_machine! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn behaves_like_the_naive_sets(sequential 1..60 => Machine);
}

/// How often each step and each way to fail was seen.
#[derive(Default, Debug)]
struct Coverage {
    steps: [usize; 6],
    errors: BTreeMap<String, usize>,
}

impl Coverage {
    fn add(&mut self, call: &Call, outcome: &Outcome) {
        if let Outcome::Pages(Ok(items)) = outcome {
            for &step in items.iter().flat_map(|(_, steps)| steps) {
                self.steps[usize::from(step)] += 1;
            }
        }
        let kind = match outcome.error() {
            None => return,
            Some(Error::OutOfPages { item: Some(_), .. }) => "OutOfPages in a group",
            Some(Error::OutOfPages { .. }) if matches!(call, Call::Reclaim(_)) => {
                "OutOfPages of a plan"
            }
            Some(Error::OutOfPages { .. }) => "OutOfPages",
            Some(Error::PageState { fault, .. }) => fault,
            Some(Error::InvalidRequest { field, .. } | Error::Config { field, .. }) => field,
            Some(other) => panic!("{other}"),
        };
        *self.errors.entry(kind.to_owned()).or_default() += 1;
    }

    fn assert_at_least(&self, times: usize) {
        let seen = |count: &usize| *count >= times;
        assert!(self.steps[1..].iter().all(seen), "{self:?}");
        let kinds = [
            "OutOfPages",
            "OutOfPages in a group",
            "OutOfPages of a plan",
            "a copy job holds it",
            "a copy job reads it",
            "a request holds it",
            "cap_high",
            "cap_low",
            "it is listed twice",
            "it is not live",
            "it is not pinned",
            "preferred_start",
            "the class has no such start",
            "the tree holds it",
        ];
        assert_eq!(self.errors.keys().collect::<Vec<_>>(), kinds);
        assert!(self.errors.values().all(seen), "{self:?}");
    }
}

/// Random pools, `calls` random calls on each.
fn trace(seed: u64, pools: usize, calls: usize) -> Coverage {
    let mut coverage = Coverage::default();
    let mut dice = Random(seed);
    for _ in 0..pools {
        let config = draw_config(&mut dice);
        let mut pair = Pair::new(&config);
        let mut model = Model::new(config);
        for _ in 0..calls {
            let call = draw_call(&model, &mut dice);
            let outcome = pair.step(&mut model, &call);
            coverage.add(&call, &outcome);
        }
        pair.drain(&model);
    }
    coverage
}

#[test]
fn long_trace_sees_every_step_and_every_error_a_hundred_times() {
    trace(20_251, 240, 100).assert_at_least(100);
}

#[test]
#[ignore = "soak: a million calls with everything compared after each"]
#[expect(clippy::print_stdout, reason = "the seed of a random run")]
fn soak_against_the_naive_sets() {
    let seed = RandomState::new().build_hasher().finish();
    println!("seed {seed}");
    let coverage = trace(seed, 5_000, 210);
    println!("{} calls: {coverage:?}", 5_000 * 210);
    coverage.assert_at_least(100);
}

#[test]
#[ignore = "soak: two million page operations on the pool of the benchmarks"]
fn soak_of_a_large_pool() {
    let (num_pages, n) = (65_536, 1_000);
    let pages = PageAllocator::new(PageConfig {
        num_pages,
        num_layers: 36,
        page_size: 64,
        slot_widths: 2,
        addressing: Addressing::Flat,
        cap_high: None,
        cap_low: Some(num_pages),
    })
    .unwrap();
    let mut dice = Random(3);
    let mut held = pages
        .alloc(pages.available(Low) * 9 / 10, Low, None)
        .unwrap();
    for _ in 0..1_000 {
        let start = 2 * u32::try_from(dice.below(18)).unwrap();
        held.extend(pages.alloc(n, Low, Some(start)).unwrap());
        let mut pick = || held.swap_remove(dice.below(held.len()));
        let gone: Vec<PageEntry> = (0..n).map(|_| pick()).collect();
        pages.free(&gone, Owner::Request, Epoch(0)).unwrap();
    }
    pages.check().unwrap();
    conserves_layers(&pages);
    pages.free(&held, Owner::Request, Epoch(0)).unwrap();
    assert_eq!(pages.dump().free, [(0, num_pages)]);
}
