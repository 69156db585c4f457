"""The engine: one model, its KV cache, its slots, and the batch API over them (`batch_api`).

Owns the weights, the KV pools and the slot table; all are allocated in the constructor. The
high-level path (`step_loop.StepLoop`, `LLM`) runs its plans through the same runner. A lock lets
one forward run at a time, so both may be used at once, on different slots.
"""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace import batch_api
from headrace._core import (
    MemoryConfig,
    SamplingSpec,
    Scheduler,
    SlotAllocator,
    StepPlan,
    decode_width,
)
from headrace.backends.select import choose_device, make_backend
from headrace.config import EngineConfig, checks_enabled, preempt_every
from headrace.errors import ConfigError, EngineClosed
from headrace.kv.cache import KVCache, check_width, kv_layout
from headrace.kv.formats import KVFormat, KVLayout, parse_kv_format
from headrace.kv.memory import available_bytes
from headrace.kv.state import StatePool
from headrace.loading.build import LoadedModel, load_model
from headrace.loading.resolve import resolve_model
from headrace.models.decoder import DecoderModel
from headrace.models.step import Gates
from headrace.plan import LINK_BYTES_PER_S, token_workspace_bytes, workspace_bytes
from headrace.request import (
    BatchDecodeResult,
    BatchedRequest,
    BatchPrefillResult,
    SamplingParams,
    check_request_id,
)
from headrace.runner import ModelRunner, Pending, sampling_batch
from headrace.sampling import SampleResult
from headrace.text.tokenizer import Tokenizer
from headrace.tiers import HostSizes, HostTier, host_sizes, staging_states

