#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails by panicking, as a test does"
)]

use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

use super::*;

const A: RequestId = RequestId(10);
const B: RequestId = RequestId(11);
const C: RequestId = RequestId(12);

fn table(total: u32) -> SlotAllocator {
    SlotAllocator::new(total).unwrap()
}

/// Runs `call`, which must be refused, and returns its error; nothing may have changed.
fn refused<T: std::fmt::Debug>(
    slots: &SlotAllocator,
    call: impl FnOnce(&SlotAllocator) -> Result<T>,
) -> Error {
    let before = (slots.dump(), slots.stats());
    let error = call(slots).unwrap_err();
    assert_eq!((slots.dump(), slots.stats()), before);
    slots.check().unwrap();
    error
}

#[test]
fn smallest_free_slot_goes_first_across_words() {
    let slots = table(130);
    for index in 0..130 {
        let grant = slots.allocate(RequestId(index)).unwrap();
        assert_eq!(u64::from(grant.slot.index()), index);
    }
    for id in [129, 64, 63] {
        slots.free(RequestId(id), None).unwrap();
    }
    let reissued = [1000, 1001, 1002].map(|id| slots.allocate(RequestId(id)).unwrap().slot.index());
    assert_eq!(reissued, [63, 64, 129]);
    slots.check().unwrap();
}

#[test]
fn full_table_refuses_and_stays_as_it_was() {
    let slots = table(1);
    slots.allocate(A).unwrap();
    let full = Error::OutOfSlots {
        needed: 1,
        free: 0,
        total: 1,
    };
    assert_eq!(refused(&slots, |s| s.allocate(B)), full);
    slots.free(A, Some(Epoch(1))).unwrap();
    assert_eq!(refused(&slots, |s| s.allocate(B)), full);
}

#[test]
fn a_request_has_at_most_one_slot_in_use_or_finishing() {
    let slots = table(4);
    slots.allocate(A).unwrap();
    let duplicate = Error::DuplicateRequest { id: A };
    assert_eq!(refused(&slots, |s| s.allocate(A)), duplicate);
    slots.free(A, Some(Epoch(3))).unwrap();
    assert_eq!(refused(&slots, |s| s.allocate(A)), duplicate);
    slots.retire(Epoch(3));
    slots.allocate(A).unwrap();
}

#[test]
fn second_free_and_unknown_ids_are_refused() {
    let slots = table(2);
    slots.allocate(A).unwrap();
    slots.allocate(B).unwrap();
    slots.free(A, None).unwrap();
    slots.free(B, Some(Epoch(1))).unwrap();
    for id in [A, B, C] {
        let error = refused(&slots, |s| s.free(id, None));
        assert_eq!(error, Error::UnknownRequest { id });
    }
}

#[test]
fn fenced_slot_is_not_reissued_before_its_step_retires() {
    let slots = table(2);
    let first = slots.allocate(A).unwrap();
    slots.free(A, Some(Epoch(5))).unwrap();
    assert_eq!(slots.slot_of(A), None);
    slots.retire(Epoch(4));
    assert_eq!(slots.allocate(B).unwrap().slot.index(), 1);
    slots.retire(Epoch(5));
    let second = slots.allocate(C).unwrap();
    assert_eq!(second.slot, first.slot);
    assert_eq!(second.generation, first.generation + 1);
}

#[test]
fn retired_steps_never_go_back() {
    let slots = table(1);
    slots.retire(Epoch(7));
    slots.retire(Epoch(2));
    slots.allocate(A).unwrap();
    slots.free(A, Some(Epoch(7))).unwrap();
    assert_eq!(slots.stats().free, 1, "the fence had retired");
}

#[test]
fn generation_survives_shrinking_and_growing() {
    let slots = table(2);
    slots.allocate(A).unwrap();
    let old = slots.allocate(B).unwrap();
    slots.free(B, None).unwrap();
    slots.resize(1).unwrap();
    slots.resize(2).unwrap();
    let new = slots.allocate(C).unwrap();
    assert_eq!(new.slot, old.slot);
    assert!(new.generation > old.generation, "{old:?} then {new:?}");
}

