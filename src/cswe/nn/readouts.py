"""What is kept of a projected set: small modules, also by name.

A readout turns :class:`~cswe.nn.projected.ProjectedSets` into a vector ``(B, size)``. Those that compare with the
reference say so by ``needs_reference``.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from cswe.nn.projected import ProjectedSets
from cswe.ops.embedding import l_moments_of_sorted
from cswe.ops.measure import root


class Readout(nn.Module, ABC):
    """Base of all readouts."""

    needs_reference: bool = False

    @abstractmethod
    def size(self, slices: int, points: int | None, weightings: int) -> int:
        """Give the length of the vector for L slices, M reference points and H weightings (at least 1)."""

    @abstractmethod
    def forward(self, sets: ProjectedSets) -> Tensor:
        """Read B projected sets, giving ``(B, size)``."""


class Moments(Readout):
    """The first k L-moments along every slice: mean, spread, skewness, … ``H·L·k`` numbers.

    Taken on the set's own N ranks, so it needs no reference. With k = 1 and d orthogonal slices it is mean pooling up
    to a rotation (and with weightings, attention pooling); nothing is sorted then.

    Examples
    --------
    >>> import cswe
    >>> cswe.SWEPool(dim=3, slices=5, readout=Moments(4)).out_dim
    20
    """

    def __init__(self, k: int = 4) -> None:
        super().__init__()
        if k < 1:
            raise ValueError(f"expected k ≥ 1 moments but got {k}")
        self.k = k

    def size(self, slices: int, points: int | None, weightings: int) -> int:
        """Give H·L·k."""
        return weightings * slices * self.k

    def forward(self, sets: ProjectedSets) -> Tensor:
        """Read B projected sets, giving ``(B, H·L·k)``, moments of one slice side by side."""
        means = sets.means()
        if self.k == 1:
            return means.flatten(1)
        ranked, masses = sets.ranked()
        higher = l_moments_of_sorted(ranked, masses, self.k)[..., 1:]
        return torch.cat([means.unsqueeze(-1), higher], dim=-1).flatten(1)

    def extra_repr(self) -> str:
        """Describe the layer."""
        return f"k={self.k}"


class Statistics(Readout):
    """Mean and standard deviation along every slice, ``2·H·L`` numbers. Nothing is sorted.

    With weightings this is attentive statistics pooling [1]_ along learned directions.

    References
    ----------
    .. [1] Okabe, Koshinaka, Shinoda. Attentive statistics pooling for deep speaker embedding. Interspeech 2018.
    """

    def size(self, slices: int, points: int | None, weightings: int) -> int:
        """Give 2·H·L."""
        return 2 * weightings * slices

    def forward(self, sets: ProjectedSets) -> Tensor:
        """Read B projected sets, giving ``(B, 2·H·L)``: all means, then all deviations."""
        means = sets.means()
        variances = sets.second_moments(about=means)
        scale = means.detach().square() + variances.detach().abs()
        return torch.cat([means, root(variances, scale)], dim=1).flatten(1)


class Flatten(Readout):
    """Every displacement to the reference, ``H·L·M`` numbers: the paper's embedding."""

    needs_reference = True

    def size(self, slices: int, points: int | None, weightings: int) -> int:
        """Give H·L·M."""
        return weightings * slices * (points or 0)

    def forward(self, sets: ProjectedSets) -> Tensor:
        """Read B projected sets, giving ``(B, H·L·M)``, reference points of one slice side by side."""
        return sets.displacements().flatten(1)


class MapPoints(Readout):
    """A learned map over the reference points, M → 1, shared by all slices: ``H·L`` numbers.

    Built for M points when the pool is: ``MapPoints(points=M)``, or by name ``"map-points"``.
    """

    needs_reference = True

    def __init__(self, points: int) -> None:
        super().__init__()
        if points < 1:
            raise ValueError(f"expected points ≥ 1 but got {points}")
        self.map = nn.Linear(points, 1, bias=False)

    def size(self, slices: int, points: int | None, weightings: int) -> int:
        """Give H·L."""
        if points != self.map.in_features:
            raise ValueError(f"MapPoints was made for {self.map.in_features} points but the pool has {points}")
        return weightings * slices

    def forward(self, sets: ProjectedSets) -> Tensor:
        """Read B projected sets, giving ``(B, H·L)``."""
        z = sets.displacements()
        return (z @ self.map.weight.to(z.dtype).squeeze(0)).flatten(1)


def make_readout(readout: str | Readout, points: int | None) -> Readout:
    """Make a readout from its name: ``"moments:4"``, ``"statistics"``, ``"flatten"``, ``"map-points"``."""
    if isinstance(readout, Readout):
        return readout
    if not isinstance(readout, str):
        raise TypeError(f"expected readout to be a name or a Readout but got {type(readout).__name__}")
    name, _, argument = readout.partition(":")
    if name == "moments" and (argument == "" or argument.isdigit()):
        return Moments(int(argument)) if argument else Moments()
    if not argument:
        if name == "statistics":
            return Statistics()
        if name == "flatten":
            return Flatten()
        if name == "map-points":
            if points is None:
                raise ValueError("the readout 'map-points' needs a reference: give the pool points=M")
            return MapPoints(points)
    raise ValueError(
        f"expected readout 'moments:K', 'statistics', 'flatten' or 'map-points', or a Readout, but got {readout!r}"
    )
