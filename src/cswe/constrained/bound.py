"""Bounds: a number, a number per value, or a fraction of the unconstrained level."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TypeAlias

import torch
from torch import Tensor

from cswe.constrained._checks import number


@dataclass(frozen=True)
class Fraction:
    """A bound as a fraction of the unconstrained level, which is measured on the first batches.

    A useful bound is hard to know before the values have been seen. While the level is being measured the
    constraint only observes: its multiplier stays zero and the loss is unconstrained. Each value gets its own
    bound, ``fraction`` times its mean over all samples of those batches.

    Parameters
    ----------
    fraction
        0.9 asks for values that are 10 % below the unconstrained level. For values that are negative, as
        those of a lower bound are, 1.1 asks for 10 % beyond it.
    batches
        The number of steps (not micro-batches) that are measured.

    Examples
    --------
    >>> Fraction(0.9)
    Fraction(fraction=0.9, batches=10)
    """

    fraction: float
    batches: int = 10

    def __post_init__(self) -> None:
        if number(self.fraction, "fraction") <= 0:
            raise ValueError(f"expected fraction to be positive but got {self.fraction}")
        if isinstance(self.batches, bool) or not isinstance(self.batches, int):
            raise TypeError(f"expected batches to be an integer but got {self.batches!r}")
        if self.batches < 1:
            raise ValueError(f"expected batches to be at least 1 but got {self.batches}")


Bound: TypeAlias = float | Sequence[float] | Tensor | Fraction


def as_bound(bound: Bound, argument: str) -> float | Tensor | Fraction:
    """Check a bound and bring it to one of three forms: a float, a float64 vector, a ``Fraction``.

    Examples
    --------
    >>> as_bound([1, 2.5], "bound")
    tensor([1.0000, 2.5000], dtype=torch.float64)
    """
    if isinstance(bound, Fraction):
        return bound
    if isinstance(bound, Real) or (isinstance(bound, Tensor) and bound.ndim == 0):
        return number(bound, argument)
    try:
        given = bound if isinstance(bound, Tensor) else torch.tensor(bound, dtype=torch.float64, device="cpu")
        vector = given.detach().to("cpu", torch.float64, copy=True)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"expected {argument} to be a number, a vector or a Fraction but got {bound!r}") from error
    if vector.ndim != 1 or len(vector) == 0:
        raise ValueError(
            f"expected {argument} to be a number, a vector or a Fraction but got shape {tuple(vector.shape)}"
        )
    if not bool(vector.isfinite().all()):
        raise ValueError(f"expected {argument} to be finite but got {vector.tolist()}")
    return vector
