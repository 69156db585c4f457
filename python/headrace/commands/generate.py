"""`headrace generate`: text for one prompt or several, all in one batch."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from headrace.commands.options import (
    Once,
    add_engine_options,
    add_output_option,
    engine_config,
)
from headrace.errors import InvalidRequest

if TYPE_CHECKING:
    from headrace.commands.options import Commands
    from headrace.llm import LLM
    from headrace.request import RequestOutput, SamplingParams

# Flag, type and help of every sampling option. `--seed` is an engine option: it seeds requests too.
_SAMPLING = (
    ("max-tokens", int, "end after so many tokens (128)"),
    ("temperature", float, "0 is greedy (0)"),
    ("top-k", int, "keep the k most probable tokens; 0 is off (0)"),
    ("top-p", float, "keep the most probable tokens that reach this together; 1 is off (1)"),
    ("min-p", float, "drop tokens less probable than this times the best one (0)"),
)
_MAX_BATCH = 8  # beyond this a batch is asked for by --max-batch-size


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "generate",
        help="generate text",
        description="Generate text for the prompts, or for standard input as one prompt.",
    )
    parser.add_argument(
        "--prompt",
        nargs="+",
        action="extend",
        metavar="TEXT",
        help="one or more prompts; without it standard input is one prompt",
    )
    parser.add_argument(
        "--chat", action="store_true", help="send each prompt as a message of a chat"
    )
    add_output_option(parser, ("text", "json", "jsonl"), "text")
    sampling = parser.add_argument_group("sampling options")
    for name, kind, text in _SAMPLING:
        sampling.add_argument(
            f"--{name}", type=kind, action=Once, default=argparse.SUPPRESS, metavar="X", help=text
        )
    sampling.add_argument(
        "--stop",
        nargs="+",
        action="extend",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="end before the first of these strings",
    )
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate and print. Returns 1 if a request failed. Raises `HeadraceError`."""
    prompts = _prompts(args.prompt, sys.stdin)
    config = engine_config(args, max_batch_size=min(len(prompts), _MAX_BATCH))
    from headrace.llm import LLM
    from headrace.request import SamplingParams

    names = [name.replace("-", "_") for name, _, _ in _SAMPLING] + ["stop"]
    given: dict[str, Any] = {name: getattr(args, name) for name in names if hasattr(args, name)}
    params = SamplingParams.from_dict(given)
    with LLM.from_config(config) as llm:
        inputs: list[str | list[int]] = [*prompts]
        if args.chat:
            inputs = [llm.chat_prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
        if args.output == "text" and len(prompts) == 1:
            outputs = [_stream(llm, inputs[0], params)]
        else:
            outputs = llm.generate(inputs, params)
            _print(config.model, prompts, outputs, args.output)
    failed = [output for output in outputs if output.finish_reason == "error"]
    for output in failed:
        print(f"error: request {output.request_id}: {output.error}", file=sys.stderr)
    return 1 if failed else 0


def _prompts(given: list[str] | None, stdin: TextIO) -> list[str]:
    if given:
        return given
    if stdin.isatty():
        raise InvalidRequest("prompt: missing; give --prompt TEXT or pipe text in")
    text = stdin.read().removesuffix("\n")  # the line end is the shell's, not the writer's
    if not text:
        raise InvalidRequest("prompt: standard input is empty")
    return [text]


def _stream(llm: "LLM", prompt: str | Sequence[int], params: "SamplingParams") -> "RequestOutput":
    """Print the text as it comes and return the output."""
    from headrace.request import RequestOutput

    shown = ""
    for part in llm.stream(prompt, params):
        if isinstance(part, RequestOutput):
            # What was withheld in case a stop string began there.
            print(part.text.removeprefix(shown))
            return part
        shown += part.text
        print(part.text, end="", flush=True)
    raise AssertionError("a stream ends with its output")


def _print(
    model: str, prompts: list[str], outputs: "Iterable[RequestOutput]", output_format: str
) -> None:
    if output_format == "text":
        for prompt, output in zip(prompts, outputs, strict=True):
            print(f"== {prompt}\n{output.text}")
        return
    rows = [
        dataclasses.asdict(dataclasses.replace(output, prompt=prompt))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    if output_format == "json":
        print(json.dumps({"model": model, "outputs": rows}, ensure_ascii=False))
        return
    for row in rows:
        print(json.dumps(row, ensure_ascii=False))
