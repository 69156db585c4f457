"""Block tables: which pages hold the tokens of a row, and where a layer of a page lies in the pool.

Entry i of a row's table addresses its tokens i*P .. i*P+P-1. An entry is a u32: bit 31 is the LOW
flag, the rest the flat base `page + first_layer * pages` of a pool `[L * pages, P, ...]`. A HIGH
page holds all L layers from layer 0 on, a LOW page a window of a few that later layers overwrite. A
fixed slot is a HIGH page of `max_context` tokens, so its table is its number. No state.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

LOW_BIT = 31
BASE_MASK = 2**LOW_BIT - 1

Table: TypeAlias = Sequence[int] | NDArray[np.uint32] | torch.Tensor
_Entries = TypeVar("_Entries", int, NDArray[np.int64])


class Window(NamedTuple):
    """Where the LOW pages of one step hold its layers.

    k0: running number of KV layer 0 of the step among all streamed layers of the engine, int32
    `[1]` on the device where kernels read it. width: physical layers of a LOW page.
    """

    k0: int | torch.Tensor
    width: int

    def layer(self, layer: int) -> int:
        """Physical layer, counted from the first of a LOW page, that holds KV layer `layer`."""
        return (int(self.k0) + layer) % self.width


# Of a step whose tables have no LOW entries: it decides nothing then.
NO_WINDOW = Window(k0=0, width=1)


def flat_pages(entries: _Entries, layer: int, pages: int, window: Window) -> _Entries:
    """Flat pages `physical layer * pages + page` of KV layer `layer` of one entry or an array."""
    high, low = layer * pages, window.layer(layer) * pages
    flats: _Entries = (entries & BASE_MASK) + high + (entries >> LOW_BIT) * (low - high)
    return flats


def entries_of(table: Table, count: int) -> NDArray[np.int64]:
    """First `count` entries of a table, wide enough to calculate with."""
    entries = np.asarray(table[:count], dtype=np.int64)
    assert entries.shape == (count,), "a table covers the tokens of its row"
    return entries
