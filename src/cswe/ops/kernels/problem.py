"""The one hot operation, as data: what every way of computing it receives."""

from typing import NamedTuple

import torch
from torch import Tensor


class Problem(NamedTuple):
    r"""The part of a relaxed SWGG cost that depends on the sample, for B samples and L slices.

    .. math:: S_{il} = Σ_r m_r (Q_{il} ‖v‖²)_r - 2 Σ_r ⟨(Q_{il} V_i)_r, T_{il,r}⟩

    Q is the soft sort of sample i along slice l and T what rank r of the sample is coupled with. Of sample i the first
    ``lengths[i]`` ranks exist; what lies behind them is never read.
    """

    points: Tensor
    """Sorted projections, ``(B, L, N)``, float32 or float64."""
    order: Tensor
    """The token that has rank r, ``(B, L, N)``, int64."""
    tokens: Tensor
    """Tokens, ``(B, N, d)``, in any floating dtype; V is ``tokens − centre``."""
    squares: Tensor
    """‖v‖² of the centred tokens, ``(B, N)``."""
    targets: Tensor
    """Reference points in (relaxed) rank order, each times its mass, ``(L, M, d)``."""
    centre: Tensor
    """Subtracted from every token, ``(d,)``."""
    lengths: Tensor | None
    """Number of valid tokens per sample, ``(B,)`` int64; ``None``: all N."""
    positions: Tensor | None
    """Where the ranks' edges lie among the targets, ``(B, L, N + 1)`` float64 from 0 to M; ``None``: uniform."""
    mass: Tensor | None
    """Mass m_r of every rank, ``(B, L, N)``; ``None``: uniform, one over the length."""
    tau: float
    """Temperature of the soft sort."""

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """B, L, N, M, d."""
        batch, slices, count = self.points.shape
        return batch, slices, count, self.targets.shape[1], self.targets.shape[2]

    @property
    def is_square(self) -> bool:
        """Whether rank r meets target r alone: as many ranks as targets, all weights equal."""
        return self.lengths is None and self.positions is None and self.points.shape[2] == self.targets.shape[1]

    def samples(self, start: int, stop: int) -> "Problem":
        """Restrict to some of the samples."""
        if start == 0 and stop >= self.points.shape[0]:
            return self

        def part(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[start:stop]

        return self._replace(
            points=self.points[start:stop],
            order=self.order[start:stop],
            tokens=self.tokens[start:stop],
            squares=self.squares[start:stop],
            lengths=part(self.lengths),
            positions=part(self.positions),
            mass=part(self.mass),
        )

    def present(self) -> Tensor:
        """1 for the ranks that exist, 0 behind them, ``(B or 1, 1, N)``."""
        ranks = torch.arange(self.points.shape[2], device=self.points.device)
        if self.lengths is None:
            return torch.ones_like(ranks, dtype=self.points.dtype).reshape(1, 1, -1)
        return (ranks < self.lengths.reshape(-1, 1, 1)).to(self.points.dtype)

    def rank_mass(self) -> Tensor:
        """Mass of every rank, ``(B or 1, L or 1, N)``, 0 where none exists."""
        if self.mass is not None:
            return self.mass.to(self.points.dtype)
        present = self.present()
        return present / present.sum(-1, keepdim=True)

    def edge_positions(self) -> Tensor:
        """Where the ranks' edges lie among the targets, ``(B or 1, L or 1, N + 1)`` float64."""
        if self.positions is not None:
            return self.positions
        _, _, count, targets, _ = self.sizes
        edges = torch.arange(count + 1, device=self.points.device, dtype=torch.float64)
        length = torch.full((1,), count, device=self.points.device) if self.lengths is None else self.lengths
        length = length.reshape(-1, 1, 1).clamp(min=1)  # a mask may leave nothing: NaN is no place
        return torch.minimum(edges, length) * targets / length


def problem_of_rows(points: Tensor, order: Tensor, rows: Tensor, targets: Tensor, tau: float) -> Problem:
    """State the problem of one sample without squares: S is −2 ⟨P_l rows, targets_l⟩."""
    return Problem(
        points=points.unsqueeze(0),
        order=order.unsqueeze(0),
        tokens=rows.unsqueeze(0),
        squares=points.new_zeros((1, rows.shape[0])),
        targets=targets,
        centre=points.new_zeros(rows.shape[1]),
        lengths=None,
        positions=None,
        mass=None,
        tau=tau,
    )
