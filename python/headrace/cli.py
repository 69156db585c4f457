"""The `headrace` command: parses arguments and turns errors into one line and an exit code.

Exit codes: 0 done; 1 a request failed, or a benchmark computed wrong tokens; 2 bad arguments, or
something that cannot be served; 130 Ctrl-C. Nothing heavy is imported before a command runs, so
that `--help` is immediate.
"""

import os
import sys
from collections.abc import Sequence

from headrace.commands import bench, generate, plan, pull
from headrace.commands.options import Parser
from headrace.errors import HeadraceError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
EXIT_PIPE_CLOSED = 141  # 128 + SIGPIPE


def make_parser() -> Parser:
    """Return the parser of all commands; each sets `run`, which returns the exit code."""
    parser = Parser(
        prog="headrace",
        description="Batched LLM inference: a Rust scheduler, torch forward passes.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    for command in (generate, pull, plan, bench):
        command.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` stands in for the process arguments."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        if args.version:
            from headrace import __version__

            print(f"headrace {__version__}")
            return 0
        if args.run is None:
            parser.error("no command given")
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except HeadraceError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left, as `head` does. The interpreter flushes once more at exit,
        # which would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED


if __name__ == "__main__":
    sys.exit(main())
