"""State slots of hybrid models: reuse, padding, neighbours, snapshots."""

from dataclasses import replace

import pytest
import torch

from headrace.errors import ConfigError, OutOfPages
from headrace.kv.state import SnapshotPoint, SnapshotStore, StatePool
from headrace.models.known import KNOWN_CONFIGS
from tiny_models import (
    assert_same_bits,
    decode,
    make_batch,
    make_kv,
    pools,
    prefill,
    random_prompt,
    slot_bits,
)


@pytest.fixture(scope="module")
def loaded(tiny):
    """Load a tiny model by name, deterministic unless said."""

    def get(name="tiny_hybrid", *, deterministic=True):
        return tiny(name).load(deterministic=deterministic)

    return get


@pytest.mark.parametrize("length", [1, 2, 4, 90])
def test_a_reused_slot_full_of_nan_gives_the_bits_of_a_fresh_one(loaded, length):
    """PFX-06, and a reused slot starts from zero state."""
    model = loaded()
    prompt = random_prompt(length)
    fresh, poisoned, used = pools(model), pools(model), pools(model)
    for pool in (fresh[0].k, fresh[0].v, fresh[1].recurrent, fresh[1].conv):
        pool.zero_()
    prefill(model, used, random_prompt(140, 9), 2)
    decode(model, used, [(3, 2, 140)])
    for caches in (fresh, poisoned, used):
        logits = prefill(model, caches, prompt, 2)
        assert torch.isfinite(logits).all()
        assert torch.isfinite(decode(model, caches, [(5, 2, length)])).all()
    expected = slot_bits(fresh, 2, length + 1)
    assert_same_bits(slot_bits(poisoned, 2, length + 1), expected)
    assert_same_bits(slot_bits(used, 2, length + 1), expected)


def filled(model, slots=8):
    caches = pools(model, slots)
    runs = [(random_prompt(5 + slot, slot), slot, 0) for slot in range(slots)]
    model.forward(make_batch(prefill=runs), *caches)
    return caches


@pytest.mark.parametrize("deterministic", [False, True])
def test_padding_rows_touch_nothing(loaded, deterministic):
    model = loaded(deterministic=deterministic)
    caches, bare = filled(model), filled(model)
    before = [slot_bits(caches, slot, 512) for slot in range(8)]
    logits = decode(model, caches, [(1, -1, 0), (2, 4, 9), (3, -1, 0), (4, 1, 6)])
    expected = decode(model, bare, [(2, 4, 9), (4, 1, 6)])
    assert torch.isfinite(logits).all()
    torch.testing.assert_close(logits[[1, 3]], expected, rtol=0, atol=1e-4)
    assert not deterministic or torch.equal(logits[[1, 3]], expected)
    for slot in (0, 2, 3, 5, 6, 7):
        for one, other in zip(slot_bits(caches, slot, 512), before[slot], strict=True):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32))  # NaN included
    decode(model, caches, [(1, -1, 0)])
    assert_same_bits(slot_bits(caches, 7, 12), slot_bits(bare, 7, 12))


def test_shrinking_the_batch_leaves_the_other_states_alone(loaded):
    """Eight rows, then three: the five that stopped keep every bit."""
    model = loaded()
    caches = filled(model)
    decode(model, caches, [(slot, slot, 5 + slot) for slot in range(8)])
    before = [slot_bits(caches, slot, 6 + slot) for slot in range(8)]
    decode(model, caches, [(9, 6, 12), (8, 1, 7), (7, 3, 9)])
    for slot in (0, 2, 4, 5, 7):
        assert_same_bits(slot_bits(caches, slot, 6 + slot), before[slot])
    for slot in (1, 3, 6):
        assert not torch.equal(caches[1].recurrent[:, slot], before[slot][2])


