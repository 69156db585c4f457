"""Slot table through the binding, against a naive model (S1-S5; cases SLT-07, SLT-08)."""

import threading

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace import ConfigError, DuplicateRequest, OutOfPages, SlotAllocator, UnknownRequest

IDS = st.integers(0, 11)


class SlotMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.total = 3
        self.real = SlotAllocator(self.total)
        self.in_use = {}  # request -> slot
        self.finishing = {}  # request -> (slot, fence)
        self.retired = 0

    def free_slots(self):
        taken = {*self.in_use.values(), *(slot for slot, _ in self.finishing.values())}
        return [slot for slot in range(self.total) if slot not in taken]

    def refused(self, error, call):
        before = self.real.dump()
        with pytest.raises(error) as caught:
            call()
        assert self.real.dump() == before
        return caught.value

    @rule(request=IDS)
    def allocate(self, request):
        free = self.free_slots()
        if request in self.in_use or request in self.finishing:
            self.refused(DuplicateRequest, lambda: self.real.allocate(request))
        elif not free:
            error = self.refused(OutOfPages, lambda: self.real.allocate(request))
            assert (error.needed, error.free) == (1, 0)
        else:
            assert self.real.allocate(request) == free[0]
            self.in_use[request] = free[0]

    @rule(request=IDS, ahead=st.none() | st.integers(-1, 2))
    def free(self, request, ahead):
        fence = None if ahead is None else max(0, self.retired + ahead)
        if request not in self.in_use:
            self.refused(UnknownRequest, lambda: self.real.free(request, fence))
            return
        slot = self.in_use.pop(request)
        assert self.real.free(request, fence) == slot
        if fence is not None and fence > self.retired:
            self.finishing[request] = (slot, fence)

    @rule(ahead=st.integers(-1, 2))
    def retire(self, ahead):
        epoch = max(0, self.retired + ahead)
        self.real.retire(epoch)
        self.retired = max(self.retired, epoch)
        self.finishing = {r: sf for r, sf in self.finishing.items() if sf[1] > self.retired}

    @rule(total=st.integers(0, 70))
    def resize(self, total):
        busy = set(range(self.total)) - set(self.free_slots())
        if total < 1 or any(slot >= total for slot in busy):
            self.refused(ConfigError, lambda: self.real.resize(total))
        else:
            self.real.resize(total)
            self.total = total

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def look_up(self, data):
        request = data.draw(st.sampled_from(sorted(self.in_use)))
        assert self.real.slot_of(request) == self.in_use[request]

    @invariant()
    def counts_agree(self):
        self.real.check()
        assert self.real.stats() == {
            "free": len(self.free_slots()),
            "in_use": len(self.in_use),
            "finishing": len(self.finishing),
            "total": self.total,
        }
        states = {slot: (r, None) for r, slot in self.in_use.items()}
        states |= {slot: (r, fence) for r, (slot, fence) in self.finishing.items()}
        dump = [(request, fence) for _, _, request, fence in self.real.dump()]
        assert dump == [states.get(slot, (None, None)) for slot in range(self.total)]


TestSlotMachine = SlotMachine.TestCase


def test_eight_threads_never_share_a_slot():
    slots = SlotAllocator(6)
    held, errors = set(), []
    guard = threading.Lock()

    def work(thread):
        for i in range(2000):
            request = thread * 10_000 + i
            try:
                slot = slots.allocate(request)
            except OutOfPages:
                continue
            with guard:
                if slot in held:
                    errors.append(slot)
                held.add(slot)
            with guard:
                held.remove(slot)
            slots.free(request)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert slots.stats() == {"free": 6, "in_use": 0, "finishing": 0, "total": 6}
    slots.check()


@pytest.mark.parametrize("total", [0, 2**20 + 1])
def test_a_table_of_no_or_too_many_slots_is_refused(total):
    with pytest.raises(ConfigError, match="slots"):
        SlotAllocator(total)
