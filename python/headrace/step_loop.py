"""The engine thread: asks the scheduler for a plan, runs it, commits the tokens.

While a decode step runs, the next one is planned and queued already (`pipeline`).

Owns the thread and, per live request, what Python knows of it (`_Live`): options, text so far,
log-probabilities, and the future its caller waits on. Whoever removes a request from the table
resolves its future, so each is resolved exactly once. `_lock` guards the table only; it is never
held while a forward runs or a caller is woken.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from headrace._core import RequestResult, StepPlan
from headrace.config import checks_enabled
from headrace.engine import CLOSE_GRACE_S, Engine
from headrace.errors import EngineClosed, HeadraceError, InvalidRequest, UnknownRequest
from headrace.pipeline import Ended, Pipeline
from headrace.request import (
    CachedTokens,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from headrace.sampling import SampleResult
from headrace.stats import collect
from headrace.text.stream import TextStream
from headrace.text.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
# `close` waits so long for the thread once waits for a GPU were ended, which ends it at once. A
# forward on a CPU cannot be ended; the thread goes when it is over.
_JOIN_TIMEOUT_S = 30.0
_NS = 1e-9


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """New tokens of a streaming request, and the text they make certain."""

    token_ids: list[int]
    text: str


StreamQueue: TypeAlias = queue.SimpleQueue[StreamChunk | None]


@dataclass(slots=True)
class _Live:
    """What Python knows of a request that has not ended."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    stop_token_ids: frozenset[int]
    future: "Future[RequestOutput]"
    stream: StreamQueue | None
    text: TextStream | None
    """Set if stop strings or a stream need the text token by token."""
    num_pushed: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def push(self, token_id: int) -> tuple[str, bool]:
        """Text made certain by a token, and whether a stop string appeared."""
        if self.text is None:
            return "", False
        ends = token_id in self.stop_token_ids and self.num_pushed >= self.params.min_tokens
        self.num_pushed += 1
        if ends:
            return "", False  # a stop token is no part of the text
        text, stopped = self.text.push(token_id)
        return text, stopped is not None

    def rewind(self, token_ids: Sequence[int], tokenizer: Tokenizer | None) -> None:
        """Forget what came after `token_ids`: a step that has to be done again."""
        del self.logprobs[len(token_ids) :]
        if self.text is not None and tokenizer is not None:
            params = self.params
            self.text = TextStream(tokenizer, params.stops, min_tokens=params.min_tokens)
            self.num_pushed = 0
            for token_id in token_ids:
                self.push(token_id)


@dataclass(frozen=True, slots=True)
class Handle:
    """A submitted request: its id and the future of its output."""

    request_id: int
    future: "Future[RequestOutput]"


