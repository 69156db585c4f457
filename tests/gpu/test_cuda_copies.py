"""Copies between pinned host memory and the GPU: bytes and order.

HST-01, HST-03, HST-07, HST-11, HST-12, HST-17. Bytes are compared exactly; whatever must not
be written is poisoned, and so is every destination.
"""

import random
from functools import partial

import numpy as np
import pytest
import torch

from headrace._core import CopyPlanes, CopyQueue, CudaDevice, HostMemory, Region
from headrace.backends.cuda import copy_gather
from headrace.backends.cuda.copy_gather import copy_device
from headrace.errors import ConfigError
from headrace.kv.cache import KVCache, kv_layout
from headrace.kv.formats import parse_kv_format
from headrace.kv.planes import PlanePool
from headrace.kv.state import StatePool
from headrace.models.hybrid_config import FULL_ATTENTION
from headrace.tiers import HostSizes, HostTier
from tier_cases import FORMATS, MODELS, PAGE

DEVICE = torch.device("cuda", 0)
POISON = 0xEE
GUARD = 256  # bytes, also the alignment of a plane
NEVER = 2**62
# Thresholds that choose one mechanism for every length.
MECHANISMS = {"plain": (0, None), "batch": (NEVER, 0), "gather": (NEVER, None)}
# Those of the KV formats, and one that no wide load fits.
ROWS = (196, 260, 388, 516, 528, 656, 77)


def stream_of():
    stream = torch.cuda.Stream(DEVICE)
    torch.cuda.synchronize()
    return stream


def noise(tensor, seed):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    tensor.random_(0, 256, generator=generator)


def kv(*pieces):
    """(device page, first token, host page, tokens) each."""
    return np.array(pieces, np.uint32).reshape(-1, 4)


def state(*pieces):
    return np.array(pieces, np.uint32).reshape(-1, 2)


def done(queue):
    outcomes = queue.poll()
    assert outcomes
    assert all(outcome == "done" for _, outcome, _ in outcomes), outcomes


def paths(queue, stream):
    """Copies of a stream by mechanism, those that happened."""
    counts = queue.stats()[stream]
    return {name for name in MECHANISMS if counts[name]}


# Devices and queues over planes of the test's own.


