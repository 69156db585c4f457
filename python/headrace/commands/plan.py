"""`headrace plan`: what a model needs in memory and what fits, without loading it."""

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from headrace.commands.options import (
    DEFAULT_MODEL,
    Once,
    add_count_option,
    add_output_option,
    integer,
    positive_number,
)
from headrace.config import KV_LAYOUTS, EngineConfig

if TYPE_CHECKING:
    from headrace.commands.options import Commands
    from headrace.plan import MemoryPlan

_GIB = 2**30
_GB = 1e9
_WIDE = 100


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "plan",
        help="what fits in memory",
        description="Bytes of weights, KV, states and steps of one rank; no weights are read.",
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
    parser.add_argument(
        "--kv-layout",
        choices=KV_LAYOUTS,
        default=_default("kv_layout"),
        action=Once,
        help="default %(default)s",
    )
    for name, text in (
        ("page-size", "tokens of a page"),
        ("num-pages", "pages on the device, paged only (default: what the slots would take)"),
        ("slot-widths", "layers of a LOW page, paged only"),
        ("host-bytes", "bytes of host memory of one rank"),
        ("snapshot-interval", "tokens between saved states of a hybrid model"),
    ):
        default = _default(name.replace("-", "_"))
        parser.add_argument(
            f"--{name}",
            type=integer(0 if name == "host-bytes" else 1),
            default=default,
            action=Once,
            metavar="N",
            help=text if default is None else f"{text} (default {default})",
        )
    parser.add_argument(
        "--link-gbps",
        type=positive_number,
        default=55.0,
        action=Once,
        metavar="G",
        help="10^9 bytes a second between host and device (default %(default)g)",
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
        kv_layout=args.kv_layout,
        page_size=args.page_size,
        num_pages=args.num_pages,
        slot_widths=args.slot_widths,
        host_bytes=args.host_bytes,
        snapshot_interval=args.snapshot_interval,
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
        kv_layout=config.kv_layout,
        page_size=config.page_size,
        num_pages=config.num_pages,
        slot_widths=config.slot_widths,
        host_bytes=config.host_bytes,
        snapshot_interval=config.snapshot_interval,
        link_bytes_per_s=args.link_gbps * _GB,
    )
    check_fits(plan)
    if args.output == "json":
        print(json.dumps(dataclasses.asdict(plan)))
    else:
        _print_table(plan)
    return 0


def _default(name: str) -> Any:  # noqa: ANN401 - of any option
    return EngineConfig.__dataclass_fields__[name].default


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
    host = plan.host
    for label, size_bytes in (
        ("weights", plan.weights_bytes),
        (f"KV a token ({plan.kv_layers} layers)", plan.kv_bytes_per_token),
        (f"KV a slot of {plan.context:,} tokens", plan.kv_bytes_per_slot),
        *_page_rows(plan),
        ("state a slot", plan.state_bytes_per_slot),
        ("states of slots and copies", plan.state_bytes_total),
        ("workspace (estimate)", plan.workspace_bytes),
        ("GPU scratch, allowance", plan.gpu_step_bytes),
        ("total", plan.total_bytes),
        ("budget", plan.budget_bytes),
        ("left", plan.left_bytes),
        ("host tier", None if host is None else host.used_bytes),
    ):
        if size_bytes is not None:
            table.add_row(label, f"{size_bytes:,}", f"{size_bytes / _GIB:.3f}")
    # Wide enough for its lines when the output is no terminal.
    console = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    console.print(table)
    fits = []
    if plan.max_slots_that_fit is not None:
        fits.append(f"{plan.max_slots_that_fit} slots of {plan.context:,} tokens")
        fits.append(f"{plan.slots} of {plan.max_context_that_fits:,}")
    if plan.max_pages_that_fit is not None:
        fits.append(f"{plan.max_pages_that_fit:,} pages")
    if fits:
        console.print(f"fits: {', or '.join(fits)}")
    for line in _notes(plan):
        console.print(line)


def _page_rows(plan: "MemoryPlan") -> list[tuple[str, int]]:
    pages = plan.pages
    if pages is None:
        return [(f"KV of {plan.slots} slots", plan.kv_bytes_total)]
    return [
        (f"HIGH page, {pages.page_tokens} tokens", pages.raw_page_bytes),
        (f"LOW page, {pages.width} layers of it", pages.low_page_bytes),
        (f"KV of {pages.pages:,} pages", plan.kv_bytes_total),
    ]


def _notes(plan: "MemoryPlan") -> list[str]:
    """Lines below the table: pages, host tier, and what streaming costs."""
    lines = []
    pages, host, stream = plan.pages, plan.host, plan.stream
    if pages is not None:
        lines.append(
            f"pages: {pages.pages * pages.page_tokens:,} tokens as HIGH pages; a raw page holds "
            f"sigma = {pages.low_pages_per_raw_page} LOW pages, which is the window of "
            f"{pages.low_tokens_per_raw_page:,} streamed tokens"
        )
    if host is not None:
        states = (
            f", {host.snapshots:,} states of {host.snapshot_bytes:,} bytes, one every "
            f"{host.snapshot_interval:,} tokens"
            if host.snapshots
            else ""
        )
        lines.append(f"host tier: {host.pages:,} pages, {host.tokens:,} tokens{states}")
    if stream is not None:
        lines.append(
            f"LOW streaming at {stream.link_bytes_per_s / _GB:g} GB/s: "
            f"{stream.bytes_per_token_step:,} bytes per LOW token and step; a request of "
            f"{stream.context:,} tokens takes {stream.step_ms:,.1f} ms a step, so all LOW requests "
            f"of that size together generate at most {stream.tokens_per_s_cap:,.1f} tokens/s; "
            f"{stream.tokens_per_ms:,.0f} LOW tokens stream in a millisecond"
        )
    return lines
