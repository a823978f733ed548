"""What a data set is to an extraction: ids, labels and splits of all items, and one item at a time."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from cswe.tokens.labels import Labels

Kind = Literal["image", "sequence", "points"]
SPLITS = ("train", "validation", "test")
# What folders and tables call them.
SPLIT_NAMES = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "dev": 1, "test": 2, "testing": 2}


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
        A name for every item, an own one, the same whatever form the data set came in.
    splits
        The split of every item, numbers into `SPLITS`.
    labels
        The labels of all items.
    origin
        The file or folder, to be named in error messages.

    Attributes
    ----------
    left_out
        Which items of the file are not in the data set, in words, if any are not.
    """

    kind: ClassVar[Kind]
    name: ClassVar[str]
    licence: str = ""
    dim: int = 0
    has_weights: bool = False
    left_out: str = ""

    def __init__(
        self, ids: Sequence[str], splits: npt.NDArray[np.uint8], labels: Labels, *, origin: str | Path | None = None
    ) -> None:
        where = origin or self.name
        if not len(ids):
            raise ValueError(f"{where}: expected items but found none")
        refuse_bad_ids(ids, where)
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

    def stamp(self, index: int) -> bytes | None:
        """Return what changes when a raw item does; None where that is not known without reading the item.

        Known are items that are in memory, and the sizes of files, with checksums where a zip has them. So it is not
        noticed when an HDF5 file is replaced, or an image of a folder by another of equally many bytes.
        """
        return None

    def content(self, first: int, stop: int) -> str:
        """Return a fingerprint of the items from `first` to `stop`; an empty one where an item has no stamp."""
        checksum = hashlib.sha256()
        for index in range(first, stop):
            stamp = self.stamp(index)
            if stamp is None:
                return ""
            checksum.update(len(stamp).to_bytes(8, "little") + stamp)
        return checksum.hexdigest()[:32]

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


def split_number(name: str, where: object) -> int:
    """Return the number of a split, by any of its usual names.

    Examples
    --------
    >>> split_number("Val", "labels.csv")
    1
    """
    number = SPLIT_NAMES.get(name.strip().lower())
    if number is None:
        raise ValueError(f"{where}: expected the split to be one of {SPLITS} but got {name!r}")
    return number


def refuse_bad_ids(ids: Sequence[str], where: object) -> None:
    """Refuse names that come twice, since an item is known by its name, or that cannot be written down."""
    seen: set[str] = set()
    for name in ids:
        if name in seen:
            raise ValueError(f"{where}: expected every id once but {name!r} comes again; give each item its own")
        seen.add(name)
        try:
            name.encode()
        except UnicodeEncodeError:  # a file name in an old encoding
            raise ValueError(f"{where}: expected names in UTF-8 but got {name!r}; rename it") from None