#[test]
fn resize_names_a_size_that_would_work() {
    let slots = table(8);
    for id in 0..6 {
        slots.allocate(RequestId(id)).unwrap();
    }
    slots.free(RequestId(3), None).unwrap();
    let error = refused(&slots, |s| s.resize(2)).to_string();
    assert!(error.contains("at least 6 slots"), "{error}");
    slots.resize(6).unwrap();
}

#[test]
fn sizes_outside_the_limits_are_refused() {
    assert!(matches!(SlotAllocator::new(0), Err(Error::Config { .. })));
    let slots = table(3);
    for total in [0, MAX_SLOTS + 1, u32::MAX] {
        let error = refused(&slots, |s| s.resize(total));
        assert!(matches!(error, Error::Config { field: "slots", .. }));
    }
    slots.resize(MAX_SLOTS).unwrap();
    slots.check().unwrap();
}

#[test]
fn every_size_serves_that_many_distinct_slots() {
    for total in 1..=200 {
        let slots = table(1);
        slots.resize(total).unwrap();
        let served: Vec<u32> = (0..u64::from(total))
            .map(|id| slots.allocate(RequestId(id)).unwrap().slot.index())
            .collect();
        assert_eq!(served, (0..total).collect::<Vec<_>>());
        refused(&slots, |s| s.allocate(A.max(RequestId(1000))));
    }
}

/// The table as its documentation tells it: one map, linear scans.
#[derive(Clone, Debug)]
struct Model {
    total: u32,
    /// Request -> (slot, fence if finishing).
    held: BTreeMap<u64, (u32, Option<u64>)>,
    /// Tenancies so far of every slot there ever was.
    tenancies: BTreeMap<u32, u64>,
    retired: u64,
    /// What the last operation gave.
    last: Outcome,
}

#[derive(Clone, Debug, PartialEq)]
enum Outcome {
    Granted(Result<(u32, u64)>),
    Freed(Result<u32>),
    /// Whether it was accepted.
    Resized(bool),
    Nothing,
}

#[derive(Clone, Debug)]
enum Op {
    Allocate(u64),
    Free(u64, Option<u64>),
    Retire(u64),
    Resize(u32),
}

impl Model {
    fn is_held(&self, slot: u32) -> bool {
        self.held.values().any(|&(held, _)| held == slot)
    }

    fn allocate(&mut self, request: u64) -> Result<(u32, u64)> {
        let id = RequestId(request);
        if self.held.contains_key(&request) {
            return Err(Error::DuplicateRequest { id });
        }
        let Some(slot) = (0..self.total).find(|&slot| !self.is_held(slot)) else {
            return Err(Error::OutOfSlots {
                needed: 1,
                free: 0,
                total: self.total,
            });
        };
        self.held.insert(request, (slot, None));
        let tenancies = self.tenancies.entry(slot).or_default();
        *tenancies += 1;
        Ok((slot, *tenancies))
    }

    fn free(&mut self, request: u64, fence: Option<u64>) -> Result<u32> {
        let id = RequestId(request);
        let Some(&(slot, None)) = self.held.get(&request) else {
            return Err(Error::UnknownRequest { id });
        };
        self.held.insert(request, (slot, fence.or(Some(0))));
        self.retire(self.retired);
        Ok(slot)
    }

    fn retire(&mut self, epoch: u64) {
        let retired = self.retired.max(epoch);
        self.retired = retired;
        self.held
            .retain(|_, (_, fence)| fence.is_none_or(|fence| fence > retired));
    }

    fn resize(&mut self, total: u32) -> bool {
        let fits = (1..=MAX_SLOTS).contains(&total);
        if !fits || self.held.values().any(|&(slot, _)| slot >= total) {
            return false;
        }
        self.total = total;
        true
    }

