"""Any HDF5 or NPZ file of point sets."""

import os
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cswe._extras import require
from cswe.tokens.errors import BadItemError
from cswe.tokens.labels import LabelKind, Labels
from cswe.tokens.randomness import permutation, stratified_split
from cswe.tokens.sources.archives import open_zip, safe_members
from cswe.tokens.sources.base import Points, Source, split_number

_POINTS = ("points", "data", "tokens", "values", "x")
_OFFSETS = ("ptr", "offsets")
_LABELS = ("labels", "label", "y", "target")
_WEIGHTS = ("weights", "weight")
_MASKS = ("mask", "attention_mask")
_IDS = ("ids", "id")
_SPLITS = ("splits", "split")
_NUMBERS = "fiub"  # NumPy's letters for the kinds of types that are numbers


class PointSets(Source):
    """Point sets in one HDF5 or NPZ file.

    The arrays looked for are the points (``points``, ``data``, ``tokens``, ``values`` or ``x``): ``(n, N, d)``, or
    ``(T, d)`` with ``ptr`` or ``offsets`` of n + 1 numbers; and, if there, ``labels`` (integers ``(n,)``, real numbers,
    or 0/1 ``(n, C)``), ``weights`` and ``mask`` (or ``attention_mask``; 0 for padding, which is left out), both
    in the layout of the points, ``ids`` and ``splits`` (names). Other arrays are passed over, and named in `left_out`.

    Parameters
    ----------
    path
        The file. HDF5 is read item by item; NPZ, by its nature, is read at once.
    points
        Draw so many points from every set that has more.
    label_kind
        What the labels are, where their type does not say it.
    fractions
        Shares of validation and test, when the file has no splits.
    seed
        Decides points and split.
    """

    kind = "points"
    name = "point-sets"

    def __init__(
        self,
        path: str | Path,
        *,
        points: int | None = None,
        label_kind: LabelKind | None = None,
        fractions: tuple[float, float] = (0.1, 0.1),
        seed: int = 0,
    ) -> None:
        self._file = Path(path)
        self._in_memory = self._file.suffix.lower() == ".npz"
        self._arrays: dict[str, Any] | None = None
        self._process = os.getpid()
        arrays = self._open()
        self._points_name = _first(arrays, _POINTS)
        if self._points_name is None:
            raise ValueError(f"{path}: expected an array named one of {_POINTS} but got {sorted(arrays)}")
        shape, kind = arrays[self._points_name].shape, arrays[self._points_name].dtype
        offsets_name = _first(arrays, _OFFSETS)
        if len(shape) != (3 if offsets_name is None else 2) or kind.kind not in _NUMBERS:
            wanted = "(n, N, d)" if offsets_name is None else "(T, d), since there are offsets"
            raise ValueError(
                f"{path}: expected {self._points_name} to be numbers of shape {wanted}, but got {kind} of shape {shape}"
            )
        self._offsets = None if offsets_name is None else _offsets(arrays[offsets_name], shape[0], offsets_name, path)
        self._weights_name, self._mask_name = _first(arrays, _WEIGHTS), _first(arrays, _MASKS)
        self.has_weights = self._weights_name is not None
        for name in (self._weights_name, self._mask_name):
            found, kind = (shape[:-1], kind) if name is None else (arrays[name].shape, arrays[name].dtype)
            if found != shape[:-1] or kind.kind not in _NUMBERS:
                raise ValueError(
                    f"{path}: expected {name} to be numbers of shape {shape[:-1]} but got {kind} of shape {found}"
                )
        count = shape[0] if self._offsets is None else len(self._offsets) - 1
        if not count:
            raise ValueError(f"{path}: expected sets but found none")
        labels = _labels(arrays, label_kind, count, self._file)
        ids_name, splits_name = _first(arrays, _IDS), _first(arrays, _SPLITS)
        ids = [str(number) for number in range(count)] if ids_name is None else _texts(arrays, ids_name, self._file)
        splits, self._split_is_given = _splits(arrays, splits_name, labels, count, fractions, seed, self._file)
        for name, length in (("ids", len(ids)), ("splits", len(splits))):
            if length != count:
                raise ValueError(f"{path}: expected {count} {name} but got {length}")
        super().__init__(ids, splits, labels, origin=self._file)
        self.dim = int(shape[-1])
        self._options: dict[str, Any] = {"points": points, "seed": seed}
        if not self._split_is_given:
            self._options["fractions"] = list(fractions)
        if self._mask_name is not None:
            self._options["mask"] = self._mask_name
        self._points, self._seed = points, seed
        used = {self._points_name, offsets_name, self._weights_name, self._mask_name, ids_name, splits_name}
        if others := sorted(set(arrays) - used - {_first(arrays, _LABELS)}):
            self.left_out = f"arrays that are none of those looked for: {', '.join(others)}"

    def _open(self) -> dict[str, Any]:
        if self._process != os.getpid() and not self._in_memory:  # forked: HDF5 handles cannot be shared
            self._arrays, self._process = None, os.getpid()
        if self._arrays is None:
            self._arrays = _open_npz(self._file) if self._in_memory else _open_hdf5(self._file)
        return self._arrays

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": None}

    def load(self, index: int) -> Points:
        """Return one set."""
        arrays, where = self._open(), self._where(index)
        try:
            points = np.asarray(arrays[str(self._points_name)][where], dtype=np.float32)
            weights = None
            if self._weights_name is not None:
                weights = np.asarray(arrays[self._weights_name][where], dtype=np.float32)
            mask = None if self._mask_name is None else np.asarray(arrays[self._mask_name][where])
        except OSError:
            raise BadItemError("cannot be read from its file") from None
        if mask is not None:
            if bool(((mask != 0) & (mask != 1)).any()):
                raise BadItemError("has a mask that is not of 0 and 1")
            valid = mask.astype(bool)
            points, weights = points[valid], None if weights is None else weights[valid]
        if not len(points):
            raise BadItemError("has no points")
        if not np.isfinite(points).all():
            raise BadItemError("has points that are not finite")
        if self._points is not None and len(points) > self._points:
            chosen = permutation(len(points), "points", self._seed, self.ids[index])[: self._points]
            points, weights = points[chosen], None if weights is None else weights[chosen]
        return Points(points, weights)

    def stamp(self, index: int) -> bytes | None:
        """Return the set itself, if the file is in memory."""
        if not self._in_memory:
            return None
        names = (self._points_name, self._weights_name, self._mask_name)
        return b"".join(self._open()[name][self._where(index)].tobytes() for name in names if name is not None)

    def _where(self, index: int) -> int | slice:
        return index if self._offsets is None else slice(int(self._offsets[index]), int(self._offsets[index + 1]))

    def locate(self, index: int) -> str:
        """Say in which file a set lies."""
        return f"{self._file}, set {index}"

    def options(self) -> dict[str, Any]:
        """Return the choices made."""
        return self._options


