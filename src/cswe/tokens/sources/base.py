"""What a data set is to an extraction: ids, labels and splits of all items, and one item at a time."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from cswe.tokens.labels import Labels

Kind = Literal["image", "sequence", "points"]
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Points:
    """A set of points, ``(N, d)`` float32, and a weight for each, ``(N,)``, or None."""

    points: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32] | None = None


class Source(ABC):
    """A data set. Everything that is small is known at once; an item itself is loaded when it is asked for.

    Loading runs in worker processes: a source must be picklable, and must open files where it runs.

    Parameters
    ----------
    ids
        A name for every item, the same whatever form the data set came in.
    splits
        The split of every item, numbers into `SPLITS`.
    labels
        The labels of all items.
    """

    kind: ClassVar[Kind]
    name: ClassVar[str]
    licence: str = ""
    dim: int = 0
    has_weights: bool = False

    def __init__(self, ids: Sequence[str], splits: npt.NDArray[np.uint8], labels: Labels) -> None:
        if not len(ids):
            raise ValueError(f"{self.name}: expected items but found none")
        self.ids = ids
        self.splits = splits
        self.labels = labels

    def __len__(self) -> int:
        return len(self.ids)

    @abstractmethod
    def load(self, index: int) -> Any:
        """Load one item: a Pillow image, a string, or `Points`. Raise `BadItemError` if it cannot be used."""

    def locate(self, index: int) -> str:
        """Say where an item comes from, for an error message."""
        return self.ids[index]

    def options(self) -> dict[str, Any]:
        """Return the choices that decide what is in the data set, for the manifest."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Return the manifest's notes on the data set."""
        checksum = hashlib.sha256()
        for text in self.ids:
            checksum.update(text.encode() + b"\0")
        checksum.update(self.splits.tobytes())
        if self.labels.values is not None:
            checksum.update(self.labels.values.numpy().tobytes())
        notes: dict[str, Any] = {"name": self.name, "index": checksum.hexdigest()[:32]}
        if self.options():
            notes["options"] = self.options()
        if self.licence:
            notes["licence"] = self.licence
        return notes
