"""`LLM`: the whole engine behind one object, for scripts and notebooks."""

import contextlib
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait as wait_futures
from numbers import Integral
from queue import SimpleQueue
from typing import Self

from headrace.config import EngineConfig
from headrace.engine import Engine
from headrace.errors import ForkedProcess, InvalidRequest, QueueFull
from headrace.progress import Progress
from headrace.request import RequestOutput, SamplingParams, check_token_ids
from headrace.step_loop import Handle, StepLoop, StreamChunk

# A lone user of `Engine` gets single-session mode; a list of prompts wants a batch.
DEFAULT_BATCH_SIZE = 8
_POLL_S = 0.1

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams]


class LLM:
    """A model that generates.

    Parameters
    ----------
    model
        A known name (`smollm2`), a Hugging Face folder or a GGUF file.
    options
        Every field of `EngineConfig`; `max_batch_size` is 8 unless given. Fields that are not
        given are read from `HEADRACE_*` variables.

    Raises
    ------
    ConfigError
        An option that is unknown or cannot work.
    ModelError
        A model that is unknown, damaged or not supported.
    StepTimeout
        A step of an earlier engine of this process did not end in time on the same GPU.

    Examples
    --------
    >>> with LLM("smollm2") as llm:  # doctest: +SKIP
    ...     [output] = llm.generate("The capital of France is", SamplingParams(max_tokens=8))
    ...     print(output.text)
    """

    def __init__(
        self,
        model: str,
        *,
        device: str | None = None,
        dtype: str | None = None,
        kv_dtype: str | None = None,
        max_batch_size: int | None = None,
        max_context: int | None = None,
        skip_tokenizer: bool | None = None,
        **options: object,
    ) -> None:
        named: dict[str, object] = {
            "device": device,
            "dtype": dtype,
            "kv_dtype": kv_dtype,
            "max_batch_size": max_batch_size,
            "max_context": max_context,
            "skip_tokenizer": skip_tokenizer,
        }
        options |= {name: value for name, value in named.items() if value is not None}
        self._start(
            EngineConfig.from_options(
                {"model": model, **options}, defaults={"max_batch_size": DEFAULT_BATCH_SIZE}
            )
        )

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """Load with exactly these options; no variable is read."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        self.engine = Engine(config, progress=sys.stderr.isatty())
        self.loop = StepLoop(self.engine)
        self.tokenizer = self.engine.tokenizer
        # Also runs when the object is dropped without `close`, and at interpreter exit.
        self._close = weakref.finalize(self, _close, self.loop, self.engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | None = None,
        *,
        priority: str = "high",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt; outputs are in the order of the prompts.

        Parameters
        ----------
        prompts
            One prompt or several, each a string or a list of token ids.
        params
            One for all prompts, or one each. Greedy with 128 tokens if not given.
        priority
            "high" or "low"; without effect under `policy="fcfs"`.
        progress
            Show a progress bar; None shows it on a terminal only.

        Raises
        ------
        InvalidRequest, PromptTooLong
            A prompt that cannot be served; the prompts before it are aborted, other callers'
            requests go on.
        EngineClosed
            The engine was closed. Requests that fail later do not raise: they come back with
            `finish_reason` "error" and the message in `error`. After one that begins with
            "StepTimeout" (GPU only) all requests end so: the engine runs no more, and the process
            has to be started over.
        """
        batch = _prompt_list(prompts)
        each = _params_list(params, len(batch))
        show = sys.stderr.isatty() if progress is None else progress
        handles: list[Handle] = []
        with Progress(len(batch), self.loop.scheduler, enabled=show) as bar:
            try:
                for prompt, one in zip(batch, each, strict=True):
                    handles.append(self._submit_when_room(prompt, one, priority, handles))
                    bar.update(handles)
                pending = deque(handles)
                while pending:
                    wait_futures([pending[0].future], timeout=_POLL_S)
                    while pending and pending[0].future.done():
                        pending.popleft()
                    bar.update(handles)
            except BaseException:
                for handle in handles:
                    self.loop.abort(handle.request_id)
                raise
        return [handle.future.result() for handle in handles]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: str = "high"
    ) -> Iterator[StreamChunk | RequestOutput]:
        """Yield chunks of tokens and text as they come, then the `RequestOutput`.

        The text of all chunks is a prefix of the output's text; the rest of it was withheld, as a
        stop string might have begun there. Dropping the iterator aborts the request. Raises and
        fails as `generate`.
        """
        chunks: SimpleQueue[StreamChunk | None] = SimpleQueue()
        handle = self._submit(prompt, params or SamplingParams(), priority, chunks)
        try:
            while (chunk := chunks.get()) is not None:
                yield chunk
            yield handle.future.result()
        finally:
            self.loop.abort(handle.request_id)

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        params: SamplingParams | None = None,
    ) -> RequestOutput:
        """Answer a conversation; `chat_prompt` says how it becomes a prompt.

        Raises and fails as `generate`.
        """
        return self.generate([self.chat_prompt(messages)], params)[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Token ids of a conversation, through the model's chat template.

        messages: `{"role": ..., "content": ...}` each. Raises `InvalidRequest` if the model has no
        template or tokenizer, or the template refuses the conversation.
        """
        if self.tokenizer is None:
            raise InvalidRequest("messages: this model was loaded without a tokenizer")
        text = self.tokenizer.apply_chat_template(messages, strftime_now=time.strftime)
        # The template writes the special tokens itself.
        return self.tokenizer.encode(text, add_special=False)

    def close(self) -> None:
        """End all requests with `abort` and let the model go. Idempotent.

        A step on a GPU that has not ended after a few seconds is given up; a forward on a CPU is
        waited for.
        """
        self._close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _submit_when_room(
        self, prompt: Prompt, params: SamplingParams, priority: str, before: list[Handle]
    ) -> Handle:
        """Submit, waiting for an earlier prompt of this call to leave a full queue."""
        while True:
            try:
                return self._submit(prompt, params, priority)
            except QueueFull:
                unfinished = [handle.future for handle in before if not handle.future.done()]
                if not unfinished:
                    raise  # the queue is full of other callers' requests
                wait_futures(unfinished[:1], timeout=_POLL_S)

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: str,
        stream: "SimpleQueue[StreamChunk | None] | None" = None,
    ) -> Handle:
        text = prompt if isinstance(prompt, str) else None
        if text is None:
            vocab = self.engine.model_config.vocab_size
            ids = check_token_ids("prompt", prompt, vocab)
        elif self.tokenizer is None:
            raise InvalidRequest("prompt: loaded without a tokenizer, so give token ids, not text")
        else:
            ids = self.tokenizer.encode(text)
        return self.loop.submit(ids, params, prompt=text, priority=priority, stream=stream)

    def stats(self) -> dict[str, object]:
        """Counts of requests, pages, cache hits by tier, preemptions and copies.

        `headrace.stats.collect` says what each name means.
        """
        return self.loop.stats()


def _close(loop: StepLoop, engine: Engine) -> None:
    # In a forked child there is no engine thread, and the parent's is none of its business.
    with contextlib.suppress(ForkedProcess):
        loop.close()
        engine.close()


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    batch: list[Prompt] = list(prompts)  # type: ignore[arg-type]  # told apart just below
    # A flat list of ids is one prompt.
    if batch and all(isinstance(item, Integral) for item in batch):
        return [batch]  # type: ignore[list-item]  # its items are ids
    return batch


def _params_list(params: Params | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    each = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(each) != count:
        raise InvalidRequest(f"params: {len(each)} for {count} prompts; give one, or one each")
    for one in each:
        if not isinstance(one, SamplingParams):
            raise InvalidRequest(f"params: accepted is SamplingParams, not {one!r}")
    return each
