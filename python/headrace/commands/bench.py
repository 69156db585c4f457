"""`headrace bench ...`: measures, and prints with the environment beside it."""

import argparse
from typing import TYPE_CHECKING

from headrace.commands.options import (
    Once,
    add_count_option,
    add_engine_options,
    add_output_option,
    engine_config,
    integer_list,
    number_list,
    positive_number,
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
    _add_kv(benches)
    _add_quality(benches)
    _add_loadback(benches)
    _add_stream(benches)


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


def _add_kv(benches: "Commands") -> None:
    parser = benches.add_parser(
        "kv",
        help="bytes, time and error of each KV format",
        description="Encode, append and attend over gaussian vectors.",
    )
    parser.add_argument(
        "--context",
        type=integer_list,
        default="1024,4096",
        action=Once,
        metavar="N,N",
        help="tokens in the cache (default 1024,4096)",
    )
    add_count_option(parser, "--layers", default=1, text="layers counted in the bytes")
    add_count_option(parser, "--kv-heads", default=4, text="KV heads")
    add_count_option(parser, "--group", default=4, text="query heads of a KV head")
    add_count_option(parser, "--head-dim", default=128, text="channels of a head")
    add_count_option(parser, "--repeat", default=5, text="measured runs")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        action=Once,
        help="cpu: the torch reference; cuda: the kernels (default cpu)",
    )
    add_output_option(parser)
    parser.set_defaults(run=run_kv)


def _add_quality(benches: "Commands") -> None:
    parser = benches.add_parser(
        "quality",
        help="what each KV format does to the predictions of a model",
        description="Compare next-token distributions on four texts with those of unquantised KV; "
        "a format beyond its gate exits with code 1. The gates are for smollm2 in float32.",
    )
    add_output_option(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run_quality)


def _add_loadback(benches: "Commands") -> None:
    parser = benches.add_parser(
        "loadback",
        help="a prompt cold, cached on the device, in host memory, and streamed from there",
        description="Serve the same prompt from every place its KV can be; pages unless the layout "
        "is set, slots have no cache on the device and do not stream. The default host tier holds "
        "all that is needed.",
    )
    add_count_option(parser, "--prompt", "-npp", default=1024, text="tokens of the prompt")
    add_count_option(parser, "--gen-len", "-ntg", default=16, text="tokens to generate", least=2)
    add_count_option(parser, "--repeat", default=3, text="measured runs")
    add_count_option(parser, "--warmup", default=1, text="runs before them", least=0)
    add_output_option(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run_loadback)


def _add_stream(benches: "Commands") -> None:
    parser = benches.add_parser(
        "stream",
        help="steps of LOW streaming against what their slower half allows",
        description="Drive the copy queue over an imitated link, with a wait for each layer's "
        "compute. A ratio is load over compute of a layer, the larger takes --layer-ms.",
    )
    parser.add_argument(
        "--ratio",
        type=number_list,
        default="0.25,0.5,1,2,4",
        action=Once,
        metavar="X,X",
        help="load over compute (default 0.25,0.5,1,2,4)",
    )
    parser.add_argument(
        "--layer-ms",
        type=positive_number,
        default=4.0,
        action=Once,
        metavar="X",
        help="the slower of load and compute of a layer (default 4)",
    )
    add_count_option(parser, "--layers", default=64, text="layers")
    add_count_option(parser, "--slot-widths", default=2, text="layers of the window")
    add_count_option(parser, "--repeat", default=7, text="measured runs")
    add_count_option(parser, "--warmup", default=1, text="runs before them", least=0)
    add_output_option(parser)
    parser.set_defaults(run=run_stream)


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


def run_kv(args: argparse.Namespace) -> int:
    """Run `bench kv`. Raises `ConfigError` for sizes that no format can store."""
    from headrace.bench.kv import bench_kv
    from headrace.bench.output import emit

    report = bench_kv(
        contexts=args.context,
        layers=args.layers,
        kv_heads=args.kv_heads,
        group=args.group,
        head_dim=args.head_dim,
        repeat=args.repeat,
        device=args.device,
    )
    emit(report, args.output)
    return 0 if report.parity else 1


def run_loadback(args: argparse.Namespace) -> int:
    """Run `bench loadback`. Raises `ConfigError` before anything runs."""
    from headrace.bench.loadback import bench_loadback, room
    from headrace.bench.output import Ticker, emit

    # A host tier of one byte stands for one that will be large enough, until its size is known.
    asked = engine_config(args, kv_layout="paged", host_bytes=1)
    options = room(asked, args.prompt, args.gen_len)
    with Ticker("bench loadback") as ticker:
        report = bench_loadback(
            engine_config(args, kv_layout="paged", **options),
            prompt_len=args.prompt,
            gen_len=args.gen_len,
            repeat=args.repeat,
            warmup=args.warmup,
            on_run=ticker.tick,
        )
    emit(report, args.output)
    return 0 if report.parity else 1


def run_stream(args: argparse.Namespace) -> int:
    """Run `bench stream`; 1 if a layer read other bytes than its own. Raises `ConfigError`."""
    from headrace.bench.output import Ticker, emit
    from headrace.bench.stream import bench_stream

    with Ticker("bench stream") as ticker:
        report = bench_stream(
            args.ratio,
            layers=args.layers,
            width=args.slot_widths,
            layer_ms=args.layer_ms,
            repeat=args.repeat,
            warmup=args.warmup,
            on_run=ticker.tick,
        )
    emit(report, args.output)
    return 0 if report.parity else 1


def run_quality(args: argparse.Namespace) -> int:
    """Run `bench quality`; 1 if a format does not meet its gate. Raises `ConfigError`."""
    from headrace.bench.output import emit
    from headrace.bench.quality import TEXT_TOKENS, bench_quality
    from headrace.engine import Engine

    with Engine(engine_config(args, max_context=TEXT_TOKENS)) as engine:
        report = bench_quality(engine)
    emit(report, args.output)
    return 0 if all(row["meets_gate"] for row in report.rows) else 1