# Odd, so that seed + k * this differs for all k below 2^64 (Weyl sequence).
_SEED_STEP = 0x9E37_79B9_7F4A_7C15
_U64 = 2**64
# What a step may plan with for copies inside host memory, where no link is set.
_MEMCPY_BYTES_PER_S = 5e9
# Time for a step in flight to end by itself when its engine is closed.
CLOSE_GRACE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What this engine can do, for callers that adapt to it."""

    supports_batch: bool
    max_batch_size: int
    max_context: int
    device: str
    dtype: str
    kv_dtype: str
    deterministic: bool
    kv_layouts: tuple[str, ...] = ("slots",)


class Engine:
    """A loaded model with room for `max_batch_size` requests.

    progress: show on standard error how far loading is.

    Raises
    ------
    ConfigError
        An option that this machine or build cannot serve, or pools that do not fit in memory.
    ModelError
        A model that is unknown, damaged or not supported.
    StepTimeout
        A step of an earlier engine of this process did not end in time on the same GPU, or one
        that this engine was tried with.

    Examples
    --------
    >>> engine = Engine(EngineConfig(model="smollm2", max_batch_size=2))  # doctest: +SKIP
    >>> request = BatchedRequest(request_id=7, prompt_tokens=[1, 2, 3])  # doctest: +SKIP
    >>> engine.allocate_slot(7)  # doctest: +SKIP
    0
    >>> engine.batch_prefill([request]).token_ids  # doctest: +SKIP
    """

    def __init__(self, config: EngineConfig, *, progress: bool = False) -> None:
        self.config = config
        self.device = choose_device(config)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            from headrace.backends.cuda.deadline import check_gpu

            check_gpu(self.device)  # before the first call that would wait for it
        deterministic = config.deterministic == "on" or (config.deterministic == "auto" and on_gpu)
        self.backend = make_backend(self.device, deterministic=deterministic)
        loaded = load_model(
            resolve_model(
                config.model,
                load_format=config.load_format,
                cache_dir=None if config.cache_dir is None else Path(config.cache_dir),
            ),
            device=self.device,
            dtype=config.dtype,
            backend=self.backend,
            load_format=config.load_format,
            seed=config.seed,
            fp8_weights=config.fp8_weights,
            progress=progress,
        )
        self.model_config = loaded.config
        self.max_context = _max_context(config.max_context, loaded.config.max_position)
        self.tokenizer = None if config.skip_tokenizer else _tokenizer(loaded)
        dtype = loaded.model.dtype
        kv_format = parse_kv_format(
            config.kv_dtype,
            fp8_block=config.fp8_block,
            int8_rotate=config.int8_rotate,
            model_dtype=dtype,
        )
        layout = kv_layout(loaded.config, kv_format)
        self.paged = config.kv_layout == "paged"
        pages, page_tokens = self._pool_shape()
        if self.paged:
            check_width(config.slot_widths, layout.layers)
        state_bytes = loaded.config.state_bytes_per_slot(dtype.itemsize)
        host = self._host_sizes(layout, state_bytes)
        staging = staging_states(config.max_batch_size, host)
        # Bytes beside weights and pools that steps are expected to take at most.
        self.step_bytes = self._step_bytes(kv_format, page_tokens)
        kept = self.step_bytes + _tier_bytes_beside(self.device, host)
        _check_memory(
            layout.pool_bytes(pages, page_tokens),
            (config.max_batch_size + staging) * state_bytes,
            available_bytes(self.device) - kept,
            kept,
        )
        self.kv = KVCache(
            loaded.config,
            pages=pages,
            page_tokens=page_tokens,
            width=config.slot_widths if self.paged else 1,
            dtype=dtype,
            device=self.device,
            kv_format=kv_format,
            checked=checks_enabled(),
        )
        self.state: StatePool | None = None
        if loaded.config.linear is not None:
            self.state = StatePool(
                loaded.config,
                slots=config.max_batch_size,
                staging=staging,
                dtype=dtype,
                device=self.device,
            )
        self.runner = self._runner(loaded.model)
        self.tier = None if host is None else self._host_tier(host)
        self._memory = self._memory_config(layout, host, staging)
        self.slots = SlotAllocator(config.max_batch_size)
        self.capabilities = Capabilities(
            supports_batch=config.max_batch_size > 1,
            max_batch_size=config.max_batch_size,
            max_context=self.max_context,
            device=str(self.device),
            dtype=str(dtype).removeprefix("torch."),
            kv_dtype=self.kv.format.label,
            deterministic=deterministic,
            kv_layouts=(config.kv_layout,),
        )
        # Re-entrant: a garbage collection inside a forward may run `close` on the same thread.
        self._forward_lock = threading.RLock()
        self._request_count = itertools.count()
        self._closing = self._closed = False

    def _step_bytes(self, kv_format: KVFormat, page_tokens: int) -> int:
        """Bytes to leave free for what steps and graphs allocate; a CPU counts no such thing."""
        if self.device.type != "cuda":
            return 0
        from headrace.backends.cuda.capture import nobody_captures
        from headrace.backends.cuda.memory import step_bytes

        with nobody_captures():
            torch.cuda.empty_cache()  # what loading left would count as taken
        config, model = self.config, self.model_config
        slots, tokens = config.max_batch_size, config.max_batch_tokens
        itemsize = kv_format.model_dtype.itemsize
        workspace = workspace_bytes(model, slots, self.max_context, tokens, itemsize)
        return workspace + step_bytes(
            model,
            kv_format,
            slots=slots,
            max_context=self.max_context,
            page_tokens=page_tokens,
            max_batch_tokens=tokens,
            token_workspace=token_workspace_bytes(model, itemsize),
            itemsize=itemsize,
        )

    def _runner(self, model: DecoderModel) -> ModelRunner:
        if self.device.type != "cuda":
            return ModelRunner(model, self.kv, self.state)
        from headrace.backends.cuda.prefill_attention import most_captured
        from headrace.backends.cuda_ops import CudaBackend
        from headrace.cuda_runner import CudaRunner

        assert isinstance(self.backend, CudaBackend), "made for this device"
        slots = self.config.max_batch_size
        rows = decode_width(slots)
        self.backend.attach(
            self.kv,
            query_heads=self.model_config.num_heads,
            max_rows=rows,
            max_context=self.max_context,
        )
        # A check in the middle of a step reads from the device, which no graph allows.
        graphs = self.config.cuda_graphs and not self.kv.pool.checked
        return CudaRunner(
            model,
            self.kv,
            self.state,
            max_rows=rows,
            max_context=self.max_context,
            max_tokens=min(self.config.max_batch_tokens, slots * self.max_context),
            graphs=graphs,
            graph_prompts=min(slots, most_captured(self.kv.format)) if graphs else 0,
            step_timeout_s=self.config.step_timeout_s,
        )

    def _pool_shape(self) -> tuple[int, int]:
        """Pages of the KV pool, and tokens of each."""
        config = self.config
        if not self.paged:
            return config.max_batch_size, self.max_context
        pages = config.num_pages
        if pages is None:
            pages = config.max_batch_size * -(-self.max_context // config.page_size)
        return pages, config.page_size

    def _host_sizes(self, layout: KVLayout, state_bytes: int) -> HostSizes | None:
        config = self.config
        if not config.host_bytes:
            return None
        return host_sizes(
            config.host_bytes,
            layout,
            page_size=config.page_size,
            state_bytes=state_bytes if config.prefix_cache != "off" else 0,
            snapshot_interval=config.snapshot_interval,
        )

    def _host_tier(self, sizes: HostSizes) -> HostTier:
        stream = None
        if self.device.type == "cuda":
            from headrace.cuda_runner import CudaRunner

            assert isinstance(self.runner, CudaRunner), "made for this device"
            stream = self.runner.stream
        return HostTier(
            self.model_config,
            self.kv,
            self.state,
            sizes,
            page_size=self.config.page_size,
            timeout_s=self.config.copy_timeout_s,
            link_bytes_per_s=self.config.link_bytes_per_s or None,
            copy_check=self.config.copy_check,
            stream=stream,
        )

    def _memory_config(
        self, layout: KVLayout, host: HostSizes | None, staging: int
    ) -> MemoryConfig:
        config = self.config
        caches = self.paged or host is not None
        unset = LINK_BYTES_PER_S if self.device.type == "cuda" else _MEMCPY_BYTES_PER_S
        link = config.link_bytes_per_s or unset
        return MemoryConfig(
            page_size=config.page_size,
            num_pages=self.kv.pages if self.paged else None,
            num_layers=layout.layers,
            slot_widths=config.slot_widths if self.paged else 1,
            low_pages=config.low_pages,
            prefix_cache=caches if config.prefix_cache == "auto" else config.prefix_cache == "on",
            write_policy=config.write_policy,
            host_pages=0 if host is None else host.pages,
            hybrid=self.state is not None,
            snapshots=0 if host is None else host.snapshots,
            staging=staging,
            state_slots=config.max_batch_size,
            snapshot_interval=config.snapshot_interval,
            page_bytes=layout.bytes_per_token * config.page_size,
            admission=config.admission,
            admission_ratio=config.admission_ratio,
            preemption=config.preemption,
            preempt_every=preempt_every(),
            load_back_threshold=config.load_back_threshold,
            link_bytes_per_ms=link / 1e3,
            low_step_ms=config.low_step_ms,
        )

    def supports_batching(self) -> bool:
        """Whether more than one request can share a step."""
        return self.capabilities.supports_batch

    def make_scheduler(self) -> Scheduler:
        """Return a scheduler over this engine's slots, with the limits of its configuration."""
        return Scheduler(
            self.slots,
            max_context=self.max_context,
            vocab_size=self.model_config.vocab_size,
            max_batch_tokens=self.config.max_batch_tokens,
            max_waiting=self.config.max_waiting,
            max_results=self.config.max_results,
            policy=self.config.policy,
            memory=self._memory,
        )

    def sampling_spec(self, params: SamplingParams) -> SamplingSpec:
        """Sampling options as the core takes them: a seed for everyone, all stop tokens in one."""
        eos = () if params.ignore_eos else self.model_config.eos_token_ids
        seed = params.seed
        if seed is None:
            seed = self.seed_of(next(self._request_count))
        return SamplingSpec(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=seed,
            logprobs=params.logprobs,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=sorted({*params.stop_token_ids, *eos}),
        )

    def seed_of(self, number: int) -> int:
        """Seed of the request of a number, which has none of its own."""
        return (self.config.seed + number * _SEED_STEP) % _U64

    def execute(self, plan: StepPlan, gates: Gates | None = None) -> SampleResult:
        """Run one plan; one at a time, callers on other threads wait.

        gates: of the copies the plan came with. Raises as `batch_prefill` for a closed engine and
        for the device.
        """
        with self._forward_lock:
            self.check_open()
            return self.runner.execute(plan, gates)

    def launch(self, plan: StepPlan, previous: Pending | None = None) -> Pending:
        """Start a plan that came without copies; its tokens are waited for by what is returned.

        previous: the step before, for a plan that was made ahead of its tokens.
        Raises as `execute`.
        """
        with self._forward_lock:
            self.check_open()
            return self.runner.launch(plan, previous=previous)

    def forward(self, plan: StepPlan) -> tuple[torch.Tensor, SampleResult]:
        """Run one plan as `execute` does; return the logits of its samples, and their tokens."""
        with self._forward_lock:
            self.check_open()
            logits = self.runner.forward(plan)
            return logits, self.runner.sample(logits, sampling_batch(plan.sampling))

    def close(self) -> None:
        """Refuse further work and let the weights and pools go. Idempotent.

        A forward that runs on another thread has two seconds to end; then the wait for it ends on a
        GPU, and raises `EngineClosed` there, as it does at once for a step that was launched and is
        waited for. A forward on a CPU is waited for.
        """
        self._closing = True  # a prompt of many chunks ends with the one that runs
        if not self._forward_lock.acquire(timeout=CLOSE_GRACE_S):
            self.end_waits()
            self._forward_lock.acquire()
        try:
            if not self._closed:
                self._closed = True
                self.runner.end_waits()  # of steps that are waited for without the lock
                if self.tier is not None:
                    # Copies of a step that was given up would be waited for in vain.
                    self.tier.close(drain=not self.runner.gave_up)
                # The kernels of a GPU hold the pools as well.
                del self.runner, self.kv, self.state, self.tier, self.backend
        finally:
            self._forward_lock.release()

    def end_waits(self) -> None:
        """End the waits of all threads for steps on a GPU, which raise `EngineClosed`.

        The engine runs no step from then on; what is left is to close it. Does nothing on a CPU.
        """
        runner: ModelRunner | None = getattr(self, "runner", None)  # gone once closed
        if runner is not None:
            runner.end_waits()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def allocate_batch_slots(self, n: int) -> None:
        """Set how many slots are in use, 1 to `max_batch_size`.

        Raises `ConfigError` with pages, for another number, or if a slot that would go is taken;
        nothing changes then.
        """
        self._check_slots()
        limit = self.config.max_batch_size
        given: object = n
        if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= limit:
            raise ConfigError(f"n={given!r}: accepted is 1 to max_batch_size, which is {limit}")
        self.slots.resize(n)

    def allocate_slot(self, request_id: int) -> int:
        """Give a request the smallest free slot.

        Raises `DuplicateRequest` if it holds one, `OutOfPages` if none is free, `ConfigError` with
        pages: a slot has no KV of its own then.
        """
        self._check_slots()
        return self.slots.allocate(check_request_id(request_id))

    def free_slot(self, request_id: int) -> None:
        """Take the slot back, after a forward that runs now.

        Raises `UnknownRequest` if the request holds none.
        """
        with self._forward_lock:
            self.slots.free(check_request_id(request_id))

    def _check_slots(self) -> None:
        if self.paged:
            raise ConfigError(
                "kv_layout='paged': the batch API drives fixed slots; use LLM or a Scheduler, or "
                "kv_layout='slots'"
            )

    def batch_prefill(
        self, requests: Sequence[BatchedRequest], *, return_logits: bool = False
    ) -> BatchPrefillResult:
        """Compute the prompts of requests that hold slots, and their first tokens.

        Prompts run together, in chunks of at most `max_batch_tokens` tokens a forward. Updates the
        requests in place. A request that is refused is refused before anything runs, and nothing
        has changed; if a forward raises, the requests it ran are finished with "error".

        Raises
        ------
        UnknownRequest
            A request without a slot.
        InvalidRequest, PromptTooLong
            A request that is listed twice, finished, already prefilled or too long, has ids outside
            the vocabulary, changed its slot, or has stop strings (a matter of text: use `LLM`).
        EngineClosed
            The engine was closed, before or meanwhile.
        StepTimeout
            GPU only: a forward, this one or one before, has not ended within `step_timeout_s`. The
            engine runs no more.
        DeviceError
            GPU only: the device reports a fault.
        """
        with self._forward_lock:
            return batch_api.prefill(self, requests, return_logits=return_logits)

    def batch_decode_step(
        self, requests: Sequence[BatchedRequest], *, return_logits: bool = False
    ) -> BatchDecodeResult:
        """Compute one more token for each request, in one forward. Updates them in place.

        Raises as `batch_prefill`, and `InvalidRequest` for a request without a first token. After
        `StepTimeout` the engine runs no more.
        """
        with self._forward_lock:
            return batch_api.decode_step(self, requests, return_logits=return_logits)

    def check(self) -> None:
        """Raise `EngineClosed`, or `StepTimeout` after a step that did not end in time.

        For whoever starts copies before a step.
        """
        with self._forward_lock:
            self.check_open()
            self.runner.check()

    def check_open(self) -> None:
        """Raise `EngineClosed` once `close` was called."""
        if self._closing:
            raise EngineClosed("engine is closed: closed by its owner")


