"""The low-level batch API of an engine: requests that hold slots, and a forward a call.

Checks requests before anything runs, cuts prompts into chunks, and writes tokens to the requests.
No state; the caller holds the engine's lock from the look-up of the slots on.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from headrace._core import CHUNK_ALIGN, SamplingSpec, build_plan
from headrace.errors import InvalidRequest, PromptTooLong, UnknownRequest
from headrace.request import (
    BatchDecodeResult,
    BatchedRequest,
    BatchPrefillResult,
    StepRow,
    check_token_ids,
)
from headrace.sampling import SampleResult

if TYPE_CHECKING:
    from headrace.engine import Engine


def prefill(
    engine: "Engine", requests: Sequence[BatchedRequest], *, return_logits: bool
) -> BatchPrefillResult:
    """As `Engine.batch_prefill`."""
    specs = _checked(engine, requests, decode=False)
    logits: dict[int, torch.Tensor] = {}
    pending = list(range(len(requests)))
    while pending:
        chunks = _chunks(engine, requests, pending)
        plan = build_plan(
            [
                _row(request, specs[index] if last else None, tokens)
                for index, request, tokens, last in chunks
            ],
            decode=False,
        )
        with _running(engine, [request for _, request, _, _ in chunks]):
            out, sampled = engine.forward(plan)
            for _, request, tokens, _ in chunks:
                request.seq_len += len(tokens)
            ended = [index for index, _, _, last in chunks if last]
            for row, index in enumerate(ended):
                logits[index] = out[row]
                _record(engine, requests[index], specs[index], _step_row(sampled, row))
        pending = [index for index in pending if index not in logits]
    return BatchPrefillResult(
        request_ids=[request.request_id for request in requests],
        token_ids=[_new_token(request) for request in requests],
        finished=[request.finished for request in requests],
        logits=torch.stack([logits[index] for index in range(len(requests))])
        if return_logits and requests
        else None,
    )


def decode_step(
    engine: "Engine", requests: Sequence[BatchedRequest], *, return_logits: bool
) -> BatchDecodeResult:
    """As `Engine.batch_decode_step`."""
    logits = None
    specs = _checked(engine, requests, decode=True)
    if requests:
        plan = build_plan(
            [
                _row(request, spec, request.generated_tokens[-1:])
                for request, spec in zip(requests, specs, strict=True)
            ],
            decode=True,
        )
        with _running(engine, requests):
            logits, sampled = engine.forward(plan)
            for row, request in enumerate(requests):
                request.seq_len += 1
                _record(engine, request, specs[row], _step_row(sampled, row))
    return BatchDecodeResult(
        request_ids=[request.request_id for request in requests],
        token_ids=[_new_token(request) for request in requests],
        finished=[request.finished for request in requests],
        logits=logits if return_logits else None,
    )


@contextlib.contextmanager
def _running(engine: "Engine", requests: Sequence[BatchedRequest]) -> Iterator[None]:
    """A forward of requests, and what it does to them.

    Whatever ends it early, an interrupt of the wait for the device included: some layers may have
    written KV, and moved the state of a hybrid model, so none of the requests can go on from here.
    """
    engine.check_open()  # nothing has run yet
    try:
        yield
    except BaseException:
        for request in requests:
            request.finished, request.finish_reason = True, "error"
        raise


def _checked(
    engine: "Engine", requests: Sequence[BatchedRequest], *, decode: bool
) -> list[SamplingSpec]:
    """Refuse what cannot run, before anything runs; bind the slots; return the options."""
    seen: set[int] = set()
    grants: list[tuple[int, int]] = []
    specs: list[SamplingSpec] = []
    for request in requests:
        name = f"request {request.request_id}"
        if request.request_id in seen:
            raise InvalidRequest(f"{name} is listed twice")
        seen.add(request.request_id)
        if request.finished:
            raise InvalidRequest(f"{name} is finished: {request.finish_reason}")
        if bool(request.generated_tokens) != decode:
            state = "has no token yet: prefill it first" if decode else "is already prefilled"
            raise InvalidRequest(f"{name} {state}")
        if request.sampling.stops:
            raise InvalidRequest(
                f"{name}: stop={request.sampling.stops!r}: stop strings are matched on text, "
                "which the batch API does not produce; use LLM, or stop_token_ids"
            )
        _check_tokens(engine, request)
        specs.append(_spec_of(engine, request))
        specs[-1].validate(engine.model_config.vocab_size)
        grants.append(_grant(engine, request))
    for request, (slot, generation) in zip(requests, grants, strict=True):
        request.slot_id, request.slot_generation = slot, generation
    return specs


def _check_tokens(engine: "Engine", request: BatchedRequest) -> None:
    name = f"request {request.request_id}"
    length, generated = len(request.prompt_tokens), len(request.generated_tokens)
    if length >= engine.max_context:
        raise PromptTooLong(
            f"{name}: prompt of {length} tokens does not fit: max_context is "
            f"{engine.max_context}, of which one token must stay free"
        )
    if length + generated > engine.max_context:
        raise InvalidRequest(
            f"{name}: {length} prompt and {generated} generated tokens do not fit: max_context "
            f"is {engine.max_context}"
        )
    vocab = engine.model_config.vocab_size
    check_token_ids("prompt_tokens", request.prompt_tokens, vocab)
    check_token_ids("generated_tokens", request.generated_tokens, vocab)
    expected = length + generated - 1 if generated else min(request.seq_len, length - 1)
    if request.seq_len != expected or request.seq_len < 0:
        raise InvalidRequest(f"{name}: seq_len={request.seq_len}: accepted is {expected}")


def _grant(engine: "Engine", request: BatchedRequest) -> tuple[int, int]:
    """Slot and generation of a request, refused if its KV is in an earlier tenancy."""
    name = f"request {request.request_id}"
    grant = engine.slots.grant_of(request.request_id)
    if grant is None:
        raise UnknownRequest(f"{name} holds no slot; call allocate_slot first")
    held = (request.slot_id, request.slot_generation)
    if request.seq_len and request.slot_generation is not None and held != grant:
        raise InvalidRequest(
            f"{name}: its slot was freed since its last step, and its KV with it; start over, "
            "or restore KV and state and set slot_generation to None"
        )
    return grant


def _spec_of(engine: "Engine", request: BatchedRequest) -> SamplingSpec:
    # The request's own id seeds it, so that every step of a request draws from one sequence.
    seed = request.sampling.seed
    if seed is None:
        seed = engine.seed_of(request.request_id)
    return engine.sampling_spec(replace(request.sampling, seed=seed))


def _chunks(
    engine: "Engine", requests: Sequence[BatchedRequest], pending: list[int]
) -> list[tuple[int, BatchedRequest, list[int], bool]]:
    """Chunks of the next forward: (index, request, tokens, whether the prompt ends)."""
    budget = engine.config.max_batch_tokens
    chunks = []
    for index in pending:
        request = requests[index]
        start = request.seq_len
        end = len(request.prompt_tokens)
        if end - start > budget:
            end = (start + budget) // CHUNK_ALIGN * CHUNK_ALIGN
        if end <= start:
            break
        budget -= end - start
        last = end == len(request.prompt_tokens)
        chunks.append((index, request, request.prompt_tokens[start:end], last))
    return chunks


def _row(
    request: BatchedRequest, spec: SamplingSpec | None, tokens: list[int]
) -> tuple[int, int, int, list[int], SamplingSpec | None, list[int], list[int]]:
    assert request.slot_id is not None, "bound by _checked"
    return (
        request.request_id,
        request.slot_id,
        request.seq_len,
        tokens,
        spec,
        request.prompt_tokens,
        request.generated_tokens,
    )


def _record(engine: "Engine", request: BatchedRequest, spec: SamplingSpec, row: StepRow) -> None:
    request.last_result = row
    if row.token_id < 0:
        request.finished, request.finish_reason = True, "error"
        return
    request.last_token = row.token_id
    request.generated_tokens.append(row.token_id)
    request.finish_reason = spec.finish_reason(
        len(request.prompt_tokens), request.generated_tokens, max_context=engine.max_context
    )
    request.finished = request.finish_reason is not None


def _new_token(request: BatchedRequest) -> int:
    assert request.last_result is not None, "set by the forward that has just run"
    return request.last_result.token_id


def _step_row(sampled: SampleResult, row: int) -> StepRow:
    return StepRow(token_id=int(sampled.token_ids[row]), logprobs=sampled.logprobs[row])
