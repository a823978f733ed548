"""One constraint's share of the Lagrangian, and how its slack and its multiplier move."""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cswe.constrained.bound import Fraction
from cswe.constrained.constraint import Constraint
from cswe.constrained.rules import Memory, Rule
from cswe.constrained.watch import Watch


@dataclass(frozen=True)
class State:
    """Everything that a step changes. A step makes a new one: an error leaves the old one as it was."""

    values: Tensor
    dual: Tensor
    slack: Tensor
    dual_memory: Memory = field(default_factory=dict)
    slack_memory: Memory = field(default_factory=dict)
    level: Tensor | None = None  # running mean of the unconstrained values, for a Fraction
    level_count: float = 0.0
    level_batches: int = 0
    watch: Watch | None = None
    warned: bool = False

    def to(self, device: torch.device, dtype: torch.dtype) -> "State":
        """Return the same state on another device or in another precision."""
        if self.dual.device == device and self.dual.dtype == dtype:
            return self

        def convert(tensor: Tensor) -> Tensor:
            # One after the other: some devices have no float64 to convert from.
            return tensor.to(dtype).to(device) if self.dual.device.type == "cpu" else tensor.to(device).to(dtype)

        watch = self.watch and replace(
            self.watch,
            rose=self.watch.rose.to(device),
            early=convert(self.watch.early),
            late=convert(self.watch.late),
        )
        return replace(
            self,
            values=convert(self.values),
            dual=convert(self.dual),
            slack=convert(self.slack),
            dual_memory={key: convert(tensor) for key, tensor in self.dual_memory.items()},
            slack_memory={key: convert(tensor) for key, tensor in self.slack_memory.items()},
            level=None if self.level is None else convert(self.level),
            watch=watch,
        )


class Multiplier:
    """The multiplier and the slack of one constraint.

    Parameters
    ----------
    constraint
        The constraint.
    dual_rule, slack_rule
        How each of them moves.
    slack_weight
        The paper's α; infinite means no slack.
    patience
        The window of :class:`InfeasibleBoundWarning`; None switches it off.
    """

    def __init__(
        self,
        constraint: Constraint,
        dual_rule: Rule,
        slack_rule: Rule,
        slack_weight: float,
        patience: int | None,
    ) -> None:
        self.constraint = constraint
        self.dual_rule = dual_rule
        self.slack_rule = slack_rule
        self.slack_weight = slack_weight
        # A slack absorbs what cannot be met, so only a multiplier without one can grow for ever.
        self.patience = None if self.has_slack else patience
        self.state: State | None = None  # the number of values is known from the first ones

    @property
    def has_slack(self) -> bool:
        """Whether the bound may be exceeded at a price."""
        return math.isfinite(self.slack_weight)

    def bound(self, state: State) -> Tensor | None:
        """Return the bound as a vector, or None while the level it is a fraction of is being measured."""
        given = self.constraint.bound
        if isinstance(given, Fraction):
            if state.level is None or state.level_batches < given.batches:
                return None
            return given.fraction * state.level
        if isinstance(given, Tensor):
            return given.to(state.dual.dtype).to(state.dual.device)
        return torch.full_like(state.dual, given)

    def current(self, values: Tensor) -> State:
        """Return the state on the values' device and in their precision; a new one for the first values."""
        name = self.constraint.name
        if self.state is not None:
            if self.state.dual.shape != values.shape:
                raise ValueError(
                    f"expected {len(self.state.dual)} values of constraint {name!r}, as in the steps before, "
                    f"but got {len(values)}"
                )
            return self.state.to(values.device, values.dtype)
        given = self.constraint.bound
        if isinstance(given, Tensor) and given.shape != values.shape:
            raise ValueError(
                f"expected {len(given)} values of constraint {name!r}, one for each number of its bound, "
                f"but got {len(values)}"
            )
        zeros = torch.zeros_like(values, requires_grad=False)
        return State(
            values=zeros,
            dual=zeros,
            slack=zeros,
            dual_memory=self.dual_rule.start(zeros),
            slack_memory=self.slack_rule.start(zeros) if self.has_slack else {},
            level=zeros if isinstance(given, Fraction) else None,
            watch=None if self.patience is None else Watch.start(zeros, self.patience),
        )

    def term(self, values: Tensor) -> Tensor:
        """Return ``(α/2) ‖s‖² + λᵀ [D - ε - s]``; zero while the bound is being measured."""
        state = self.current(values)
        λ, s, ε, D = state.dual, state.slack, self.bound(state), values  # the paper's letters
        # Products and sums, no matmuls: autocast would compute those, and the slope λ, in half precision.
        term = (λ * (D - s if ε is None else D - ε - s)).sum()
        return term + self.slack_weight / 2 * s.square().sum() if self.has_slack else term

    def moved(self, values: Tensor, count: float, lr: float, slack_lr: float) -> tuple[State, list[int]]:
        """Return the state after slack and multiplier moved, in this order.

        Beside it, the indices of the values whose bound looks out of reach.
        """
        state = replace(self.current(values), values=values)
        ε = self.bound(state)
        if ε is None:
            return _measured(state, count), []
        D, λ, s, α = values, state.dual, state.slack, self.slack_weight  # the paper's letters
        if self.has_slack:
            s, slack_memory = self.slack_rule.move(s, α * s - λ, slack_lr, state.slack_memory)
            state = replace(state, slack=s, slack_memory=slack_memory)
        violation = D - ε - s
        dual, dual_memory = self.dual_rule.move(λ, -violation, lr, state.dual_memory)
        stuck: list[int] = []
        watch = state.watch
        if watch is not None:
            watch, stuck = watch.update(dual > λ, violation)
        news = stuck if not state.warned else []
        state = replace(state, dual=dual, dual_memory=dual_memory, watch=watch, warned=state.warned or bool(stuck))
        return state, news


def _measured(state: State, count: float) -> State:
    total = state.level_count + count
    level = torch.zeros_like(state.values) if state.level is None else state.level
    level = level + (state.values - level) * (count / total)
    return replace(state, level=level, level_count=total, level_batches=state.level_batches + 1)