class StepLoop:
    """Runs an engine on a thread of its own and takes requests from any thread.

    The thread keeps the loop alive until `close`, or until the interpreter exits.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.scheduler = engine.make_scheduler()
        self._copies = None if engine.tier is None else engine.tier.queue
        if self._copies is not None:
            self.scheduler.connect(self._copies)
        # Re-entrant: a garbage collection on the engine thread may run `close`.
        self._lock = threading.RLock()
        self._live: dict[int, _Live] = {}
        self._check = checks_enabled()
        self._pipeline = Pipeline(engine, self.scheduler)
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: str = "high",
        stream: StreamQueue | None = None,
    ) -> Handle:
        """Queue a request; never waits for the engine.

        With `stream`, its chunks are put there as they come, then None, once the future is done.
        Raises as `Scheduler.submit`, and `InvalidRequest` for stop strings without a tokenizer.
        """
        if params.stops and self.engine.tokenizer is None:
            raise InvalidRequest("stop: loaded without a tokenizer, so text cannot be matched")
        spec = self.engine.sampling_spec(params)
        live = self._new_live(prompt, list(prompt_token_ids), params, stream)
        # Under the lock, so that the engine thread finds the request once the scheduler has it.
        with self._lock:
            request_id = self.scheduler.submit(live.prompt_token_ids, spec, priority=priority)
            self._live[request_id] = live
        return Handle(request_id, live.future)

    def abort(self, request_id: int) -> bool:
        """End a live request; False if it has ended or never was."""
        aborted = self.scheduler.abort(request_id)
        if aborted:
            self._finish(request_id)
        return aborted

    def live_ids(self) -> list[int]:
        """Ids of the requests that have not ended, in order of arrival."""
        with self._lock:
            return list(self._live)

    def stats(self) -> dict[str, object]:
        """Counts of requests, memory and copies by the names of `headrace.stats.collect`."""
        return collect(self.scheduler, self.engine.slots, self._copies)

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End all requests with `abort`, stop the thread. Idempotent; callable from anywhere.

        A step on a GPU that has not ended after two seconds is given up, and the engine with it,
        for all who use it.
        """
        self.scheduler.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_GRACE_S)
            if self._thread.is_alive():
                self.engine.end_waits()
                self._thread.join(_JOIN_TIMEOUT_S)
        self._finish_all()

    def _new_live(
        self,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        stream: StreamQueue | None,
    ) -> _Live:
        eos = () if params.ignore_eos else self.engine.model_config.eos_token_ids
        tokenizer = self.engine.tokenizer
        text = None
        if tokenizer is not None and (params.stops or stream is not None):
            text = TextStream(tokenizer, params.stops, min_tokens=params.min_tokens)
        future: Future[RequestOutput] = Future()
        # Marked as running, so that a caller cannot cancel it behind the scheduler's back: `abort`
        # is the way to end a request.
        future.set_running_or_notify_cancel()
        return _Live(
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            params=params,
            stop_token_ids=frozenset((*params.stop_token_ids, *eos)),
            future=future,
            stream=stream,
            text=text,
        )

    def _run(self) -> None:
        try:
            while True:
                plan = self.scheduler.next_plan()
                if plan is not None:
                    for ended in self._pipeline.run(plan):
                        self._step(ended)
        except EngineClosed:
            pass
        except BaseException as error:
            _LOG.exception("the engine thread died")
            reason = f"the engine thread died: {error!r}"
            self._pipeline.drain()  # before the slots of its steps are free
            for plan in self._pipeline.in_flight:
                with contextlib.suppress(HeadraceError):  # it may have been committed
                    self.scheduler.fail(plan, reason)  # frees the slots of the step
            self.scheduler.close(reason, error=True)
        self._finish_all()

    def _step(self, ended: Ended) -> None:
        """Commit or fail a step. A row that ran for nothing finds its request gone."""
        plan = ended.plan
        if ended.result is None:
            # Fails the rows of this step alone. The message goes to their callers, the traceback
            # to the log.
            error = ended.error
            level = logging.DEBUG if isinstance(error, EngineClosed) else logging.WARNING
            _LOG.log(level, "a forward failed", exc_info=error)
            for request_id in self.scheduler.fail(plan, f"{type(error).__name__}: {error}"):
                self._finish(request_id)
            return
        rows = plan.request_ids[plan.sample_rows].tolist()
        with self._lock:
            live = [self._live.get(request_id) for request_id in rows]
        self._commit(plan, live, ended.result)

    def _commit(self, plan: StepPlan, live: list[_Live | None], sampled: SampleResult) -> None:
        tokens = sampled.token_ids
        texts: list[str] = [""] * len(live)
        stops: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None
        if any(row is not None and row.text is not None for row in live):
            stops = np.zeros(len(live), np.bool_)
            for i, row in enumerate(live):
                if row is not None and tokens[i] >= 0:
                    texts[i], stops[i] = row.push(int(tokens[i]))
        for row, entry in zip(live, sampled.logprobs, strict=True):
            # Before the commit: once it is done an abort may build the output at any time. Entries
            # of tokens that are not accepted are cut off there, or here if the request goes on.
            if row is not None and entry is not None:
                row.logprobs.append(entry)
        finished, accepted = self.scheduler.commit(plan, tokens, stops)
        if self._copies is not None:
            self.scheduler.start_stores(self._copies)
        for i, row in enumerate(live):
            if row is not None and not accepted[i]:
                self._rewind(int(plan.request_ids[plan.sample_rows[i]]), row)
            elif row is not None and row.stream is not None:
                self._stream(row, StreamChunk([int(tokens[i])], texts[i]))
        for request_id, _ in finished:
            self._finish(request_id)
        if self._check:
            self.scheduler.check()

    def _rewind(self, request_id: int, row: _Live) -> None:
        """Take back what a row was given, if its request begins again."""
        with contextlib.suppress(UnknownRequest):  # aborted, and its result is taken
            status = self.scheduler.poll(request_id)
            if status.result is None:
                row.rewind(status.token_ids, self.engine.tokenizer)

    def _stream(self, row: _Live, chunk: StreamChunk) -> None:
        """Put a chunk, unless the end of the stream is already there."""
        with self._lock:
            if row.stream is not None and not row.future.done():
                row.stream.put(chunk)

    def _finish_all(self) -> None:
        with self._lock:
            ids = list(self._live)
        for request_id in ids:
            self._finish(request_id)

    def _finish(self, request_id: int) -> None:
        """Resolve the future of a request that has ended, unless somebody else does."""
        with self._lock:
            live = self._live.pop(request_id, None)
        if live is None:
            return
        try:
            output = _output(live, self.scheduler.take_result(request_id), self.engine.tokenizer)
        except Exception as error:
            # A caller waits for this future: whatever went wrong, it is told.
            _LOG.exception("no output for request %d", request_id)
            output = _lost(live, request_id, f"{type(error).__name__}: {error}")
        with self._lock:
            live.future.set_result(output)
            if live.stream is not None:
                live.stream.put(None)


