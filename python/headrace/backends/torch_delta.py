"""The linear layers in readable torch: short convolution and gated delta rule.

Everything is computed in the dtype of the state, fp32 in a model. A state is `[Hv, dv, dk]`, key
axis last. Shapes of all matrix products are fixed, so bits depend on nothing but a row's own
request. Source of the chunked form: Gated Delta Networks (arXiv 2412.06464), section 3.3.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.models.hybrid_config import DELTA_CHUNK

# Added to the sum of squares under the root of the L2 norm of q and k; part of the model.
_L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """Inputs of n tokens: q, k `[n, Hk, dk]`, v `[n, Hv, dv]`, g, beta `[n, Hv]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def rows(self, first: int, last: int) -> "DeltaInputs":
        """Tokens first..last-1."""
        return DeltaInputs(
            self.q[first:last],
            self.k[first:last],
            self.v[first:last],
            self.g[first:last],
            self.beta[first:last],
        )

    def padded(self, length: int) -> "DeltaInputs":
        """Add tokens that leave a state as it is: no decay and no write."""
        missing = length - self.q.shape[0]
        if not missing:
            return self
        matrices = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (self.q, self.k, self.v))
        return DeltaInputs(*matrices, *(F.pad(x, (0, 0, 0, missing)) for x in (self.g, self.beta)))

    def prepared(self, dtype: torch.dtype) -> "DeltaInputs":
        """Cast to `dtype`, normalise q and k, scale q, give every value head its q and k."""
        group = self.v.shape[1] // self.k.shape[1]
        q = _normalised(self.q.to(dtype)) * self.q.shape[-1] ** -0.5
        k = _normalised(self.k.to(dtype))
        return DeltaInputs(
            q.repeat_interleave(group, dim=1),
            k.repeat_interleave(group, dim=1),
            self.v.to(dtype),
            self.g.to(dtype),
            self.beta.to(dtype),
        )


def conv_window(history: torch.Tensor, x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Convolve `x [..., n, channels]` behind its `history [..., 3, channels]`.

    Computed in the dtype of `taps [channels, 4]`. The four products are added in a fixed order, so
    a token has the same bits in any run.
    """
    count, width = x.shape[-2], taps.shape[1]
    inputs = torch.cat((history, x), dim=-2).to(taps.dtype)
    total = inputs[..., :count, :] * taps[:, 0]
    for tap in range(1, width):
        total = total + inputs[..., tap : tap + count, :] * taps[:, tap]
    return total


def delta_chunks(
    inputs: DeltaInputs, state: torch.Tensor, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run n tokens at positions start.. in blocks: outputs `[n, Hv, dv]` and the state after them.

    The first block ends at the next multiple of 64 and the last one where the tokens end.
    """
    count = inputs.q.shape[0]
    outputs, first = [], 0
    while first < count:
        last = min(count, first + DELTA_CHUNK - (start + first) % DELTA_CHUNK)
        block = inputs.rows(first, last).padded(DELTA_CHUNK).prepared(state.dtype)
        output, state = _delta_chunk(block, state)
        outputs.append(output[: last - first])
        first = last
    return torch.cat(outputs), state


def delta_step(inputs: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one token for each of B rows: `state [B, Hv, dv, dk]` -> output `[B, Hv, dv]`, state."""
    token = inputs.prepared(state.dtype)
    state = state * token.g.exp()[..., None, None]
    known = (state @ token.k.unsqueeze(-1)).squeeze(-1)  # [B, Hv, dv]
    written = token.beta.unsqueeze(-1) * (token.v - known)
    state = state + written.unsqueeze(-1) * token.k.unsqueeze(-2)
    return (state @ token.q.unsqueeze(-1)).squeeze(-1), state


def _delta_chunk(block: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One block of C tokens: output `[C, Hv, dv]` and the state after it.

    Writing S for the state, c for the running sum of g and M_ij = exp(c_i - c_j) for i >= j, what
    each token adds to the state solves a unit lower triangular system whose right side needs S in
    one product only; the rest is three products more.
    """
    q, k, v = (x.transpose(0, 1) for x in (block.q, block.k, block.v))  # [Hv, C, d]
    beta = block.beta.T.unsqueeze(-1)  # [Hv, C, 1]
    c = block.g.T.cumsum(-1)  # [Hv, C]
    above = torch.ones(c.shape[1], c.shape[1], dtype=torch.bool, device=c.device).triu(1)
    # Masked before the exponential, where a positive exponent could overflow.
    M = (c.unsqueeze(-1) - c.unsqueeze(-2)).masked_fill(above, -torch.inf).exp()
    decay = c.exp().unsqueeze(-1)  # [Hv, C, 1]
    system = (k @ k.mT) * beta * M  # only its part below the diagonal is read
    right = torch.cat((v, k * decay), dim=-1) * beta
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    U, W = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
    R = U - W @ state.mT  # [Hv, C, dv]
    output = (q * decay) @ state.mT + ((q @ k.mT) * M) @ R
    rest = (c[:, -1:] - c).exp().unsqueeze(-1)  # decay from each token to the end of the block
    return output.transpose(0, 1), decay[:, -1:] * state + R.mT @ (k * rest)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)
