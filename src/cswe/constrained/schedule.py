"""Rates that change from epoch to epoch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from cswe.constrained._checks import number

Schedule: TypeAlias = Callable[[int], float]


@dataclass(frozen=True)
class Decay:
    """The same factor every epoch.

    Examples
    --------
    >>> Decay(0.5)(3)
    0.125
    """

    factor: float

    def __call__(self, epoch: int) -> float:
        """Return the factor on the base rate in this epoch."""
        return float(self.factor**epoch)


@dataclass(frozen=True)
class Milestones:
    """A factor from each of the given epochs on.

    Examples
    --------
    >>> quarter = Milestones(((60, 0.5), (80, 0.5)))
    >>> quarter(59), quarter(60), quarter(80)
    (1.0, 0.5, 0.25)
    """

    factors: tuple[tuple[int, float], ...]

    def __call__(self, epoch: int) -> float:
        """Return the factor on the base rate in this epoch."""
        rate = 1.0
        for start, factor in self.factors:
            rate *= factor if epoch >= start else 1.0
        return rate


def as_schedule(schedule: Schedule | Mapping[int, float] | float | None, argument: str) -> Schedule:
    """Return a schedule as a function of the epoch (from 0) that gives the factor on the base rate.

    Examples
    --------
    >>> as_schedule(0.95, "schedule")(1), as_schedule({60: 0.1}, "schedule")(60)
    (0.95, 0.1)
    """
    if schedule is None:
        return Decay(1.0)
    if callable(schedule):
        return schedule
    if isinstance(schedule, Mapping):
        factors = []
        for epoch, factor in schedule.items():
            if isinstance(epoch, bool) or not isinstance(epoch, int):
                raise TypeError(f"expected the keys of {argument} to be epochs (integers) but got {epoch!r}")
            factors.append((epoch, number(factor, f"{argument}[{epoch}]", least=0)))
        return Milestones(tuple(factors))
    return Decay(number(schedule, argument, least=0))