def _output(live: _Live, result: RequestResult, tokenizer: Tokenizer | None) -> RequestOutput:
    token_ids = result.token_ids
    text, reason, stop_reason = _final_text(live, token_ids, result.finish_reason, tokenizer)
    submitted = result.submitted_ns
    device, host, streamed = result.cached_tokens

    def since(stamp: int | None) -> float | None:
        return None if stamp is None else (stamp - submitted) * _NS

    return RequestOutput(
        request_id=result.request_id,
        prompt=live.prompt,
        prompt_token_ids=live.prompt_token_ids,
        token_ids=token_ids,
        text=text,
        finish_reason=reason,
        stop_reason=stop_reason,
        error=result.message if reason == "error" else None,
        logprobs=None if live.params.logprobs is None else live.logprobs[: len(token_ids)],
        cached_tokens=CachedTokens(device=device, host=host, host_streamed=streamed),
        metrics=RequestMetrics(
            queue_s=since(result.first_planned_ns),
            ttft_s=since(result.first_token_ns),
            e2e_s=since(result.finished_ns) or 0.0,
            num_prompt_tokens=result.prompt_len,
            num_generated_tokens=len(token_ids),
        ),
    )


def _final_text(
    live: _Live, token_ids: list[int], reason: FinishReason, tokenizer: Tokenizer | None
) -> tuple[str, FinishReason, str | int | None]:
    """Text of the tokens that count, how the request ended, and what stopped it.

    The same function of the tokens for everyone, streamed or not.
    """
    last = token_ids[-1] if reason == "stop" and token_ids else None
    if tokenizer is None:
        return "", reason, last
    enough = len(token_ids) > live.params.min_tokens
    ends_by_token = last is not None and last in live.stop_token_ids and enough
    shown = token_ids[:-1] if ends_by_token else token_ids
    if not live.params.stops:
        return tokenizer.decode(shown), reason, last
    stream = TextStream(tokenizer, live.params.stops, min_tokens=live.params.min_tokens)
    text = "".join(stream.push(token)[0] for token in shown) + stream.finish()
    if stream.stopped is not None and reason in ("stop", "length"):
        # Also one that the end of the text completed, after the last step.
        return text, "stop", stream.stopped
    return text, reason, last


def _lost(live: _Live, request_id: int, error: str) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        prompt=live.prompt,
        prompt_token_ids=live.prompt_token_ids,
        token_ids=[],
        text="",
        finish_reason="error",
        error=error,
        logprobs=None if live.params.logprobs is None else [],
        metrics=RequestMetrics(
            e2e_s=0.0,
            num_prompt_tokens=len(live.prompt_token_ids),
            num_generated_tokens=0,
        ),
    )
