"""How slacks and multipliers move: one gradient step, then back onto the non-negative orthant.

A rule holds no state of its own. What it remembers between steps goes in and out as plain tensors, so that
saving and resuming need to know nothing about it.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from cswe.constrained._checks import number

Memory: TypeAlias = dict[str, Tensor]


class Rule(Protocol):
    """A descent step with projection."""

    def start(self, point: Tensor) -> Memory:
        """Return what is remembered before the first step from this point."""

    def move(self, point: Tensor, gradient: Tensor, lr: float, memory: Memory) -> tuple[Tensor, Memory]:
        """Return the point after one descent step, and what to remember."""


@dataclass(frozen=True)
class ProjectedGradient:
    """``x <- [x - lr * gradient]_+``, as printed in Algorithm 1.

    Examples
    --------
    >>> rule = ProjectedGradient()
    >>> rule.move(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 20.0]), 0.1, {})
    (tensor([0.8000, 0.0000]), {})
    """

    def start(self, point: Tensor) -> Memory:
        """Return nothing: each step stands alone."""
        return {}

    def move(self, point: Tensor, gradient: Tensor, lr: float, memory: Memory) -> tuple[Tensor, Memory]:
        """Return the point after one descent step."""
        return (point - lr * gradient).clamp(min=0), {}


@dataclass(frozen=True)
class ProjectedAdam:
    """A step of Adam [1]_, then projection: what the paper's experiments use for the slack.

    Parameters
    ----------
    betas, eps
        As in ``torch.optim.Adam``.

    References
    ----------
    .. [1] D. P. Kingma and J. Ba, "Adam: a method for stochastic optimization", ICLR 2015.

    Examples
    --------
    >>> rule = ProjectedAdam()
    >>> point = torch.tensor([1.0])
    >>> point, memory = rule.move(point, torch.tensor([5.0]), 0.1, rule.start(point))
    >>> point  # the first step has the length of the rate, whatever the gradient
    tensor([0.9000])
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        for i, beta in enumerate(self.betas):
            if not 0 <= number(beta, f"betas[{i}]") < 1:
                raise ValueError(f"expected betas[{i}] to be in [0, 1) but got {beta}")
        number(self.eps, "eps", least=0)

    def start(self, point: Tensor) -> Memory:
        """Return zero moments."""
        return {
            "mean": torch.zeros_like(point),
            "square": torch.zeros_like(point),
            "steps": point.new_zeros(()),
        }

    def move(self, point: Tensor, gradient: Tensor, lr: float, memory: Memory) -> tuple[Tensor, Memory]:
        """Return the point after one step, and the moments."""
        first, second = self.betas
        steps = memory["steps"] + 1  # a tensor: reading it would make the device wait
        mean = first * memory["mean"] + (1 - first) * gradient
        square = second * memory["square"] + (1 - second) * gradient.square()
        scale = (square / (1 - second**steps)).sqrt() + self.eps
        moved = (point - lr * (mean / (1 - first**steps)) / scale).clamp(min=0)
        return moved, {"mean": mean, "square": square, "steps": steps}


def as_rule(rule: Rule | str, argument: str) -> Rule:
    """Return a rule by its name, or as it is.

    Examples
    --------
    >>> as_rule("adam", "slack_optimizer")
    ProjectedAdam(betas=(0.9, 0.999), eps=1e-08)
    """
    if rule == "projected":
        return ProjectedGradient()
    if rule == "adam":
        return ProjectedAdam()
    if isinstance(rule, str):
        raise ValueError(f"expected {argument} to be 'projected', 'adam' or a rule but got {rule!r}")
    if not (hasattr(rule, "start") and hasattr(rule, "move")):
        raise TypeError(f"expected {argument} to be 'projected', 'adam' or a rule but got {rule!r}")
    return rule
