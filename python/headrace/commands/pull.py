"""`headrace pull`: fetch a model once and print the folder it is in."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.commands.options import DEFAULT_MODEL, Once
from headrace.config import EngineConfig

if TYPE_CHECKING:
    from headrace.commands.options import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "pull",
        help="fetch a model and print its folder",
        description="Fetch a model unless it is in the cache, and print its folder.",
    )
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="default: %(default)s")
    parser.add_argument(
        "--cache-dir", action=Once, metavar="FOLDER", help="where models are kept [HEADRACE_CACHE]"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fetch and print the folder. Raises `ModelError`."""
    from headrace.loading.pull import pull

    given = {} if args.cache_dir is None else {"cache_dir": args.cache_dir}
    cache_dir = EngineConfig.from_env(model=args.model, **given).cache_dir
    print(pull(args.model, None if cache_dir is None else Path(cache_dir)))
    return 0
