"""`headrace plan`: what a model needs in memory and what fits, without loading it."""

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from headrace.commands.options import (
    DEFAULT_MODEL,
    Once,
    add_count_option,
    add_output_option,
    integer,
)
from headrace.config import EngineConfig

if TYPE_CHECKING:
    from headrace.commands.options import Commands
    from headrace.plan import MemoryPlan

_GIB = 2**30


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "plan",
        help="what fits in memory",
        description="Bytes of weights, KV and workspace of one rank; no weights are read.",
    )
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        action=Once,
        help="known configuration, folder or GGUF file (default: %(default)s)",
    )
    add_count_option(parser, "--tp", default=1, text="ranks that share the model")
    parser.add_argument(
        "--dtype", default="auto", action=Once, help="weights; auto is the checkpoint's own"
    )
    parser.add_argument(
        "--kv-dtype", default="auto", action=Once, help="keys and values; auto is as weights"
    )
    parser.add_argument(
        "--fp8-block", type=integer(0), default=0, action=Once, help="0 | 64, of an fp8 KV"
    )
    parser.add_argument("--int8-rotate", action="store_true", help="of an int8 KV")
    add_count_option(parser, "--slots", default=1, text="requests that run at once")
    parser.add_argument(
        "--context",
        type=integer(2),
        action=Once,
        metavar="N",
        help="tokens of prompt and answer of one request (default: the model's limit)",
    )
    parser.add_argument(
        "--hbm-gib",
        type=_gib,
        action=Once,
        metavar="G",
        help="memory of one rank; what does not fit in it is refused",
    )
    add_output_option(parser, ("table", "json"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan. Raises `ConfigError` if it does not fit, `ModelError` for a bad model."""
    from headrace.plan import check_fits, make_plan, read_model_config

    # The same checks as for an engine of these options. They are a question, not the settings of an
    # engine, so no variable is read.
    config = EngineConfig(
        model=args.model,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        fp8_block=args.fp8_block,
        int8_rotate=args.int8_rotate,
        max_batch_size=args.slots,
        max_context=args.context,
    )
    plan = make_plan(
        read_model_config(config.model),
        model=config.model,
        tp=args.tp,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        fp8_block=config.fp8_block,
        int8_rotate=config.int8_rotate,
        slots=config.max_batch_size,
        context=config.max_context,
        max_batch_tokens=config.max_batch_tokens,
        budget_bytes=None if args.hbm_gib is None else int(args.hbm_gib * _GIB),
    )
    check_fits(plan)
    if args.output == "json":
        print(json.dumps(dataclasses.asdict(plan)))
    else:
        _print_table(plan)
    return 0


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    # A comparison with NaN is false, so NaN is refused here too.
    if not 0 < value < 2**20:
        raise argparse.ArgumentTypeError(f"{text!r}: accepted is a number of GiB above 0")
    return value


def _print_table(plan: "MemoryPlan") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{plan.model}, {plan.dtype}, rank of {plan.tp}", title_justify="left")
    table.add_column("one rank")
    table.add_column("bytes", justify="right")
    table.add_column("GiB", justify="right")
    for label, size_bytes in (
        ("weights", plan.weights_bytes),
        (f"KV a token ({plan.kv_layers} layers)", plan.kv_bytes_per_token),
        (f"KV a slot of {plan.context:,} tokens", plan.kv_bytes_per_slot),
        (f"KV of {plan.slots} slots", plan.kv_bytes_total),
        ("state a slot", plan.state_bytes_per_slot),
        ("workspace (estimate)", plan.workspace_bytes),
        ("total", plan.total_bytes),
        ("budget", plan.budget_bytes),
        ("left", plan.left_bytes),
    ):
        if size_bytes is not None:
            table.add_row(label, f"{size_bytes:,}", f"{size_bytes / _GIB:.3f}")
    console = Console()
    console.print(table)
    if plan.max_slots_that_fit is not None:
        console.print(
            f"fits: {plan.max_slots_that_fit} slots of {plan.context:,} tokens, "
            f"or {plan.slots} of {plan.max_context_that_fits:,}"
        )
