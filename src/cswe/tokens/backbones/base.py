"""What a backbone is to an extraction: raw items in, tokens of some layers out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor

from cswe.tokens.errors import BadItemError
from cswe.tokens.manifest import DTYPES
from cswe.tokens.sources.base import Kind

Norm = Literal["final", "none"]
Precision = Literal["float32", "float16", "bfloat16"]


@dataclass
class Encoded:
    """What a backbone said about some items.

    Parameters
    ----------
    tokens
        For every layer the tokens, in pieces, item after item, on the CPU and of the store's type.
    lengths
        Tokens of every item.
    cls
        For every layer ``(items, dim)``; empty if the backbone has no CLS vector.
    weights
        Token weights in pieces; empty if there are none.
    finite
        Whether all values of an item are finite in the store's type, ``(items,)``.
    counts
        What is worth reporting, by name.
    """

    tokens: dict[int, list[Tensor]]
    lengths: list[int]
    finite: Tensor
    cls: dict[int, Tensor] = field(default_factory=dict)
    weights: list[Tensor] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def only(self, keep: Tensor) -> "Encoded":
        """Return the items where `keep` is True."""
        chosen = keep.nonzero().flatten().tolist()

        def pick(pieces: list[Tensor]) -> list[Tensor]:
            parts = torch.cat(pieces).split(self.lengths)
            return [parts[position].clone() for position in chosen]

        return Encoded(
            tokens={layer: pick(pieces) for layer, pieces in self.tokens.items()},
            lengths=[self.lengths[position] for position in chosen],
            finite=self.finite[keep],
            cls={layer: vectors[keep] for layer, vectors in self.cls.items()},
            weights=pick(self.weights) if self.weights else [],
            counts=self.counts,
        )


class Preparer(Protocol):
    """The part of a backbone's work that needs no model; it runs in worker processes."""

    def one(self, raw: Any) -> Any:
        """Prepare one item; raise `BadItemError` if it cannot be used."""

    def pack(self, prepared: list[Any]) -> Any:
        """Put prepared items together, in few tensors, for the way to the main process."""


class Backbone(ABC):
    """A frozen model.

    Attributes
    ----------
    layers
        Dimension of every layer that is given, by its number: 0 is the input of the first block, k the output of
        block k.
    group
        Items that are taken together: sorted, dealt into batches. The batches, and so the bytes that come out,
        depend on this number, never on timing or on where a run was broken off.
    unit, unit_bytes
        Items that a worker prepares at a time, and the most that they can weigh.
    """

    kind: ClassVar[Kind]
    layers: Mapping[int, int]
    has_cls: bool = False
    group: int = 256
    unit: int = 256
    unit_bytes: int = 64 * 2**20
    device: torch.device
    preparer: Preparer

    @abstractmethod
    def encode(self, units: Sequence[Any], dtype: str) -> Encoded:
        """Encode the items of some packed units, in order; `dtype` is the store's."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the manifest's notes on the model."""

    def preprocessing(self) -> dict[str, Any]:
        """Return the manifest's notes on what was done to the items before the model saw them."""
        return {}


def resolve_layers(layers: Sequence[int] | None, depth: int) -> list[int]:
    """Check layer numbers, counting negative ones from the end; None is the last.

    Examples
    --------
    >>> resolve_layers([6, -1], 12)
    [6, 12]
    """
    chosen = [depth] if not layers else [layer + depth + 1 if layer < 0 else layer for layer in layers]
    for layer, given in zip(chosen, layers or chosen, strict=True):
        if not 0 <= layer <= depth:
            raise ValueError(f"layers: expected numbers from 0 to {depth}, the model's depth, but got {given}")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"layers: expected every layer once but got {list(layers or ())}")
    return sorted(chosen)


def check_choice(name: str, value: str, choices: Any) -> None:
    """Refuse a value that is not one of a Literal's."""
    if value not in get_args(choices):
        raise ValueError(f"{name}: expected one of {get_args(choices)} but got {value!r}")


def finite_items(stored: Tensor, lengths: Tensor) -> Tensor:
    """Say for each item of a flat ``(T, d)`` tensor whether all its values are finite, on the tensor's device."""
    rows = torch.isfinite(stored).all(dim=1)
    items = torch.repeat_interleave(torch.arange(len(lengths), device=rows.device), lengths)
    bad = torch.zeros(len(lengths), dtype=torch.int64, device=rows.device).index_add_(0, items, (~rows).long())
    return bad == 0


def stored_type(dtype: str) -> torch.dtype:
    """Return the torch type of a store's type name."""
    return DTYPES[dtype]


__all__ = [
    "Backbone",
    "BadItemError",
    "Encoded",
    "Norm",
    "Precision",
    "Preparer",
    "check_choice",
    "finite_items",
    "resolve_layers",
    "stored_type",
]
