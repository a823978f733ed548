"""What each rank of a sample is coupled with, and the way back for gradients: plain torch."""

import torch
from torch import Tensor

from cswe.ops.kernels.problem import Problem


class CoupledTargets:
    """Rows ``T_r``: the integral of the targets between two edges of a sample's ranks.

    The running integral is kept in float64, because it is only used in differences: at N = 16,384 a difference in
    float32 would have lost four digits.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._square = problem.is_square
        if not self._square:
            _, _, _, count, _ = problem.sizes
            positions = problem.edge_positions()
            self._below = positions.floor().long().clamp(max=count - 1)
            self._part = (positions - self._below).unsqueeze(-1)
            table = problem.targets.double().cumsum(1)
            self._integral = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)

    def rows(self, start: int, stop: int) -> Tensor:
        """Give T for these ranks, ``(B or 1, L, stop − start, d)``."""
        targets = self._problem.targets
        if self._square:
            return targets[:, start:stop].unsqueeze(0)
        below, part = self._below[..., start : stop + 1], self._part[..., start : stop + 1, :]
        at_edges = _pick(self._integral, below) + part * _pick(targets, below)
        return at_edges.diff(dim=-2).to(targets.dtype)

    def zero_gradient(self) -> Tensor:
        """Start a sum of gradients, to be filled by :meth:`add_gradient` and read by :meth:`finish_gradient`."""
        targets = self._problem.targets
        if self._square:
            return torch.zeros_like(targets)
        # Gradients of the integral and of the row it is continued with.
        return torch.zeros((2, *targets.shape), dtype=torch.float64, device=targets.device)

    def add_gradient(self, total: Tensor, grad: Tensor, start: int, stop: int) -> None:
        """Add the gradient of rows ``start:stop``, ``(B, L, stop − start, d)``."""
        if self._square:
            total[:, start:stop] += grad.sum(0)
            return
        below = self._below[..., start : stop + 1].expand(*grad.shape[:2], -1)
        part = self._part[..., start : stop + 1, :]
        zero = torch.zeros_like(grad[..., :1, :])
        at_edges = torch.cat([zero, grad], -2).double() - torch.cat([grad, zero], -2)
        for into, values in ((total[0], at_edges), (total[1], at_edges * part)):
            _put(into, below, values)

    def finish_gradient(self, total: Tensor) -> Tensor:
        """Give the gradient of the targets, ``(L, M, d)``."""
        if self._square:
            return total
        integral, row = total[0], total[1]
        # A target lies below every later entry of the integral.
        later = integral.flip(1).cumsum(1).flip(1) - integral
        return (row + later).to(self._problem.targets.dtype)


def _pick(table: Tensor, index: Tensor) -> Tensor:
    """Rows ``table[l, index[b, l or 0, r]]``, ``(B, L, R, d)``."""
    slices = torch.arange(table.shape[0], device=table.device).reshape(1, -1, 1)
    rows: Tensor = table[slices, index]
    return rows


def _put(table: Tensor, index: Tensor, values: Tensor) -> None:
    slices, count, width = table.shape
    offset = torch.arange(slices, device=table.device).reshape(1, -1, 1) * count
    table.reshape(-1, width).index_add_(0, (index + offset).reshape(-1), values.reshape(-1, width))
