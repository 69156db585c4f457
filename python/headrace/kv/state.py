"""State of linear-attention layers: one slot holds what a request carries from token to token.

Owns the two pool tensors. Who holds which slot is the scheduler's business. Memory is not
initialised, and a freed slot keeps what the last tenant left: a request that starts at position 0
starts from zeros by flag, not by trust. State cannot be rolled back, so going back to a position
needs a snapshot of it. No locks: one step at a time, and snapshots are taken between steps.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import torch

from headrace.errors import ConfigError, OutOfPages
from headrace.kv.memory import available_bytes
from headrace.models.config import ModelConfig
from headrace.models.hybrid_config import CONV_WIDTH, DELTA_CHUNK


class SnapshotPoint(Enum):
    """How the state of a snapshot was reached, which says what may follow it."""

    CHUNK_EDGE = "chunk_edge"
    """By prefill alone, to a multiple of 64: prefill goes on from here as if never interrupted."""
    PROMPT_END = "prompt_end"
    """By prefill alone, to the end of a prompt: decode steps of that prompt follow."""
    DECODE = "decode"
    """By decode steps: more decode steps of the same request follow, and nothing else."""


@dataclass(frozen=True, slots=True, eq=False)
class StateSnapshot:
    """A copy of the state of one slot after `position` tokens.

    owner: id of the request or cache entry it belongs to. recurrent: fp32
    `[linear layers, Hv, dv, dk]`; conv: `[linear layers, channels, 3]`.
    """

    position: int
    point: SnapshotPoint
    owner: int
    recurrent: torch.Tensor
    conv: torch.Tensor

    @property
    def size_bytes(self) -> int:
        """Bytes of both tensors."""
        return self.recurrent.nbytes + self.conv.nbytes


class StatePool:
    """Pools of both kinds of state, one slot a request.

    recurrent: fp32 `[linear layers, rows, Hv, dv, dk]`; conv: `[linear layers, rows, channels, 3]`
    in the dtype of the model, the last three inputs of the convolution, oldest first. There are
    `rows = slots + staging`: the last ones belong to no request and hold what is on its way to or
    from host memory.

    Raises
    ------
    ConfigError
        The model has no linear layers, `slots` is not positive, `staging` is negative, or the pools
        do not fit in the memory that is free now. Nothing has been allocated then.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        dtype: torch.dtype,
        staging: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        linear = config.linear
        if linear is None:
            raise ConfigError(f"{config.architecture} has no linear layers and needs no state")
        if slots <= 0:
            raise ConfigError(f"slots must be positive, got {slots}")
        if staging < 0:
            raise ConfigError(f"staging must not be negative, got {staging}")
        self.slots = slots
        self.staging = staging
        self.rows = slots + staging
        self.device = torch.device(device)
        self.bytes_per_slot = config.state_bytes_per_slot(dtype.itemsize)
        self.bytes_total = self.rows * self.bytes_per_slot
        available = available_bytes(self.device)
        if self.bytes_total > available:
            raise ConfigError(
                f"state pools need {self.bytes_total:,} bytes ({slots} slots and {staging} "
                f"staging slots x {self.bytes_per_slot:,}), {available:,} are free on "
                f"{self.device}; lower max_batch_size"
            )
        layers = config.linear_layers
        matrices = (linear.value_heads, linear.value_head_dim, linear.key_head_dim)
        self.recurrent = torch.empty(
            (layers, self.rows, *matrices), dtype=torch.float32, device=self.device
        )
        self.conv = torch.empty(
            (layers, self.rows, linear.channels, CONV_WIDTH - 1), dtype=dtype, device=self.device
        )
        # Copies iterate over this, so that none can be forgotten.
        self.tensors: Mapping[str, torch.Tensor] = MappingProxyType(
            {"recurrent": self.recurrent, "conv": self.conv}
        )

    def copy_slot(self, src: int, dst: int) -> None:
        """Copy all of the state of one slot to another; either may be a staging slot.

        Raises
        ------
        ValueError
            No such slot; nothing was written.
        """
        self._check_slot(src)
        self._check_slot(dst)
        for tensor in self.tensors.values():
            tensor[:, dst] = tensor[:, src]

    def snapshot(
        self, slot: int, position: int, *, owner: int, point: SnapshotPoint
    ) -> StateSnapshot:
        """Copy the state of a slot that has seen exactly `position` tokens.

        Raises
        ------
        ValueError
            No such slot, or a chunk edge that is not a multiple of 64.
        """
        self._check_slot(slot)
        if position <= 0 or (point is SnapshotPoint.CHUNK_EDGE and position % DELTA_CHUNK):
            raise ValueError(
                f"position {position} cannot be a {point.value}: accepted is a positive "
                f"{'multiple of ' + str(DELTA_CHUNK) if position > 0 else 'number'}"
            )
        return StateSnapshot(
            position, point, owner, self.recurrent[:, slot].clone(), self.conv[:, slot].clone()
        )

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        """Copy a snapshot into a slot; its request goes on at `snapshot.position`.

        Raises
        ------
        ValueError
            No such slot, or a snapshot of another model or dtype; nothing was written.
        """
        self._check_slot(slot)
        pairs = ((self.recurrent[:, slot], snapshot.recurrent), (self.conv[:, slot], snapshot.conv))
        for own, saved in pairs:
            if own.shape != saved.shape or own.dtype != saved.dtype:
                raise ValueError(
                    f"snapshot is {saved.dtype} {list(saved.shape)}, this pool holds {own.dtype} "
                    f"{list(own.shape)}"
                )
        for own, saved in pairs:
            own.copy_(saved)

    def fill_poison(self) -> None:
        """Fill both pools with NaN, to find reads of a state that nobody wrote."""
        for tensor in self.tensors.values():
            tensor.fill_(float("nan"))

    def _check_slot(self, slot: int) -> None:
        # Python would take -1 for the last slot, which may be another request's.
        if not 0 <= slot < self.rows:
            raise ValueError(f"slot {slot} is not one of the {self.rows} slots of this pool")


