r"""The fused pass in plain torch, on any device: exact, in time linear in N.

Ranks are taken in chunks. With T the coupled targets and V the sorted tokens (both carrying the squared-norm column),
everything that a chunk needs of itself is one small Gram matrix :math:`G_{rk} = ⟨T_r, v_k⟩` under the chunk's Laplace
kernel; everything outside it acts through decayed sums of rows, one state per side. Ties are handled as in
:mod:`cswe.ops.laplace`.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cswe.ops.kernels.coupled import CoupledTargets
from cswe.ops.kernels.problem import Problem
from cswe.ops.laplace import CHUNK, decay, plain_and_signed_sums

BLOCK_ELEMENTS = 1 << 22
"""Numbers that one temporary may hold: samples are taken in blocks of that size."""


def value_and_slope(problem: Problem, with_slope: bool) -> tuple[Tensor, Tensor]:
    """Give S ``(B, L)`` and its derivative with respect to the sorted projections ``(B, L, N)``."""
    values, slopes = [], []
    for part in _blocks(problem):
        value, slope = _value_and_slope(part, with_slope)
        values.append(value)
        slopes.append(slope)
    return torch.cat(values), torch.cat(slopes)


def targets_gradient(problem: Problem, grad: Tensor) -> Tensor:
    """Give the gradient of ``Σ grad · S`` with respect to the targets, ``(L, M, d)``."""
    result = torch.zeros_like(problem.targets)
    start = 0
    for part in _blocks(problem):
        here = grad[start : start + part.points.shape[0]]
        start += part.points.shape[0]
        coupled = CoupledTargets(part)
        total = coupled.zero_gradient()
        # ∂S/∂T_r = −2 (Q V)_r, and Q V is the kernel sum of the rows over Z.
        scale = -2 * here.unsqueeze(-1) * part.present() / _normaliser(part)
        for rows, sums in _kernel_sums(part, partial(_vectors, part)):
            coupled.add_gradient(total, scale[..., rows].unsqueeze(-1) * sums, rows.start, rows.stop)
        result += coupled.finish_gradient(total)
    return result


def tokens_gradient(problem: Problem, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Give the gradient of ``Σ grad · S`` with respect to the tokens ``(B, N, d)`` and their squares ``(B, N)``."""
    tokens = torch.zeros(problem.tokens.shape, dtype=problem.points.dtype, device=problem.points.device)
    squares = torch.zeros_like(problem.squares)
    start = 0
    for part in _blocks(problem):
        stop = start + part.points.shape[0]
        here, coupled = grad[start:stop], CoupledTargets(part)
        scale = here.unsqueeze(-1) / _normaliser(part)

        def sent(rows: slice, scale: Tensor = scale, coupled: CoupledTargets = coupled) -> Tensor:
            return scale[..., rows].unsqueeze(-1) * coupled.rows(rows.start, rows.stop)

        for rows, sums in _kernel_sums(part, sent):
            _add_at_tokens(tokens[start:stop], part, rows, -2 * sums * part.present()[..., rows].unsqueeze(-1))
        received = plain_and_signed_sums(part.points, (scale * part.rank_mass()).unsqueeze(-1), part.tau)[0]
        everything = slice(0, part.points.shape[2])
        at_tokens = squares[start:stop].unsqueeze(-1)
        _add_at_tokens(at_tokens, part, everything, received * part.present().unsqueeze(-1))
        start = stop
    return tokens, squares