@pytest.mark.parametrize(
    ("position", "point"),
    [(128, SnapshotPoint.CHUNK_EDGE), (150, SnapshotPoint.PROMPT_END), (153, SnapshotPoint.DECODE)],
)
def test_a_restored_snapshot_gives_the_same_bits(loaded, position, point):
    model, store = loaded(), SnapshotStore(10**8)
    caches = pools(model)
    prompt, generated = random_prompt(150), (5, 6, 7)

    def go_on(slot, start):
        """From `start` tokens to the end of the prompt and of what was generated, and two more."""
        logits = []
        if start < 150:
            logits.append(prefill_from(start, slot))
        for at, token in enumerate((*generated, 8, 9), start=150):
            if at >= start:
                logits.append(decode(model, caches, [(token, slot, at)])[0])
        return logits

    def prefill_from(start, slot):
        return model.forward(make_batch(prefill=[(prompt[start:], slot, start)]), *caches)[0]

    prefill(model, caches, prompt[:128], 2)
    if position > 128:
        prefill_from(128, 2)
    for at, token in enumerate(generated[: max(0, position - 150)], start=150):
        decode(model, caches, [(token, 2, at)])
    snapshot_id = store.take(caches[1], 2, position, owner=11, point=point)
    expected = go_on(2, position)
    # Other work in the slot's state, then back; the KV up to the position is what it was.
    kept = caches[0].k[:, 2].clone(), caches[0].v[:, 2].clone()
    prefill(model, caches, random_prompt(90, 4), 2)
    caches[0].k[:, 5], caches[0].v[:, 5] = kept
    caches[1].restore(5, store.get(snapshot_id))
    assert store.get(snapshot_id).position == position
    assert_same_bits(go_on(5, position), expected)


def test_snapshots_have_owners_and_a_budget(loaded):
    model = loaded()
    caches = filled(model)
    state = caches[1]
    size = state.bytes_per_slot
    assert size == model.config.state_bytes_per_slot(4)
    assert state.bytes_total == state.recurrent.nbytes + state.conv.nbytes == 8 * size
    store = SnapshotStore(2 * size + 100)
    edge = {"owner": 1, "point": SnapshotPoint.CHUNK_EDGE}
    first = store.take(state, 0, 64, **edge)
    store.take(state, 1, 7, owner=2, point=SnapshotPoint.PROMPT_END)
    assert store.used_bytes == 2 * size
    assert store.get(first).size_bytes == size
    with pytest.raises(OutOfPages, match=f"{size:,} bytes, 100 of"):
        store.take(state, 2, 64, **edge)
    with pytest.raises(ValueError, match="belongs to 1, not to 2"):
        store.drop(first, owner=2)
    assert len(store) == 2
    store.drop(first, owner=1)
    with pytest.raises(KeyError):
        store.get(first)
    assert store.drop_owner(2) == 1
    assert (len(store), store.used_bytes) == (0, 0)
    refused = ((100, 0, "multiple of 64"), (0, 0, "positive"), (64, -1, "slot"), (64, 8, "slot"))
    for position, slot, message in refused:
        with pytest.raises(ValueError, match=message):
            state.snapshot(slot, position, **edge)
    foreign = replace(store_snapshot := state.snapshot(0, 64, **edge), conv=store_snapshot.conv[1:])
    with pytest.raises(ValueError, match="this pool holds"):
        state.restore(0, foreign)
    with pytest.raises(ConfigError, match="budget_bytes"):
        SnapshotStore(-1)


