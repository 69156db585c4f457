"""Results on standard output in five formats, progress on standard error.

In every format a row can be traced to its environment: json has it once, jsonl and csv in every
row, table and md above the rows (BEN-07).
"""

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from headrace.bench.env import Value

_WIDE = 240  # columns, where the output is no terminal and a table must not be cut


@dataclass(frozen=True, slots=True)
class Report:
    """Environment and rows of one benchmark; all rows have the same keys.

    columns: the keys that a table has room for.
    """

    env: dict[str, Value]
    rows: Sequence[dict[str, Value]]
    columns: Sequence[str]

    @property
    def parity(self) -> bool:
        """Whether no row has wrong tokens."""
        return all(row.get("parity") is not False for row in self.rows)


def emit(report: Report, output_format: str, stream: TextIO | None = None) -> None:
    """Write a report as table, json, jsonl, csv or md; to standard output unless told."""
    stream = stream or sys.stdout
    {"table": _table, "json": _json, "jsonl": _jsonl, "csv": _csv, "md": _md}[output_format](
        report, stream
    )


def _json(report: Report, stream: TextIO) -> None:
    print(json.dumps({"env": report.env, "rows": list(report.rows)}), file=stream)


def _jsonl(report: Report, stream: TextIO) -> None:
    for row in report.rows:
        print(json.dumps({"env": report.env, **row}), file=stream)


def _csv(report: Report, stream: TextIO) -> None:
    env = {f"env_{name}": value for name, value in report.env.items()}
    writer = csv.DictWriter(stream, [*report.rows[0], *env], lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, **env} for row in report.rows)


def _md(report: Report, stream: TextIO) -> None:
    for name, value in report.env.items():
        print(f"- {name}: {_shown(value)}", file=stream)
    print(file=stream)
    names = list(report.rows[0])
    for cells in (names, ["---"] * len(names)):
        print(f"| {' | '.join(cells)} |", file=stream)
    for row in report.rows:
        cells = [_shown(row[name]).replace("|", r"\|") for name in names]
        print(f"| {' | '.join(cells)} |", file=stream)


def _table(report: Report, stream: TextIO) -> None:
    console = Console(file=stream, width=None if stream.isatty() else _WIDE, highlight=False)
    env = ", ".join(f"{name} {_shown(value)}" for name, value in report.env.items())
    console.print(env, markup=False)
    table = Table()
    for name in report.columns:
        table.add_column(name, justify="right")
    for row in report.rows:
        table.add_row(*(_shown(row[name]) for name in report.columns))
    console.print(table)
    for row in report.rows:
        if row.get("reason") is not None:
            console.print(f"not valid: {row['reason']}", markup=False)


def _shown(value: Value) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


class Ticker:
    """Counts runs on standard error; silent unless that is a terminal."""

    def __init__(self, label: str) -> None:
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(label, total=None)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def tick(self, total: int) -> None:
        """Count one run of `total`."""
        if self._bar is not None:
            self._bar.update(self._task, advance=1, total=total)