def _blocks(problem: Problem) -> Iterator[Problem]:
    batch, slices, _, _, width = problem.sizes
    size = max(1, BLOCK_ELEMENTS // (slices * CHUNK * (width + 1)))
    for start in range(0, batch, size):
        yield problem.samples(start, min(start + size, batch))


def _chunks(problem: Problem, backwards: bool = False) -> Iterator[slice]:
    count = problem.points.shape[2]
    starts = range(0, count, CHUNK)
    for start in reversed(starts) if backwards else starts:
        yield slice(start, min(start + CHUNK, count))


def _vectors(problem: Problem, rows: slice) -> Tensor:
    """Centred tokens of these ranks, ``(B, L, R, d)``, zero where no token is."""
    samples = torch.arange(problem.tokens.shape[0], device=problem.order.device).reshape(-1, 1, 1)
    vectors = problem.tokens[samples, problem.order[..., rows]].to(problem.points.dtype) - problem.centre
    return vectors if problem.lengths is None else vectors * problem.present()[..., rows].unsqueeze(-1)


def _add_at_tokens(into: Tensor, problem: Problem, rows: slice, values: Tensor) -> None:
    batch, slices, count, width = values.shape
    index = problem.order[..., rows].reshape(batch, slices * count, 1).expand(-1, -1, width)
    into.scatter_add_(1, index, values.reshape(batch, slices * count, width))


def _normaliser(problem: Problem) -> Tensor:
    """Z, the row sums of the kernel, ``(B, L, N)``."""
    ones = problem.present().expand(problem.points.shape).unsqueeze(-1)
    return plain_and_signed_sums(problem.points, ones, problem.tau)[0].squeeze(-1)


class _Side:
    """What lies on one side of a chunk, as the chunk's nearest neighbour there sees it."""

    def __init__(self, like: Tensor, width: int) -> None:
        self.total = like.new_zeros((*like.shape[:2], width))
        self.apart = torch.zeros_like(self.total)  # without what ties with that neighbour


def _value_and_slope(problem: Problem, with_slope: bool) -> tuple[Tensor, Tensor]:
    tau, points = problem.tau, problem.points
    ones = problem.present().expand(points.shape).unsqueeze(-1)
    normaliser, signed_ones = (sums.squeeze(-1) for sums in plain_and_signed_sums(points, ones, tau))
    scale = problem.present() / normaliser  # c_r
    coupled, mass = CoupledTargets(problem), problem.rank_mass()
    samples = torch.arange(problem.tokens.shape[0], device=points.device).reshape(-1, 1, 1)
    width = problem.targets.shape[2] + 1

    summed = torch.empty_like(points)  # t_r: row r's sum before it is normalised
    here_signed = torch.empty_like(points)  # A_r − B_r
    there_signed = torch.empty_like(points)  # E_r − F_r

    def rows_of(rows: slice) -> tuple[Tensor, Tensor]:
        squares = problem.squares[samples, problem.order[..., rows]] * problem.present()[..., rows]
        v = torch.cat([_vectors(problem, rows), squares.unsqueeze(-1)], dim=-1)
        t = coupled.rows(rows.start, rows.stop)
        m = mass[..., rows].expand(max(t.shape[0], mass.shape[0]), t.shape[1], -1).unsqueeze(-1)
        return v, torch.cat([-2 * t.expand(m.shape[0], *t.shape[1:]), m], dim=-1)

    tokens_left, targets_left = _Side(points, width), _Side(points, width)
    edge = points[..., :1]
    for rows in _chunks(problem):
        s, c = points[..., rows], scale[..., rows]
        v, t = rows_of(rows)
        difference = s.unsqueeze(-1) - s.unsqueeze(-2)
        kernel = decay(difference.abs(), tau)
        gram = t @ v.transpose(-1, -2)
        reached, tied = decay(s - edge, tau), s == edge
        from_left = _along(t, tokens_left.total)
        summed[..., rows] = (kernel * gram).sum(-1) + reached * from_left
        if with_slope:
            signed_kernel = kernel * difference.sign()
            apart = torch.where(tied, _along(t, tokens_left.apart), reached * from_left)
            here_signed[..., rows] = (signed_kernel * gram).sum(-1) + apart
            apart = torch.where(tied, _along(v, targets_left.apart), reached * _along(v, targets_left.total))
            # Column k of the transposed Gram matrix carries rank k's own scale c_k.
            there_signed[..., rows] = (signed_kernel * gram.transpose(-1, -2) * c.unsqueeze(-2)).sum(-1) + apart
            _advance(targets_left, c.unsqueeze(-1) * t, s[..., -1:] - s, reached[..., -1:], tied[..., -1:], tau)
        _advance(tokens_left, v, s[..., -1:] - s, reached[..., -1:], tied[..., -1:], tau)
        edge = s[..., -1:]

    tokens_right, targets_right = _Side(points, width), _Side(points, width)
    edge = points[..., -1:]
    for rows in _chunks(problem, backwards=True):
        s, c = points[..., rows], scale[..., rows]
        v, t = rows_of(rows)
        reached, tied = decay(edge - s, tau), s == edge
        from_right = _along(t, tokens_right.total)
        summed[..., rows] += reached * from_right
        if with_slope:
            here_signed[..., rows] -= torch.where(tied, _along(t, tokens_right.apart), reached * from_right)
            there_signed[..., rows] -= torch.where(
                tied, _along(v, targets_right.apart), reached * _along(v, targets_right.total)
            )
            _advance(targets_right, c.unsqueeze(-1) * t, s - s[..., :1], reached[..., :1], tied[..., :1], tau)
        _advance(tokens_right, v, s - s[..., :1], reached[..., :1], tied[..., :1], tau)
        edge = s[..., :1]

    value = (scale * summed).sum(-1)
    if not with_slope:
        return value, points.new_empty((points.shape[0], 0, 0))
    # The normaliser's own derivative: without it the slope is wrong by a factor.
    h = -scale.square() * summed
    signed_h = plain_and_signed_sums(points, h.unsqueeze(-1), tau)[1].squeeze(-1)
    slope = -(scale * here_signed + there_signed + h * signed_ones + signed_h) / tau
    return value, slope * problem.present()


def _along(rows: Tensor, state: Tensor) -> Tensor:
    """Inner products of every row with the one state, ``(B, L, R)``."""
    return (rows @ state.unsqueeze(-1)).squeeze(-1)


def _advance(side: _Side, rows: Tensor, distance: Tensor, reached: Tensor, tied: Tensor, tau: float) -> None:
    """Move a side's state over a chunk, to the chunk's far end. ``distance`` is measured from there."""
    weight = decay(distance, tau).unsqueeze(-2)
    outside = torch.where(tied, side.apart, reached * side.total)
    side.total = reached * side.total + (weight @ rows).squeeze(-2)
    side.apart = outside + (weight.where(distance.unsqueeze(-2) != 0, 0.0) @ rows).squeeze(-2)


def _kernel_sums(problem: Problem, rows_of: Callable[[slice], Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Give ``(K w)_r`` chunk by chunk, for rows w that are made when they are needed.

    The states right of every chunk are found first and kept, one row per chunk, so that each chunk's sums are complete
    when they are given out and none of size B×L×N×d is stored.
    """
    tau, points = problem.tau, problem.points
    right: list[Tensor | None] = []
    state: Tensor | None = None
    for rows in _chunks(problem, backwards=True):
        s, w = points[..., rows], rows_of(rows)
        right.append(state)
        inside = (decay(s - s[..., :1], tau).unsqueeze(-2) @ w).squeeze(-2)
        if state is not None:
            next_point = points[..., rows.stop : rows.stop + 1]
            inside = inside + decay(next_point - s[..., :1], tau) * state
        state = inside
    left: Tensor | None = None
    for rows in _chunks(problem):
        s, w = points[..., rows], rows_of(rows)
        kernel = decay((s.unsqueeze(-1) - s.unsqueeze(-2)).abs(), tau)
        sums = kernel @ w
        if left is not None:
            gap = s - points[..., rows.start - 1 : rows.start]
            sums = sums + decay(gap, tau).unsqueeze(-1) * left.unsqueeze(-2)
        left = sums[..., -1, :]
        beyond = right.pop()
        if beyond is not None:
            gap = points[..., rows.stop : rows.stop + 1] - s
            sums = sums + decay(gap, tau).unsqueeze(-1) * beyond.unsqueeze(-2)
        yield rows, sums