def test_a_staged_copy_outlives_later_steps_and_has_the_same_bits(loaded):
    def bits(slot):
        return [tensor[:, slot].clone() for tensor in state.tensors.values()]

    model = loaded()
    state = StatePool(model.config, slots=3, staging=2, dtype=model.dtype)
    state.fill_poison()
    assert state.bytes_total == 5 * state.bytes_per_slot
    assert state.bytes_total == sum(tensor.nbytes for tensor in state.tensors.values())
    assert all(tensor.shape[1] == 5 for tensor in state.tensors.values())
    caches = make_kv(model, slots=3), state
    prefill(model, caches, random_prompt(70), 1)
    state.copy_slot(1, 4)
    staged = bits(4)
    assert_same_bits(staged, bits(1))
    expected = decode(model, caches, [(5, 1, 70)])
    after = bits(1)
    for one, other in zip(after, staged, strict=True):
        assert not torch.equal(one, other)
    state.copy_slot(4, 1)
    assert torch.equal(decode(model, caches, [(5, 1, 70)]), expected)
    assert_same_bits(bits(1), after)
    assert state.recurrent[:, [0, 2, 3]].isnan().all()
    assert state.conv[:, [0, 2, 3]].isnan().all()
    for src, dst in ((1, 5), (5, 1), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="not one of the 5 slots"):
            state.copy_slot(src, dst)
    assert_same_bits(bits(1), after)
    with pytest.raises(ConfigError, match="staging must not be negative, got -1"):
        StatePool(model.config, slots=3, staging=-1, dtype=model.dtype)


def test_a_state_pool_is_refused_where_it_makes_no_sense(loaded, tiny_qwen3):
    model = loaded()
    with pytest.raises(ConfigError, match="needs a StatePool"):
        model.forward(make_batch(prefill=[([1], 0, 0)]), make_kv(model))
    with pytest.raises(ConfigError, match="no linear layers"):
        StatePool(tiny_qwen3.load().config, slots=1, dtype=torch.float32)
    with pytest.raises(ConfigError, match="slots must be positive"):
        StatePool(model.config, slots=0, dtype=torch.float32)
    with pytest.raises(ConfigError, match="lower max_batch_size"):
        StatePool(KNOWN_CONFIGS["qwen3.5-27b"], slots=10**6, dtype=torch.bfloat16)


def test_a_mixed_step_leaves_every_row_the_snapshot_of_its_own_solo_run(loaded):
    """kv_formats.md section 8, 23 (sglang#39342); PFX-08: two prefills and two decode rows."""
    model = loaded()
    prompts = [random_prompt(length, seed=length) for length in (5, 40, 64, 130)]
    solo = []
    for slot, prompt in enumerate(prompts):
        caches = pools(model)
        prefill(model, caches, prompt, slot)
        if slot < 2:
            decode(model, caches, [(7 + slot, slot, len(prompt))])
        solo.append(
            caches[1].snapshot(slot, len(prompt) + (slot < 2), owner=slot, point=point_of(slot))
        )
    caches = pools(model)
    for slot in (0, 1):
        prefill(model, caches, prompts[slot], slot)
    rows = [(7 + slot, slot, len(prompts[slot])) for slot in (1, 0)]
    runs = [(prompts[slot], slot, 0) for slot in (3, 2)]
    model.forward(make_batch(decode=rows, prefill=runs), *caches)
    for slot, expected in enumerate(solo):
        taken = caches[1].snapshot(slot, expected.position, owner=slot, point=point_of(slot))
        assert torch.equal(taken.recurrent, expected.recurrent)
        assert torch.equal(taken.conv, expected.conv)


def point_of(slot):
    return SnapshotPoint.DECODE if slot < 2 else SnapshotPoint.PROMPT_END


def test_a_full_forward_and_prefill_with_decode_steps_drift_within_a_bound(loaded):
    """kv_formats.md section 8, 26 (transformers#46190): the two forms of the delta rule."""
    model = loaded(deterministic=False)
    prompt = random_prompt(130)
    whole = prefill(model, pools(model), prompt, 0)
    caches = pools(model)
    prefill(model, caches, prompt[:100], 0)
    for at in range(100, 130):
        stepped = decode(model, caches, [(prompt[at], 0, at)])[0]
    assert (stepped - whole).norm() <= 1e-3 * whole.norm()
    assert not torch.equal(stepped, whole), "the two forms are not bit-equal, or one was not used"
