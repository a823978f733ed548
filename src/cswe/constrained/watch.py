"""Say it when a bound looks out of reach: without slack its multiplier would grow for ever, silently."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


class InfeasibleBoundWarning(UserWarning):
    """A multiplier keeps growing and its value does not come nearer to the bound.

    Said once per constraint without slack, when over ``patience`` consecutive steps

    1. the multiplier rose in every step, and
    2. the mean violation in the second half of these steps is at least 99 % of that in the first half.

    Either no weights meet the bound, or the dual rate is so small that the multiplier has no weight yet.
    """


SHRINKS = 0.99  # a violation below this share of what it was half a window ago is on its way down


@dataclass(frozen=True)
class Watch:
    """One window of ``patience`` steps; windows do not overlap, so the device is asked once per window.

    Examples
    --------
    >>> watch = Watch.start(torch.zeros(2), patience=4)
    >>> for step in range(4):
    ...     violation = torch.tensor([1.0, 1.0 / (1 + step)])  # the second one shrinks
    ...     watch, stuck = watch.update(torch.tensor([True, True]), violation)
    >>> stuck
    [0]
    """

    patience: int
    rose: Tensor
    early: Tensor
    late: Tensor
    steps: int = 0

    @classmethod
    def start(cls, like: Tensor, patience: int) -> "Watch":
        """Return an empty window."""
        return cls(patience, torch.ones_like(like, dtype=torch.bool), torch.zeros_like(like), torch.zeros_like(like))

    def update(self, rose: Tensor, violation: Tensor) -> tuple["Watch", list[int]]:
        """Add one step. At the end of a window, also return the indices of the values that are stuck."""
        half = self.patience // 2
        watch = replace(
            self,
            rose=self.rose & rose,
            # Means and not sums: halves of an odd window differ in length.
            early=self.early + violation / half if self.steps < half else self.early,
            late=self.late + violation / (self.patience - half) if self.steps >= half else self.late,
            steps=self.steps + 1,
        )
        if watch.steps < self.patience:
            return watch, []
        stuck = watch.rose & (watch.early > 0) & (watch.late >= SHRINKS * watch.early)
        return Watch.start(self.early, self.patience), stuck.nonzero().flatten().tolist()