    fn dump(&self) -> Vec<(u32, u64, Option<u64>, Option<u64>)> {
        let row = |slot| {
            let tenancies = self.tenancies.get(&slot).copied().unwrap_or(0);
            let holder = self.held.iter().find(|&(_, &(held, _))| held == slot);
            let request = holder.map(|(&request, _)| request);
            (
                slot,
                tenancies,
                request,
                holder.and_then(|(_, &(_, fence))| fence),
            )
        };
        (0..self.total).map(row).collect()
    }
}

impl ReferenceStateMachine for Model {
    type State = Self;
    type Transition = Op;

    fn init_state() -> BoxedStrategy<Self> {
        prop_oneof![1..9u32, 62..68u32, 125..131u32]
            .prop_map(|total| Self {
                total,
                held: BTreeMap::new(),
                tenancies: BTreeMap::new(),
                retired: 0,
                last: Outcome::Nothing,
            })
            .boxed()
    }

    fn transitions(state: &Self) -> BoxedStrategy<Op> {
        let ids = 0..12u64;
        let fence = state.retired.saturating_sub(2)..state.retired + 4;
        let sizes = prop_oneof![
            8 => 1..12u32,
            2 => 60..132u32,
            1 => prop_oneof![Just(0), Just(MAX_SLOTS + 1)],
        ];
        prop_oneof![
            6 => ids.clone().prop_map(Op::Allocate),
            2 => ids.clone().prop_map(|id| Op::Free(id, None)),
            3 => (ids, fence.clone()).prop_map(|(id, fence)| Op::Free(id, Some(fence))),
            2 => fence.prop_map(Op::Retire),
            2 => sizes.prop_map(Op::Resize),
        ]
        .boxed()
    }

    fn apply(mut state: Self, op: &Op) -> Self {
        state.last = match *op {
            Op::Allocate(id) => Outcome::Granted(state.allocate(id)),
            Op::Free(id, fence) => Outcome::Freed(state.free(id, fence)),
            Op::Retire(epoch) => {
                state.retire(epoch);
                Outcome::Nothing
            }
            Op::Resize(total) => Outcome::Resized(state.resize(total)),
        };
        state
    }
}

struct Machine;

impl StateMachineTest for Machine {
    type SystemUnderTest = SlotAllocator;
    type Reference = Model;

    fn init_test(model: &Model) -> SlotAllocator {
        table(model.total)
    }

    fn apply(slots: SlotAllocator, model: &Model, op: Op) -> SlotAllocator {
        let before = slots.dump();
        let (outcome, refused) = match op {
            Op::Allocate(id) => {
                let granted = slots.allocate(RequestId(id));
                let granted = granted.map(|grant| (grant.slot.index(), grant.generation));
                (Outcome::Granted(granted.clone()), granted.is_err())
            }
            Op::Free(id, fence) => {
                let freed = slots.free(RequestId(id), fence.map(Epoch));
                let freed = freed.map(SlotId::index);
                (Outcome::Freed(freed.clone()), freed.is_err())
            }
            Op::Retire(epoch) => {
                slots.retire(Epoch(epoch));
                (Outcome::Nothing, false)
            }
            Op::Resize(total) => {
                let accepted = slots.resize(total).is_ok();
                (Outcome::Resized(accepted), !accepted)
            }
        };
        assert_eq!(outcome, model.last);
        if refused {
            assert_eq!(slots.dump(), before, "a refused call changes nothing");
        }
        slots
    }

    fn check_invariants(slots: &SlotAllocator, model: &Model) {
        slots.check().unwrap();
        assert_eq!(slots.dump(), model.dump());
        let stats = slots.stats();
        assert_eq!(
            stats.free + stats.in_use + stats.finishing,
            stats.total,
            "S1"
        );
        for id in 0..12 {
            let in_use = model.held.get(&id).filter(|(_, fence)| fence.is_none());
            let slot = slots.slot_of(RequestId(id)).map(SlotId::index);
            assert_eq!(slot, in_use.map(|&(slot, _)| slot), "S1: request {id}");
        }
    }
}

prop_state_machine! {
    #[test]
    fn behaves_like_the_naive_table(sequential 1..100 => Machine);
}
