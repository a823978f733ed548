"""What is kept of a projected set: small modules, also by name.

A readout turns :class:`~cswe.nn.projected.ProjectedSets` into a vector ``(B, size)``. Those that compare with the
reference say so by ``needs_reference``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cswe.nn.projected import ProjectedSets
from cswe.ops._inputs import whole
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

    Parameters
    ----------
    k
        Number of L-moments.
    means
        Keep the mean along the first so many slices only, and the others along all: ``H·(means + L·(k − 1))`` numbers.
        Means along more than d slices are sums of each other, where spreads are not. ``None``: along all.

    Examples
    --------
    >>> import cswe
    >>> cswe.SWEPool(dim=3, slices=5, readout=Moments(4)).out_dim
    20
    >>> cswe.SWEPool(dim=3, slices=5, readout=Moments(2, means=3)).out_dim
    8
    """

    def __init__(self, k: int = 4, means: int | None = None) -> None:
        super().__init__()
        k = whole(k, "k", more=" moments")
        if means is not None and k == 1:
            raise ValueError("expected k ≥ 2 moments with means=…: slices without a mean would have nothing to say")
        self.k, self.means = k, _checked_means(means)

    def size(self, slices: int, points: int | None, weightings: int) -> int:
        """Give H·L·k, or H·(means + L·(k − 1))."""
        return weightings * (_means_of(self.means, slices) + slices * (self.k - 1))

    def forward(self, sets: ProjectedSets) -> Tensor:
        """Read B projected sets, giving ``(B, size)``, moments of one slice side by side; some means come first."""
        means = sets.means()
        if self.k == 1:
            return means.flatten(1)
        higher = sets.higher_moments(self.k)
        if self.means is None:
            return torch.cat([means.unsqueeze(-1), higher], dim=-1).flatten(1)
        return torch.cat([means[..., : self.means].flatten(1), higher.flatten(1)], dim=1)

    def extra_repr(self) -> str:
        """Describe the layer."""
        return f"k={self.k}" if self.means is None else f"k={self.k}, means={self.means}"


class Statistics(Readout):
    """Mean and standard deviation along every slice, ``2·H·L`` numbers. Nothing is sorted.

    With weightings this is attentive statistics pooling [1]_ along learned directions.

    Parameters
    ----------
    means
        Keep the mean along the first so many slices only, as in :class:`Moments`: ``H·(means + L)`` numbers.

    References
    ----------
    .. [1] Okabe, Koshinaka, Shinoda. Attentive statistics pooling for deep speaker embedding. Interspeech 2018.
    """

    def __init__(self, means: int | None = None) -> None:
        super().__init__()
        self.means = _checked_means(means)

    def size(self, slices: int, points: int | None, weightings: int) -> int:
        """Give H·(means + L); means are L if not said otherwise."""
        return weightings * (_means_of(self.means, slices) + slices)

    def forward(self, sets: ProjectedSets) -> Tensor:
        """Read B projected sets, giving ``(B, size)``: all means, then all deviations."""
        means = sets.means()
        variances = sets.second_moments(about=means)
        # A variance is as exact as what it is the difference of, which counts from the weightings' common centre; and a
        # deviation of less than 16 √N units in the mean's last place is rounding: N masses sum to one no better.
        centre = means.detach().mean(1, keepdim=True)
        last_place = 64 * sets.count * torch.finfo(means.dtype).eps * means.detach().square()
        scale = variances.detach().abs() + (means.detach() - centre).square() + last_place
        return torch.cat([means[..., : self.means].flatten(1), root(variances, scale).flatten(1)], dim=1)

    def extra_repr(self) -> str:
        """Describe the layer."""
        return "" if self.means is None else f"means={self.means}"


def _checked_means(means: int | None) -> int | None:
    return None if means is None else whole(means, "means", more=" slices, or None for all,")


def _means_of(means: int | None, slices: int) -> int:
    """Return along how many of a pool's slices means are kept."""
    if means is not None and means > slices:
        raise ValueError(f"expected means along at most the pool's {slices} slices but got {means}")
    return slices if means is None else means


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
        self.map = nn.Linear(whole(points, "points"), 1, bias=False)

    def size(self, slices: int, points: int | None, weightings: int) -> int:
        """Give H·L."""
        if points != self.map.in_features:
            raise ValueError(f"MapPoints was made for {self.map.in_features} points but the pool has {points}")
        return weightings * slices

    def forward(self, sets: ProjectedSets) -> Tensor:
        """Read B projected sets, giving ``(B, H·L)``."""
        z = sets.displacements()
        return (z @ self.map.weight.to(z.dtype).squeeze(0)).flatten(1)


class MapSlices(Readout):
    """A learned map over the slices, L → 1, shared by all reference points: ``H·M`` numbers."""

    needs_reference = True

    def __init__(self, slices: int) -> None:
        super().__init__()
        self.map = nn.Linear(whole(slices, "slices"), 1, bias=False)

    def size(self, slices: int, points: int | None, weightings: int) -> int:
        """Give H·M."""
        if slices != self.map.in_features:
            raise ValueError(f"MapSlices was made for {self.map.in_features} slices but the pool has {slices}")
        return weightings * (points or 0)

    def forward(self, sets: ProjectedSets) -> Tensor:
        """Read B projected sets, giving ``(B, H·M)``."""
        z = sets.displacements().transpose(-1, -2)
        return (z @ self.map.weight.to(z.dtype).squeeze(0)).flatten(1)


