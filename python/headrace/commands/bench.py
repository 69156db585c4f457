"""`headrace bench batch | latency | alloc`: measures and prints with the environment beside it."""

import argparse
from typing import TYPE_CHECKING

from headrace.commands.options import (
    Once,
    add_count_option,
    add_engine_options,
    add_output_option,
    engine_config,
    integer_list,
)

if TYPE_CHECKING:
    from headrace.commands.options import Commands


def add(commands: "Commands") -> None:
    """Declare the command and its benchmarks."""
    parser = commands.add_parser(
        "bench", help="measure speed", description="Measure speed; wrong tokens exit with code 1."
    )
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    _add_batch(benches)
    _add_latency(benches)
    _add_alloc(benches)


def _add_batch(benches: "Commands") -> None:
    parser = benches.add_parser(
        "batch",
        help="prefill and decode rates at several batch sizes",
        description="Run every combination of the lists: b random prompts of pp tokens, tg greedy "
        "tokens each. Tokens are compared with those of every request alone.",
    )
    for flags, default, text in (
        (("--prompt-len", "-npp"), "128", "tokens of a prompt"),
        (("--gen-len", "-ntg"), "64", "tokens to generate"),
        (("--batch", "-npl"), "1,2,4,8", "requests at once"),
    ):
        parser.add_argument(
            *flags,
            type=integer_list,
            default=default,
            action=Once,
            metavar="N,N",
            help=f"{text} (default {default})",
        )
    add_count_option(parser, "--repeat", default=3, text="measured runs")
    add_count_option(parser, "--warmup", default=1, text="runs before them", least=0)
    add_output_option(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run_batch)


def _add_latency(benches: "Commands") -> None:
    parser = benches.add_parser(
        "latency",
        help="a lone request: what room for a batch costs it",
        description="One request alone on an engine with max_batch_size 1 and on one with "
        "--max-batch-size (8), in turns.",
    )
    add_count_option(parser, "--prompt-len", "-npp", default=128, text="tokens of the prompt")
    add_count_option(parser, "--gen-len", "-ntg", default=64, text="tokens to generate", least=16)
    add_count_option(parser, "--repeat", default=5, text="measured runs of each engine")
    add_count_option(parser, "--warmup", default=1, text="runs before them", least=0)
    add_output_option(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run_latency)


def _add_alloc(benches: "Commands") -> None:
    parser = benches.add_parser(
        "alloc",
        help="time of slot and scheduler operations",
        description="Nanoseconds of one operation, inside Rust and called from Python.",
    )
    add_count_option(parser, "--rows", default=256, text="decode rows of a plan")
    add_count_option(parser, "--repeat", default=101, text="measured runs")
    add_output_option(parser)
    parser.set_defaults(run=run_alloc)


def run_batch(args: argparse.Namespace) -> int:
    """Run `bench batch`. Raises `ConfigError` before anything runs."""
    from headrace.bench.batch import bench_batch, make_shapes, room
    from headrace.bench.output import Ticker, emit

    shapes = make_shapes(args.prompt_len, args.gen_len, args.batch)
    config = engine_config(args, **room(shapes))
    with Ticker("bench batch") as ticker:
        report = bench_batch(
            config, shapes, repeat=args.repeat, warmup=args.warmup, on_run=ticker.tick
        )
    emit(report, args.output)
    return 0 if report.parity else 1


def run_latency(args: argparse.Namespace) -> int:
    """Run `bench latency`. Raises `ConfigError` before anything runs."""
    from headrace.bench.latency import bench_latency, room
    from headrace.bench.output import Ticker, emit

    config = engine_config(args, **room(args.prompt_len, args.gen_len))
    with Ticker("bench latency") as ticker:
        report = bench_latency(
            config,
            prompt_len=args.prompt_len,
            gen_len=args.gen_len,
            repeat=args.repeat,
            warmup=args.warmup,
            on_run=ticker.tick,
        )
    emit(report, args.output)
    return 0 if report.parity else 1


def run_alloc(args: argparse.Namespace) -> int:
    """Run `bench alloc`."""
    from headrace.bench.alloc import bench_alloc
    from headrace.bench.output import emit

    emit(bench_alloc(rows=args.rows, repeat=args.repeat), args.output)
    return 0
