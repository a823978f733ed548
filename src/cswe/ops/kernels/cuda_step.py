"""What the ways to D in one step of autograd share: options, bookkeeping, and the way from slices to directions."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cswe.ops.unit import slice_unit

Wanted = tuple[bool, bool, bool]
"""Which gradients will be asked for: tokens, reference, slices."""


class Options(NamedTuple):
    """What is not a tensor with a gradient."""

    mask: Tensor | None
    tau: float
    unit: Tensor | None
    """The unit of τ per slice, ``(L, 1)``; ``None``: 1."""
    measure_unit: bool
    """Whether the unit is the spread of these projections."""
    wanted: Wanted


class _Place(NamedTuple):
    """Where a tensor lies among those that autograd keeps."""

    number: int


def take_apart(item: Any, tensors: list[Tensor]) -> Any:
    """Put the tensors of nested tuples on a list, and leave places."""
    if isinstance(item, Tensor):
        tensors.append(item)
        return _Place(len(tensors) - 1)
    return type(item)(*(take_apart(part, tensors) for part in item)) if isinstance(item, tuple) else item


def put_together(item: Any, tensors: tuple[Tensor, ...]) -> Any:
    """Put the tensors back to their places."""
    if isinstance(item, _Place):
        return tensors[item.number]
    return type(item)(*(put_together(part, tensors) for part in item)) if isinstance(item, tuple) else item


class Directions(NamedTuple):
    """Slices of length one, and what they were before."""

    norms: Tensor
    """``(L, 1)``."""
    unit_length: Tensor
    """``(L, d)``."""
    scaled: Tensor
    """The same over the unit of τ."""
    unit: Tensor | None
    """The unit of τ per slice, ``(L, 1)``; ``None``: 1."""

    def back(self, grad: Tensor) -> Tensor:
        """Give what comes to the slices from a gradient of the scaled directions."""
        grad = grad if self.unit is None else grad / self.unit
        along = (self.unit_length * grad).sum(-1, keepdim=True)
        return torch.addcmul(grad, self.unit_length, along, value=-1) / self.norms


def directions_of(slices: Tensor) -> Directions:
    """Bring slices to length one."""
    norms = torch.linalg.vector_norm(slices, dim=-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
    unit_length = slices / norms
    return Directions(norms, unit_length, unit_length, None)


def in_units(directions: Directions, projections: Tensor, options: Options) -> Directions:
    """Bring projections ``(B, L, N)``, in place, and directions into units of τ's unit."""
    unit, mask = options.unit, options.mask
    if options.measure_unit:
        present = None if mask is None else mask.unsqueeze(1)
        shown = projections if present is None else projections.where(present, 0.0)
        unit = slice_unit(shown, present, relative=True)
    if unit is None:
        return directions
    projections /= unit
    return directions._replace(scaled=directions.unit_length / unit, unit=unit)


def back_through_projections(
    at_tokens: Tensor, at_projections: Tensor, directions: Directions, mask: Tensor | None
) -> Tensor:
    """Add to a gradient of the tokens, in place, what comes to them by their projections; nothing to masked ones."""
    at_tokens += torch.einsum("bln,ld->bnd", at_projections, directions.scaled)
    return at_tokens if mask is None else torch.where(mask.unsqueeze(-1), at_tokens, 0.0)