def _first(arrays: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in arrays), None)


def _texts(arrays: dict[str, Any], name: str, file: Path) -> list[str]:
    texts = []
    for entry in np.asarray(arrays[name]).reshape(-1):
        try:
            texts.append(entry.decode() if isinstance(entry, bytes) else str(entry))
        except UnicodeDecodeError:
            raise ValueError(f"{file}: {name}: expected text in UTF-8 but got {bytes(entry)!r}") from None
    return texts


def _offsets(array: Any, total: int, name: str, file: object) -> npt.NDArray[np.int64]:
    offsets = np.asarray(array)
    if (
        offsets.ndim != 1
        or not len(offsets)
        or offsets.dtype.kind not in "iu"
        or offsets[0] != 0
        or offsets[-1] != total
        or bool((np.diff(offsets.astype(np.int64)) < 0).any())
    ):
        raise ValueError(f"{file}: expected {name}, whole numbers, to rise from 0 to {total} but it does not")
    return offsets.astype(np.int64)


def _splits(
    arrays: dict[str, Any],
    name: str | None,
    labels: Labels,
    count: int,
    fractions: tuple[float, float],
    seed: int,
    file: Path,
) -> tuple[npt.NDArray[np.uint8], bool]:
    if name is not None:
        texts = _texts(arrays, name, file)
        numbers = {text: split_number(text, file) for text in sorted(set(texts))}
        return np.array([numbers[text] for text in texts], dtype=np.uint8), True
    strata = np.zeros(count, dtype=np.int64)
    if labels.spec.kind == "class" and labels.values is not None:
        strata = labels.values.numpy()
    return stratified_split(strata, (1 - sum(fractions), *fractions), seed), False


def _labels(arrays: dict[str, Any], kind: LabelKind | None, count: int, file: Path) -> Labels:
    name = _first(arrays, _LABELS)
    if name is None or kind == "none":
        return Labels()
    values = np.asarray(arrays[name])
    if values.ndim == 0 or len(values) != count:
        raise ValueError(f"{file}: expected {count} {name} but got shape {values.shape}")
    columns = values.reshape(count, -1)
    text = columns.dtype.kind in "SUO"
    if not text and columns.dtype.kind not in _NUMBERS:
        raise ValueError(f"{file}: {name}: expected numbers or text but got {columns.dtype}")
    names = _texts(arrays, name, file) if text else []
    if kind is None:
        one = text or columns.shape[1] == 1
        kind = "real" if columns.dtype.kind == "f" else "class" if one else "multilabel"
    try:
        if kind == "real":
            return Labels.real(columns)
        if kind == "multilabel":
            return Labels.from_table(columns)
        if columns.shape[1] != 1:
            raise ValueError(f"{name}: expected one class an item, shape ({count},), but got {values.shape}")
        if text:
            return Labels.from_names(names)
        with np.errstate(invalid="ignore"):  # of NaN
            whole = columns.astype(np.int64)
        if bool((whole != columns).any()):
            raise ValueError(
                f"{name}: expected class numbers but got numbers that are not whole; is --label-kind real meant?"
            )
        return Labels.classes(whole)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _open_npz(file: Path) -> dict[str, Any]:
    with open_zip(file) as archive:
        # Not the limits of images: arrays are large, and a constant one packs well. But all of them must fit.
        size = sum(member.file_size for member in safe_members(archive, of_images=False))
    if size > _memory():
        raise ValueError(f"{file}: holds {size / 2**30:.1f} GiB, more than this machine's memory; use HDF5 instead")
    try:
        # No pickles: an object array is refused.
        with np.load(file, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
    except (ValueError, OSError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{file}: expected plain arrays but {error}; write it again") from None
    return {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}


def _memory() -> int:
    """Bytes of memory that the machine has; no limit where it does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return sys.maxsize


def _open_hdf5(file: Path) -> dict[str, Any]:
    h5py = require("h5py", "data")
    try:
        content = h5py.File(file, "r")
    except OSError as error:
        raise ValueError(f"{file}: expected an HDF5 file but it cannot be read ({error})") from None
    # A null dataset, which has a type and no values, counts as not there.
    return {
        name: array for name, array in content.items() if isinstance(array, h5py.Dataset) and array.shape is not None
    }