class Planes:
    """uint8 planes `[layers, pages, tokens, row]` on the GPU, one for each row size."""

    def __init__(self, rows=ROWS, *, layers=3, pages=6, tokens=16, host_pages=7, **device):
        self.layers, self.pages, self.tokens = layers, pages, tokens
        self.rows = rows
        self.stream = stream_of()
        self.device = copy_device(self.stream, **device)
        sizes = [layers * host_pages * tokens * row for row in rows]
        starts = np.cumsum([0, *(-(-size // 256) * 256 for size in sizes)]).tolist()
        self.memory = HostMemory(starts[-1], touch_threads=2)
        self.device.register(self.memory)
        self.tensors, self.host, planes = [], [], []
        for row, size, start in zip(rows, sizes, starts, strict=False):
            tensor = torch.full(
                (layers, pages, tokens, row), POISON, dtype=torch.uint8, device=DEVICE
            )
            self.tensors.append(tensor)
            host = self.memory.array(start, size).reshape(layers, host_pages, tokens, row)
            self.host.append(torch.from_numpy(host))
            region = Region(tensor.data_ptr(), tensor.nbytes, tensor, cuda=DEVICE.index)
            name = f"plane{len(planes)}"
            strides = tensor.stride(0), tensor.stride(1)
            planes.append((name, row, *strides, region, self.memory.region(start, size)))
        self.planes = CopyPlanes(
            ["kv"] * layers,
            pages=pages,
            page_tokens=tokens,
            host_pages=host_pages,
            kv_planes=planes,
        )
        torch.cuda.synchronize()

    def queue(self, **options):
        return CopyQueue(self.device, self.planes, **options)

    def fill_host(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        for host in self.host:
            host.copy_(torch.randint(0, 200, host.shape, generator=generator, dtype=torch.uint8))

    def poison(self):
        for tensor in self.tensors:
            tensor.fill_(POISON)
        torch.cuda.synchronize()


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_a_default_stream_is_refused(handle):
    """HST-17."""
    with pytest.raises(ConfigError, match=f"stream = {handle}"):
        CudaDevice(0, handle, b"", "copy_gather", owner=None)


def test_bad_devices_and_options_are_refused():
    stream = stream_of()
    code = copy_gather.cached_cubin(*copy_gather.VARIANTS, copy_gather.kernel_folder())[0]
    with pytest.raises(ConfigError, match="ordinal"):
        CudaDevice(99, stream.cuda_stream, code.read_bytes(), "copy_gather", owner=stream)
    cache = Planes(thresholds=MECHANISMS["gather"])
    with pytest.raises(ConfigError, match="copy_check"):
        cache.queue(copy_check=True)
    with pytest.raises(ConfigError, match="hang"):
        cache.device.inject("load", 0, "hang")
    unregistered = HostMemory(4096).region()
    tensor = cache.tensors[0]
    region = Region(tensor.data_ptr(), tensor.nbytes, tensor, cuda=DEVICE.index)
    for device, host in ((region, unregistered), (unregistered, unregistered)):
        plane = ("k", 4, 64, 32, device, host)
        planes = CopyPlanes(["kv"], pages=2, page_tokens=8, host_pages=2, kv_planes=[plane])
        with pytest.raises(ConfigError, match="region"):
            CopyQueue(cache.device, planes)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_rows_of_every_size_by_every_path(mechanism):
    """HST-17: equal bytes both ways, nothing else written, and the path that was taken is told."""
    cache = Planes(thresholds=MECHANISMS[mechanism])
    assert cache.device.thresholds == MECHANISMS[mechanism]
    queue = cache.queue()
    for seed, tensor in enumerate(cache.tensors):
        noise(tensor, seed)
    before = [tensor.clone() for tensor in cache.tensors]
    torch.cuda.synchronize()
    # Whole pages next to each other on both sides, and ends of 1, 3 and 13 tokens.
    stored = ((0, 0, 2, 16), (1, 0, 3, 16), (4, 0, 0, 1), (3, 0, 6, 3), (5, 0, 5, 13))
    queue.submit_store(1, kv(*stored))
    queue.drain()
    done(queue)
    assert paths(queue, "store") == {mechanism}
    for host, tensor in zip(cache.host, before, strict=True):
        expected = torch.zeros_like(host)
        for page, _, host_page, tokens in stored:
            expected[:, host_page, :tokens] = tensor[:, page, :tokens].cpu()
        assert torch.equal(host, expected)
    cache.poison()
    moved = ((2, 0, 2, 16), (4, 0, 3, 16), (5, 7, 0, 1), (0, 1, 6, 3), (1, 2, 5, 13))
    step = queue.start_step([(2, kv(*moved), None)])
    with torch.cuda.stream(cache.stream):
        for layer in range(cache.layers):
            step.before_layer(layer)
            step.after_layer(layer)
        after = [tensor.clone() for tensor in cache.tensors]
    assert step.finish() == []
    torch.cuda.synchronize()
    done(queue)
    assert paths(queue, "load") == {mechanism}
    for host, tensor in zip(cache.host, after, strict=True):
        expected = torch.full(tensor.shape, POISON, dtype=torch.uint8)
        for page, first, host_page, tokens in moved:
            expected[:, page, first : first + tokens] = host[:, host_page, :tokens]
        assert torch.equal(tensor.cpu(), expected)


def test_thresholds_are_measured_once_and_remembered(tmp_path):
    stream = stream_of()
    first = copy_device(stream, cache=tmp_path)
    [file] = tmp_path.glob("copies-*.txt")
    text = file.read_text()
    plain, batch = first.thresholds
    assert 65_536 <= plain <= 32 << 20
    assert batch is None or batch >= 65_536
    assert copy_device(stream, cache=tmp_path).thresholds == (plain, batch)
    assert file.read_text() == text


# Order: slowed kernels, delayed copies.


def sleep_ms(milliseconds):
    """Keep the current stream busy for about so long."""
    torch.cuda._sleep(int(milliseconds * 1.7e6))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_store_carries_what_a_slow_forward_wrote_before_it(mechanism):
    """HST-01: the writer is still queued when the store is handed over; delays in between."""
    cache = Planes(rows=(512, 196), thresholds=MECHANISMS[mechanism])
    queue = cache.queue()
    draw = random.Random(0)
    waiting = 0
    for turn in range(12):
        cache.poison()
        if draw.random() < 0.5:
            cache.device.inject("store", 0, "delay", seconds=draw.uniform(2e-4, 5e-3))
        with torch.cuda.stream(cache.stream):
            sleep_ms(draw.uniform(5, 20))
            for tensor in cache.tensors:
                tensor[:, 2] = turn + 1
            written = torch.cuda.Event()
            written.record()
            ticket = queue.record()
            # Behind the ticket, and of no concern to the store.
            sleep_ms(5)
        waiting += not written.query()
        queue.submit_store(turn, kv((2, 0, 4, 16)), after=ticket)
        queue.drain()
        done(queue)
        for host in cache.host:
            assert (host[:, 4] == turn + 1).all()
    assert waiting >= 6, "the stores were handed over after their writers had ended"
    torch.cuda.synchronize()


def test_a_store_does_not_wait_for_what_the_forward_is_given_later():
    """HST-11, second half: other steps do not delay it."""
    cache = Planes(rows=(512,))
    queue = cache.queue()
    queue.submit_store(0, kv((2, 0, 4, 16)))
    queue.drain()
    with torch.cuda.stream(cache.stream):
        cache.tensors[0][:, 2] = 9
        ticket = queue.record()
        sleep_ms(400)
        ended = torch.cuda.Event()
        ended.record()
    queue.submit_store(1, kv((2, 0, 4, 16)), after=ticket)
    queue.drain()
    assert not ended.query()
    assert (cache.host[0][:, 4] == 9).all()
    torch.cuda.synchronize()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_no_read_behind_a_gate_sees_poison(mechanism):
    """HST-03: loads of all layers and a window, each copy delayed at random, slow readers."""
    layers, width = 6, 2
    cache = Planes(rows=(1024, 196), layers=layers, thresholds=MECHANISMS[mechanism])
    cache.fill_host()
    queue = cache.queue()
    draw = random.Random(1)
    for turn in range(5):
        cache.poison()
        for stream in ("load", "window"):
            for nth in range(layers):
                seconds = draw.choice((0.0, 2e-4, 1e-3, 5e-3))
                cache.device.inject(stream, nth, "delay", seconds=seconds)
        k0 = turn * layers
        load = (2 * turn, kv((0, 0, 3, 16), (5, 0, 1, 16)), None)
        step = queue.start_step([load], (2 * turn + 1, kv((1, 0, 5, 16)), k0, width))
        seen = []
        with torch.cuda.stream(cache.stream):
            for layer in range(layers):
                step.before_layer(layer)
                sleep_ms(draw.choice((0, 0.2, 3)))
                buffer = (k0 + layer) % width
                seen.append(
                    [
                        (
                            tensor[layer, 0].clone(),
                            tensor[layer, 5].clone(),
                            tensor[buffer, 1].clone(),
                        )
                        for tensor in cache.tensors
                    ]
                )
                step.after_layer(layer)
            cache.stream.synchronize()
        assert step.finish() == []
        done(queue)
        for layer, planes in enumerate(seen):
            for host, (one, other, streamed) in zip(cache.host, planes, strict=True):
                assert torch.equal(one.cpu(), host[layer, 3])
                assert torch.equal(other.cpu(), host[layer, 1])
                assert torch.equal(streamed.cpu(), host[layer, 5])


def test_a_load_that_fails_is_told_and_opens_its_gates():
    """HST-07."""
    cache = Planes(rows=(512,))
    cache.fill_host()
    queue = cache.queue()
    cache.device.inject("load", 1, "fail")
    step = queue.start_step([(7, kv((0, 0, 3, 16)), None)])
    for layer in range(cache.layers):
        step.before_layer(layer)
        step.after_layer(layer)
    assert step.finish() == [7]
    [(job, outcome, error)] = queue.poll()
    assert (job, outcome, error.settled) == (7, "failed", True)
    step = queue.start_step([(8, kv((0, 0, 3, 16)), None)])
    assert step.finish() == []
    done(queue)
    cache.stream.synchronize()
    assert torch.equal(cache.tensors[0][:, 0].cpu(), cache.host[0][:, 3])


def timed_ms(stream, forward):
    """Time of what `forward` enqueues on a stream, by the GPU's clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        start.record()
        forward()
        end.record()
    end.synchronize()
    return start.elapsed_time(end)


def test_loads_hide_behind_a_forward_that_takes_longer(capsys):
    """HST-11: at least 80 % of the copy time; bytes equal to those of a step that only loads."""
    layers, pages = 24, 64
    cache = Planes(rows=(2048,), layers=layers, pages=pages, tokens=64, host_pages=pages)
    cache.fill_host()
    queue = cache.queue()
    pieces = kv(*((page, 0, pages - 1 - page, 64) for page in range(pages)))
    jobs = iter(range(1000))

    def step(compute_ms, loads):
        handle = queue.start_step([(next(jobs), pieces, None)]) if loads else None

        def forward():
            for layer in range(layers):
                if handle is not None:
                    handle.before_layer(layer)
                if compute_ms:
                    sleep_ms(compute_ms)

        took = timed_ms(cache.stream, forward)
        assert handle is None or handle.finish() == []
        return took

    step(0, True)  # loads code, fills pools
    load_ms = min(step(0, True) for _ in range(5))
    layer_ms = 2 * load_ms / layers
    compute_ms = min(step(layer_ms, False) for _ in range(5))
    # Slowed by the link's traffic or not: what counts is the time beyond that of compute alone.
    cache.poison()
    both_ms = min(step(layer_ms, True) for _ in range(5))
    hidden = (compute_ms + load_ms - both_ms) / load_ms
    gates = sum(queue.stats()["gate_wait_ns"]) * 1e-6
    with capsys.disabled():
        print(
            f"\nload {load_ms:.2f} ms, compute {compute_ms:.2f} ms, both {both_ms:.2f} ms: "
            f"{hidden:.0%} of the load hidden; host wait at gates, all steps {gates:.2f} ms"
        )
    assert compute_ms > load_ms, "a load shorter than the compute is what this is about"
    assert hidden >= 0.8
    torch.cuda.synchronize()
    assert torch.equal(cache.tensors[0].cpu(), cache.host[0].flip(1))


# The planes of real pools.


def guarded(layout, pages, page_tokens):
    """Planes with guard bytes behind every page, and the bytes they lie in."""
    tensors, storages = {}, {}
    for plane in layout.planes:
        shape = layout.plane_shape(plane, pages, page_tokens)
        row = shape[3] * shape[4] * plane.dtype.itemsize
        unit = page_tokens * row + GUARD
        size = layout.layers * pages * unit
        memory = torch.empty(size + GUARD, dtype=torch.uint8, device=DEVICE)
        start = -memory.data_ptr() % GUARD
        storage = memory[start : start + size].view(layout.layers, pages, unit)
        assert unit % plane.dtype.itemsize == 0
        typed = storage.view(plane.dtype)
        stride = unit // plane.dtype.itemsize
        strides = (pages * stride, stride, shape[3] * shape[4], shape[4], 1)
        tensors[plane.name] = typed.as_strided(shape, strides)
        storages[plane.name] = storage
    return tensors, storages


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_every_plane_makes_the_round_trip(tiny, monkeypatch, model, name, mechanism):
    """HST-12: pages and slots, K, V, scales and both states; guards and neighbours stay."""
    forced = partial(copy_device, thresholds=MECHANISMS[mechanism])
    monkeypatch.setattr(copy_gather, "copy_device", forced)
    config = tiny(model).load().config
    options = {"kv_dtype": "auto", "fp8_block": 0, "int8_rotate": False} | FORMATS[name]
    kv_format = parse_kv_format(
        options["kv_dtype"],
        fp8_block=options["fp8_block"],
        int8_rotate=options["int8_rotate"],
        model_dtype=torch.bfloat16,
    )
    pages, host_pages, slots, snapshots = 5, 6, 3, 4
    layout = kv_layout(config, kv_format)
    cache = KVCache(
        config,
        pages=pages,
        page_tokens=PAGE,
        dtype=torch.bfloat16,
        device=DEVICE,
        kv_format=kv_format,
    )
    tensors, storages = guarded(layout, pages, PAGE)
    cache.pool = PlanePool(layout, tensors, pages=pages, page_tokens=PAGE)
    states = None
    if config.linear is not None:
        states = StatePool(config, slots=slots, dtype=torch.bfloat16, device=DEVICE)
    sizes = HostSizes(host_pages, snapshots if states else 0, 64 << 20)
    tier = HostTier(
        config,
        cache,
        states,
        sizes,
        page_size=PAGE,
        timeout_s=20,
        link_bytes_per_s=None,
        stream=stream_of(),
    )
    state_bytes = (
        {}
        if states is None
        else {name: tensor.view(torch.uint8).flatten(2) for name, tensor in states.tensors.items()}
    )
    assert tier.planes.names == [*storages, *state_bytes]
    everything = [*storages.values(), *state_bytes.values()]
    for seed, tensor in enumerate(everything):
        noise(tensor, seed)
    before = [tensor.clone() for tensor in everything]
    torch.cuda.synchronize()
    tail = 13
    stored = ((2, 0, 5, PAGE), (3, 0, 1, PAGE), (0, 0, 2, tail))
    loaded = ((4, 0, 5, PAGE), (0, 0, 1, PAGE), (2, 0, 2, tail))
    saved, restored = (state((1, 2)), state((0, 2))) if states else (None, None)
    tier.queue.submit_store(1, kv(*stored), saved)
    tier.queue.drain()
    for tensor in everything:
        tensor.fill_(POISON)
    torch.cuda.synchronize()
    step = tier.queue.start_step([(2, kv(*loaded), restored)])
    assert step.finish() == []
    done(tier.queue)
    for stream in ("store", "load"):
        assert paths(tier.queue, stream) == {mechanism}
    torch.cuda.synchronize()
    for index, (tensor, old) in enumerate(zip(everything, before, strict=True)):
        expected = torch.full_like(tensor, POISON)
        if index < len(storages):
            row = (tensor.shape[2] - GUARD) // PAGE
            for (source, _, _, tokens), (target, *_) in zip(stored, loaded, strict=True):
                expected[:, target, : tokens * row] = old[:, source, : tokens * row]
        else:
            expected[:, 0] = old[:, 1]
        assert torch.equal(tensor, expected), tier.planes.names[index]
    kinds = {config.layer_type(layer) for layer in range(config.num_layers)}
    assert (states is not None) == (kinds != {FULL_ATTENTION})
    tier.close()
