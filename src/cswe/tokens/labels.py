"""Labels: one class, several, real numbers, or none."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

LabelKind = Literal["none", "class", "multilabel", "real"]


@dataclass(frozen=True)
class LabelSpec:
    """What the labels of a store are.

    Parameters
    ----------
    kind
        ``"class"``: one class, a number. ``"multilabel"``: any of several classes, 0/1 for each.
        ``"real"``: `width` real numbers. ``"none"``: no labels.
    names
        Names of the classes, or of the real numbers.
    width
        Numbers per item where there are several: classes of a multi-label set, outputs of a regression.
    """

    kind: LabelKind = "none"
    names: tuple[str, ...] = ()
    width: int = 1

    def __post_init__(self) -> None:
        if self.kind not in get_args(LabelKind):
            raise ValueError(f"label kind: expected one of {get_args(LabelKind)} but got {self.kind!r}")
        if self.kind == "multilabel" and self.names and self.width != len(self.names):
            raise ValueError(f"width: expected {len(self.names)}, one for each name, but got {self.width}")

    @property
    def dtype(self) -> torch.dtype:
        """The type that labels are stored as."""
        return {"class": torch.int64, "multilabel": torch.uint8}.get(self.kind, torch.float32)

    def column(self, values: Sequence[Any]) -> Tensor | None:
        """Turn the labels of some items into the tensor that is stored.

        Examples
        --------
        >>> LabelSpec("multilabel", ("a", "b"), 2).column([[1, 0], [1, 1]])
        tensor([[1, 0],
                [1, 1]], dtype=torch.uint8)
        """
        if self.kind == "none":
            return None
        width = 1 if self.kind == "class" else self.width
        numbers = [as_numbers(value).reshape(-1) for value in values]
        if wrong := [row for row in numbers if len(row) != width]:
            raise ValueError(f"label: expected {width} numbers an item but got {len(wrong[0])}")
        return self.check(torch.stack(numbers) if numbers else torch.empty(0, width, dtype=self.dtype))

    def check(self, column: Tensor) -> Tensor:
        """Refuse labels, ``(n,)`` or ``(n, width)``, that this kind does not have; return them as they are stored."""
        if self.kind == "class" and column.is_floating_point() and column.numel():
            raise ValueError(f"label: expected class numbers but got {column.dtype}; is the kind 'real' meant?")
        column = column.reshape(-1).to(torch.int64) if self.kind == "class" else column
        if self.kind == "class" and len(column):
            low, high = int(column.min()), int(column.max())
            if low < 0 or (self.names and high >= len(self.names)):
                top = f"below {len(self.names)}" if self.names else "from 0 on"
                raise ValueError(f"label: expected class numbers {top} but got {low if low < 0 else high}")
        if self.kind == "multilabel":
            _first_wrong(column, (column == 0) | (column == 1), "0 or 1 for every class")
        stored = column.to(self.dtype)
        if self.kind == "real":
            _first_wrong(column, torch.isfinite(stored), "finite numbers that float32 can hold")
        return stored

    def to_json(self) -> dict[str, Any]:
        """Return the form that goes into the manifest."""
        return {"kind": self.kind, "names": list(self.names), "width": self.width}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "LabelSpec":
        """Read the manifest's form."""
        return cls(data["kind"], tuple(data["names"]), int(data["width"]))


@dataclass(frozen=True)
class Labels:
    """The labels of a whole data set: what they are, and the values."""

    spec: LabelSpec = field(default_factory=LabelSpec)
    values: Tensor | None = None

    @classmethod
    def classes(cls, values: Sequence[int] | Any, names: Sequence[str] = ()) -> "Labels":
        """One class an item.

        Examples
        --------
        >>> Labels.classes([0, 1, 1], ["cat", "dog"]).spec.kind
        'class'
        """
        spec = LabelSpec("class", tuple(names))
        column = as_numbers(values)
        if column.ndim != 1 and (column.ndim != 2 or column.shape[1] != 1):
            raise ValueError(f"labels: expected one class an item, shape (n,), but got shape {tuple(column.shape)}")
        return cls(spec, spec.check(column))

    @classmethod
    def from_names(cls, values: Sequence[str]) -> "Labels":
        """One class an item, given by name; classes are numbered in the order of the alphabet.

        Examples
        --------
        >>> Labels.from_names(["dog", "cat", "dog"]).values
        tensor([1, 0, 1])
        """
        names = sorted(set(values))
        number = {name: position for position, name in enumerate(names)}
        return cls.classes([number[value] for value in values], names)

    @classmethod
    def from_sets(cls, values: Sequence[Sequence[str]]) -> "Labels":
        """Any number of classes an item, given by name.

        Examples
        --------
        >>> Labels.from_sets([["a"], ["a", "b"]]).values.tolist()
        [[1, 0], [1, 1]]
        """
        names = sorted({name for item in values for name in item})
        number = {name: position for position, name in enumerate(names)}
        table = torch.zeros(len(values), len(names), dtype=torch.uint8)
        for row, item in enumerate(values):
            for name in item:
                table[row, number[name]] = 1
        return cls(LabelSpec("multilabel", tuple(names), len(names)), table)

    @classmethod
    def from_table(cls, values: Any, names: Sequence[str] = ()) -> "Labels":
        """Any number of classes an item, given as 0/1, one column a class.

        Examples
        --------
        >>> Labels.from_table([[1, 0], [1, 1]], ["a", "b"]).spec.width
        2
        """
        table = as_numbers(values)
        if table.ndim != 2:
            raise ValueError(f"labels: expected a table of 0 and 1, (n, classes), but got shape {tuple(table.shape)}")
        spec = LabelSpec("multilabel", tuple(names), table.shape[1])
        return cls(spec, spec.check(table))

    @classmethod
    def real(cls, values: Any, names: Sequence[str] = ()) -> "Labels":
        """Real numbers, one or several an item.

        Examples
        --------
        >>> Labels.real([0.5, 1.5]).spec.width
        1
        """
        table = as_numbers(values)
        table = table.reshape(len(table), -1)
        spec = LabelSpec("real", tuple(names), table.shape[1])
        return cls(spec, spec.check(table))


def as_numbers(value: Any, name: str = "label", expected: str = "a number, or equally many for every item,") -> Tensor:
    """Turn a label, several, or other values of a caller's into a tensor; refuse what is not real numbers."""
    if isinstance(value, np.ndarray | np.generic):  # torch takes only the machine's own order of bytes, and arrays
        value = np.asarray(value, dtype=value.dtype.newbyteorder("="))
    try:
        numbers = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):  # torch's words for text, for None, for lists of unequal length
        text = " ".join(repr(value).split())[:80]
        raise ValueError(f"{name}: expected {expected} but got {text}") from None
    if numbers.layout is not torch.strided or numbers.is_nested:
        raise ValueError(f"{name}: expected a dense tensor but got a sparse or nested one; to_dense() or unbind() it")
    if numbers.is_complex():
        raise ValueError(f"{name}: expected real numbers but got {numbers.dtype}")
    return numbers


def _first_wrong(column: Tensor, good: Tensor, expected: str) -> None:
    if not bool(good.all()):
        raise ValueError(f"label: expected {expected} but got {column[~good][0].item():g}")