class MeanPoints(Readout):
    """The mean displacement along every slice, ``H·L`` numbers."""

    needs_reference = True

    def size(self, slices: int, points: int | None, weightings: int) -> int:
        """Give H·L."""
        return weightings * slices

    def forward(self, sets: ProjectedSets) -> Tensor:
        """Read B projected sets, giving ``(B, H·L)``."""
        return sets.displacements().mean(-1).flatten(1)


class MeanSlices(Readout):
    """The displacement of every reference point, averaged over the slices, ``H·M`` numbers."""

    needs_reference = True

    def size(self, slices: int, points: int | None, weightings: int) -> int:
        """Give H·M."""
        return weightings * (points or 0)

    def forward(self, sets: ProjectedSets) -> Tensor:
        """Read B projected sets, giving ``(B, H·M)``."""
        return sets.displacements().mean(-2).flatten(1)


class DualWeighted(Readout):
    r"""Slices averaged by how well they keep to their bounds: weights :math:`\mathrm{softmax}(-λ/t)`, ``H·M`` numbers.

    Parameters
    ----------
    multipliers
        A function without arguments that gives the L multipliers (or slacks) as they are now:
        ``lambda: duals.record().get("swgg", {}).get("dual")``. Before the first step, when there is none, slices
        weigh the same.
    temperature
        t > 0: small prefers the slices with the smallest multiplier.

    Notes
    -----
    The last weights are kept in the buffer ``weights``, so that a saved pool reads the same without its multipliers.
    """

    needs_reference = True
    weights: Tensor

    def __init__(
        self, slices: int, multipliers: Callable[[], Tensor | None] | None = None, temperature: float = 1.0
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"expected temperature > 0 but got {temperature}")
        self.temperature = temperature
        self.multipliers = multipliers
        slices = whole(slices, "slices")
        self.register_buffer("weights", torch.full((slices,), 1 / slices))

    def size(self, slices: int, points: int | None, weightings: int) -> int:
        """Give H·M."""
        if slices != len(self.weights):
            raise ValueError(f"DualWeighted was made for {len(self.weights)} slices but the pool has {slices}")
        return weightings * (points or 0)

    def forward(self, sets: ProjectedSets) -> Tensor:
        """Read B projected sets, giving ``(B, H·M)``."""
        if self.training and self.multipliers is not None and (now := self.multipliers()) is not None:
            if now.shape != self.weights.shape:
                raise ValueError(f"expected multipliers to give {len(self.weights)} numbers but got {tuple(now.shape)}")
            # A tensor of their own for every pass: the next one must not change what this one's gradient needs.
            weights = torch.softmax(-now.detach().to(self.weights) / self.temperature, dim=0)
            with torch.no_grad():
                self.weights.copy_(weights)
        else:
            weights = self.weights.clone()
        z = sets.displacements().transpose(-1, -2)
        return (z @ weights.to(z.dtype)).flatten(1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Let all slices weigh the same."""
        self.weights.fill_(1 / len(self.weights))

    def __getstate__(self) -> dict[str, object]:
        """Leave the multipliers behind: a function of the training loop has no place in a saved or copied pool."""
        return {**self.__dict__, "multipliers": None}


class Concat(Readout):
    """Several readouts side by side; the set is projected once, and sorted once for each that sorts.

    Examples
    --------
    >>> import cswe
    >>> cswe.SWEPool(dim=3, slices=5, points=7, readout=Concat(MapPoints(7), MeanSlices())).out_dim
    12
    """

    def __init__(self, *readouts: Readout) -> None:
        super().__init__()
        if not readouts:
            raise ValueError("expected at least one readout to concatenate but got none")
        for readout in readouts:
            if not isinstance(readout, Readout):
                raise TypeError(f"expected readouts to concatenate to be Readouts, Flatten() say, but got {readout!r}")
        self.readouts = nn.ModuleList(readouts)
        self.needs_reference = any(readout.needs_reference for readout in readouts)

    def size(self, slices: int, points: int | None, weightings: int) -> int:
        """Give the sum of the parts' sizes."""
        return sum(part.size(slices, points, weightings) for part in self.readouts if isinstance(part, Readout))

    def forward(self, sets: ProjectedSets) -> Tensor:
        """Read B projected sets, one readout after the other."""
        return torch.cat([part(sets) for part in self.readouts], dim=1)


def make_readout(readout: str | Readout, slices: int, points: int | None) -> Readout:
    """Make a readout from its name, ``"moments:4"`` or ``"flatten"`` say."""
    if isinstance(readout, Readout):
        return readout
    if not isinstance(readout, str):
        raise TypeError(f"expected readout to be a name or a Readout but got {type(readout).__name__}")
    name, *arguments = readout.split(":")
    if all(argument.isdecimal() for argument in arguments):
        numbers = [int(argument) for argument in arguments]
        if name == "moments" and len(numbers) <= 2:
            return Moments(*numbers)
        if name == "statistics" and len(numbers) <= 1:
            return Statistics(*numbers)
    if not arguments:
        if name == "flatten":
            return Flatten()
        if name == "map-points":
            if points is None:
                raise ValueError("the readout 'map-points' needs a reference: give the pool points=M")
            return MapPoints(points)
        if name == "map-slices":
            return MapSlices(slices)
        if name == "mean-points":
            return MeanPoints()
        if name == "mean-slices":
            return MeanSlices()
    raise ValueError(
        "expected readout 'moments:K', 'moments:K:MEANS', 'statistics', 'statistics:MEANS', 'flatten', 'map-points', "
        f"'map-slices', 'mean-points' or 'mean-slices', or a Readout, but got {readout!r}"
    )
