"""Arguments that are numbers, and values that should be."""

import math
from numbers import Real

import torch


def number(value: object, argument: str, *, least: float = -math.inf, infinite: bool = False) -> float:
    """Return a real argument as a float, or say what is wrong with it."""
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"expected {argument} to be a number but got {value!r}")
    result = float(value)
    if math.isnan(result) or (math.isinf(result) and not infinite):
        raise ValueError(f"expected {argument} to be a finite number but got {result}")
    if result < least:
        raise ValueError(f"expected {argument} to be at least {least:g} but got {result:g}")
    return result


def count_or_none(value: object, argument: str, *, least: int) -> int | None:
    """Return an argument that is an integer or None, or say what is wrong with it."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(f"expected {argument} to be an integer of at least {least}, or None, but got {value!r}")
    return value


def check_finite(values: torch.Tensor, name: str, left: str) -> None:
    """Raise an error unless all values of a constraint are finite; `left` says what became of its multiplier."""
    finite = values.isfinite()
    if not bool(finite.all()):
        bad = (~finite).nonzero().flatten().tolist()
        raise FloatingPointError(
            f"expected finite values of constraint {name!r} but got {values[bad[0]].item()} at index {bad[0]} "
            f"({len(bad)} of {len(values)} not finite); {left}"
        )