def _tokenizer(loaded: LoadedModel) -> Tokenizer | None:
    if loaded.tokenizer_path is not None:
        return Tokenizer.from_file(loaded.tokenizer_path)
    if loaded.tokenizer_json is None:
        return None
    return Tokenizer.from_json(
        loaded.tokenizer_json,
        eos_ids=loaded.config.eos_token_ids,
        chat_template=loaded.chat_template,
    )


def _tier_bytes_beside(device: torch.device, host: HostSizes | None) -> int:
    """Bytes that a host tier takes of the memory the pools are in: on a CPU it is the same."""
    return host.nbytes if host is not None and device.type == "cpu" else 0


def _check_memory(kv_bytes: int, state_bytes: int, available: int, kept: int) -> None:
    """Judge both pools together: memory reserved but never touched still counts as free.

    kept: bytes that `available` leaves out, for steps and, on a CPU, for the host tier.
    """
    if kv_bytes + state_bytes > available:
        beside = f" beside {kept:,} that are kept for steps and the host tier" if kept else ""
        raise ConfigError(
            f"KV pools need {kv_bytes:,} bytes and state pools {state_bytes:,}, "
            f"{max(available, 0):,} are free{beside}; lower max_batch_size or max_context, or "
            "take a smaller kv_dtype"
        )


def _max_context(asked: int | None, limit: int) -> int:
    if asked is None:
        return limit
    if asked > limit:
        raise ConfigError(f"max_context={asked}: the model was made for at most {limit} tokens")
    return asked
