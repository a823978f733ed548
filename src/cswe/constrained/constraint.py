"""What must stay below what."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from cswe.constrained._checks import number
from cswe.constrained.bound import Bound, as_bound

Values: TypeAlias = Callable[..., Tensor]
Count: TypeAlias = Callable[..., float]


class Constraint:
    """Values that must stay at or below a bound: ``function(*inputs) <= bound``.

    Parameters
    ----------
    function
        A function or an ``nn.Module``. Called with the inputs that ``PrimalDual.lagrangian`` was given, it
        returns the K values, *averaged over the batch*: shape ``(K,)``, or a scalar for K = 1.
    bound
        One number for all values, a vector of K numbers, or a :class:`Fraction` of the unconstrained level.
    name
        The key in records and in the state. By default the function's or the module's class name.
    dual_values
        ``dual_values(*inputs)``, the values on which the multiplier moves when they are not those that
        entered the loss: hard instead of relaxed ones, say. Evaluated without gradients. By default the
        function's attribute of that name, if it has one.
    count
        ``count(*inputs)``, the number of samples that the values are a mean of. It weighs micro-batches and
        ranks of different sizes. By default the function's attribute of that name, or else the leading size
        of the first input; a function without inputs counts once.
    lr, slack_lr, slack_weight
        For this constraint, in place of those of :class:`PrimalDual`. ``slack_weight=float("inf")``
        switches the slack off for this one.

    Notes
    -----
    ``PrimalDual`` also takes any callable that has an attribute ``bound``, and then reads
    ``name`` and the other arguments from it likewise: a module may be a constraint without knowing this
    class.

    Examples
    --------
    >>> power = Constraint(lambda x: x.square().mean(0), bound=[1.0, 2.0], name="power")
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> power.values(x), power.count(x)
    (tensor([ 5., 10.]), 2.0)
    """

    def __init__(
        self,
        function: Values,
        bound: Bound,
        name: str | None = None,
        *,
        dual_values: Values | None = None,
        count: Count | None = None,
        lr: float | None = None,
        slack_lr: float | None = None,
        slack_weight: float | None = None,
    ) -> None:
        if not callable(function):
            raise TypeError(f"expected function to be callable but got {function!r}")
        self.function = function
        self.name = _checked_name(_default_name(function) if name is None else name)
        self.bound = as_bound(bound, f"the bound of constraint {self.name!r}")
        self._dual_values = dual_values if dual_values is not None else getattr(function, "dual_values", None)
        self._count = count if count is not None else getattr(function, "count", None)
        of = f"of constraint {self.name!r}"
        self.lr = None if lr is None else number(lr, f"lr {of}", least=0)
        self.slack_lr = None if slack_lr is None else number(slack_lr, f"slack_lr {of}", least=0)
        self.slack_weight = (
            None if slack_weight is None else number(slack_weight, f"slack_weight {of}", least=0, infinite=True)
        )

    def values(self, *inputs: object, **kwargs: object) -> Tensor:
        """Return the values that enter the Lagrangian, shape ``(K,)``, in float32 at least."""
        return self._vector(self.function(*inputs, **kwargs))

    @torch.no_grad()
    def dual_values(self, *inputs: object, **kwargs: object) -> Tensor | None:
        """Return the values that move the multiplier, or None when they are those of the Lagrangian."""
        if self._dual_values is None:
            return None
        return self._vector(self._dual_values(*inputs, **kwargs)).detach()

    def count(self, *inputs: object, **kwargs: object) -> float:
        """Return the number of samples in these inputs."""
        if self._count is not None:
            return number(self._count(*inputs, **kwargs), f"count of constraint {self.name!r}", least=0)
        if not inputs and not kwargs:
            return 1.0
        first = inputs[0] if inputs else next(iter(kwargs.values()))
        if isinstance(first, Tensor) and first.ndim > 0:
            return float(first.size(0))
        # Guessing (len of a tuple, say) would weigh unequal micro-batches wrongly without anybody noticing.
        raise TypeError(
            f"expected the first input of constraint {self.name!r} to be a tensor of shape (samples, ...) but got "
            f"{_describe(first)}: give the constraint count=, a function of the inputs"
        )

    def observe(
        self, inputs: tuple[object, ...], kwargs: dict[str, object], values: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """Return the values that move the multiplier, and of how many samples they are the mean.

        ``values`` are those of the Lagrangian, where they have been computed.
        """
        observed = self.dual_values(*inputs, **kwargs)
        if observed is None:
            observed = self.values(*inputs, **kwargs) if values is None else values
        if values is not None and observed.shape != values.shape:
            raise ValueError(
                f"expected dual_values of constraint {self.name!r} to have shape {tuple(values.shape)}, "
                f"as its values, but got {tuple(observed.shape)}"
            )
        return observed.detach(), self.count(*inputs, **kwargs)

    def _vector(self, values: object) -> Tensor:
        if not isinstance(values, Tensor):
            raise TypeError(f"expected the values of constraint {self.name!r} to be a tensor but got {values!r}")
        if values.ndim > 1 or values.numel() == 0:
            raise ValueError(
                f"expected the values of constraint {self.name!r} to have shape (K,), averaged over the batch, "
                f"but got {tuple(values.shape)}"
            )
        if not values.is_floating_point():
            raise TypeError(f"expected the values of constraint {self.name!r} to be real but got {values.dtype}")
        # A multiplier in half precision would not move at usual rates.
        return values.reshape(-1).to(torch.promote_types(values.dtype, torch.float32))

    def __repr__(self) -> str:
        bound = self.bound.tolist() if isinstance(self.bound, Tensor) else self.bound
        return f"Constraint({self.name!r}, bound={bound})"


def as_constraint(constraint: object) -> Constraint:
    """Return a constraint as it is, or wrap a callable that has a bound."""
    if isinstance(constraint, Constraint):
        return constraint
    if not callable(constraint) or not hasattr(constraint, "bound"):
        raise TypeError(
            f"expected constraints to be Constraint(function, bound) or a callable with an attribute 'bound' "
            f"but got {constraint!r}"
        )
    return Constraint(
        constraint,
        constraint.bound,
        getattr(constraint, "name", None),
        lr=getattr(constraint, "lr", None),
        slack_lr=getattr(constraint, "slack_lr", None),
        slack_weight=getattr(constraint, "slack_weight", None),
    )


def _default_name(function: Values) -> str:
    if isinstance(function, nn.Module):
        return type(function).__name__
    name = getattr(function, "__name__", "constraint")
    return "constraint" if name == "<lambda>" else name


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"expected name to be a string but got {name!r}")
    if not name or "." in name:  # the dot separates a constraint's name from its fields in the state
        raise ValueError(f"expected name to be a non-empty string without '.' but got {name!r}")
    return name


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
