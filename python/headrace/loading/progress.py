"""Progress bar of loading: one tick for each tensor that a model asks for."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from headrace.backends.base import Weight
from headrace.models.tensors import TensorSource


class LoadProgress:
    """A `TensorSource` that passes on another one and shows on standard error how far it is.

    With `enabled` false it prints nothing.
    """

    def __init__(self, source: TensorSource, name: str, total: int, *, enabled: bool) -> None:
        self._source = source
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tensors"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not enabled,
        )
        self._task = self._bar.add_task(f"load {name}", total=total)

    def __enter__(self) -> TensorSource:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def get(self, name: str) -> Weight:
        """Return one tensor of the source."""
        weight = self._source.get(name)
        self._bar.advance(self._task)
        return weight
