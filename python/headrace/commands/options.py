"""Arguments that several commands share, and a parser that is strict about them.

A flag for every field of `EngineConfig` is made from `option_table`, so a new option gets its flag
by being declared. A flag wins over the variable of the same option.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, get_type_hints

from headrace.config import EngineConfig, OptionRow, option_table

if TYPE_CHECKING:
    Commands: TypeAlias = "argparse._SubParsersAction[Parser]"

DEFAULT_MODEL = "smollm2"
FORMATS = ("table", "json", "jsonl", "csv", "md")

_ENGINE_PREFIX = "engine_"
_GIVEN = "given_flags"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and which takes no shortened flags.

    A shortened flag would change its meaning on the day a longer one is added.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - argparse passes its own on
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print one line to standard error and exit with code 2."""
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


class Once(argparse.Action):
    """Stores a value; the same flag again with another value is an error, not the last one wins."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Store the value, or end with an error."""
        flag = option_string or self.dest
        value = self.value_of(flag, values)
        given = vars(namespace).setdefault(_GIVEN, {})
        before = given.get(self.dest)
        if before is None:
            given[self.dest] = (flag, value)
        elif before[1] != value:
            parser.error(f"{before[0]} and {flag} contradict each other; give one of them")
        setattr(namespace, self.dest, value)

    def value_of(self, flag: str, values: object) -> object:
        """Value a flag stands for."""
        return values


class _Switch(Once):
    """`--name` and `--no-name`."""

    def value_of(self, flag: str, values: object) -> object:
        return not flag.startswith("--no-")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every engine option."""
    group = parser.add_argument_group(
        "engine options", "each can also be set by its variable; a flag wins over a variable"
    )
    kinds = get_type_hints(EngineConfig)
    for row in option_table():
        _add_engine_option(group, row, kinds[row.name])


def engine_config(args: argparse.Namespace, **defaults: object) -> EngineConfig:
    """Build the options from flags, then variables, then `defaults`. Raises `ConfigError`."""
    flags: dict[str, object] = {
        name.removeprefix(_ENGINE_PREFIX): value
        for name, value in vars(args).items()
        if name.startswith(_ENGINE_PREFIX)
    }
    return EngineConfig.from_options(flags, defaults={"model": DEFAULT_MODEL, **defaults})


def add_output_option(
    parser: argparse.ArgumentParser, formats: Sequence[str] = FORMATS, default: str = "table"
) -> None:
    """Add `-o`, the format of standard output."""
    parser.add_argument(
        "-o",
        "--output",
        choices=formats,
        default=default,
        action=Once,
        help=f"format of standard output (default {default})",
    )


def add_count_option(
    parser: argparse.ArgumentParser, *flags: str, default: int, text: str, least: int = 1
) -> None:
    """Add an option that takes one integer."""
    parser.add_argument(
        *flags,
        type=integer(least),
        default=default,
        action=Once,
        metavar="N",
        help=f"{text} (default {default})",
    )


def integer(least: int) -> Callable[[str], int]:
    """Return a parser of integers that refuses those below `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r}: accepted is an integer from {least}")
        return value

    return parse


def integer_list(text: str) -> list[int]:
    """Parse `1,2,4`: positive integers, each once, in the order given."""
    return list(dict.fromkeys(integer(1)(part) for part in text.split(",")))


def number_list(text: str) -> list[float]:
    """Parse `0.5,1,2`: positive numbers, each once, in the order given."""
    return list(dict.fromkeys(positive_number(part) for part in text.split(",")))


def positive_number(text: str) -> float:
    """Parse a finite number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    # A comparison with NaN is false, so NaN is refused here too.
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: accepted is a number above 0")
    return value


def _add_engine_option(
    group: "argparse._ArgumentGroup",
    row: OptionRow,
    kind: Any,  # noqa: ANN401 - a type or a union of types
) -> None:
    flag = "--" + row.name.replace("_", "-")
    shared: dict[str, Any] = {
        "dest": _ENGINE_PREFIX + row.name,
        # Left out of the namespace unless given, so that a variable can still set it.
        "default": argparse.SUPPRESS,
        "help": f"{row.help} [{row.variables[0]}; {row.default}]".replace("%", "%%"),
    }
    if kind is bool:
        group.add_argument(flag, f"--no-{flag[2:]}", action=_Switch, nargs=0, **shared)
        return
    optional = type(None) in getattr(kind, "__args__", ())
    parse: Callable[[str], object] = str
    if kind is int or int in getattr(kind, "__args__", ()):
        parse = int
    elif kind is float:
        parse = float
    group.add_argument(
        flag,
        action=Once,
        type=_or_none(parse) if optional else parse,
        metavar="TEXT" if parse is str else "N",
        **shared,
    )


def _or_none(parse: Callable[[str], object]) -> Callable[[str], object]:
    def parse_optional(text: str) -> object:
        return None if text.lower() == "none" else parse(text)

    # argparse names the type in its error: "invalid integer or none value: 'x'".
    parse_optional.__name__ = "integer or none" if parse is int else "text"
    return parse_optional
