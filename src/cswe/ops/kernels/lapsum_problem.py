"""LapSum's operation, as data."""

from typing import NamedTuple

from torch import Tensor


class LapSumProblem(NamedTuple):
    r"""The cross term of a SWGG cost under LapSum, for B samples, L slices and K ranks of equal mass.

    .. math:: S_{il} = Σ_k ⟨(\tilde Q_{il} V_i)_k, T_{l,k}⟩

    :math:`\tilde Q` couples the tokens of sample i, all of the same mass, with the ranks along slice l; its entries sum
    to one. Of sample i the first ``lengths[i]`` ranks exist; what lies behind them is never read.
    """

    points: Tensor
    """Sorted projections over the temperature, ``(B, L, N)``, float32 or float64."""
    order: Tensor
    """The token that has rank r, ``(B, L, N)``, int64."""
    tokens: Tensor
    """Tokens, ``(B, N, d)``, in any floating dtype; V is ``tokens − centre``."""
    targets: Tensor
    """What the ranks are paired with, ``(L, K, d)``."""
    centre: Tensor
    """Subtracted from every token, ``(d,)``."""
    lengths: Tensor | None
    """Number of valid tokens per sample, ``(B,)`` int64; ``None``: all N."""

    def samples(self, start: int, stop: int) -> "LapSumProblem":
        """Restrict to some of the samples."""
        return self._replace(
            points=self.points[start:stop],
            order=self.order[start:stop],
            tokens=self.tokens[start:stop],
            lengths=None if self.lengths is None else self.lengths[start:stop],
        )