class SnapshotStore:
    """Snapshots within a budget, each with an owner who alone may drop it.

    Raises
    ------
    ConfigError
        The budget is negative.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ConfigError(f"budget_bytes must not be negative, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._snapshots: dict[int, StateSnapshot] = {}
        self._ids = itertools.count()

    def __len__(self) -> int:
        return len(self._snapshots)

    def take(
        self, pool: StatePool, slot: int, position: int, *, owner: int, point: SnapshotPoint
    ) -> int:
        """Snapshot a slot and keep it; returns its id. Raises as `StatePool.snapshot`.

        Raises
        ------
        OutOfPages
            It does not fit in the budget; nothing was copied.
        """
        free = self.budget_bytes - self.used_bytes
        if pool.bytes_per_slot > free:
            raise OutOfPages(
                f"a state snapshot needs {pool.bytes_per_slot:,} bytes, {free:,} of "
                f"{self.budget_bytes:,} are free in {len(self._snapshots)} snapshots; drop some or "
                f"raise the budget"
            )
        snapshot = pool.snapshot(slot, position, owner=owner, point=point)
        snapshot_id = next(self._ids)
        self._snapshots[snapshot_id] = snapshot
        self.used_bytes += snapshot.size_bytes
        return snapshot_id

    def get(self, snapshot_id: int) -> StateSnapshot:
        """Return a kept snapshot; `KeyError` if it was dropped."""
        return self._snapshots[snapshot_id]

    def drop(self, snapshot_id: int, *, owner: int) -> None:
        """Forget a snapshot and give its bytes back.

        Raises
        ------
        KeyError
            It was dropped before.
        ValueError
            It belongs to somebody else; it stays.
        """
        snapshot = self._snapshots[snapshot_id]
        if snapshot.owner != owner:
            raise ValueError(f"snapshot {snapshot_id} belongs to {snapshot.owner}, not to {owner}")
        del self._snapshots[snapshot_id]
        self.used_bytes -= snapshot.size_bytes

    def drop_owner(self, owner: int) -> int:
        """Drop all snapshots of one owner; returns how many there were."""
        owned = [key for key, snapshot in self._snapshots.items() if snapshot.owner == owner]
        for snapshot_id in owned:
            self.drop(snapshot_id, owner=owner)
        return len(owned)
