"""Filling a store: one shard after another, each in place before the manifest names it."""

import os
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from cswe.tokens.errors import TokenStoreError
from cswe.tokens.labels import as_numbers
from cswe.tokens.manifest import DTYPES, MANIFEST, SHARDS, Manifest, StoreSpec, not_written, shard_file
from cswe.tokens.shards import Columns, write_shard, written_in
from cswe.tokens.weights import faulty_weights


@dataclass
class Item:
    """One set of tokens and what is known about it.

    Parameters
    ----------
    tokens
        ``(N, d)``, or one such tensor for every layer of the store, ``{6: …, 12: …}``.
    label
        A class number, a 0/1 list, real numbers, or None, as the store's label kind says.
    id, split
        A name, and the name of a split.
    cls
        A vector for the whole set, ``(d,)``, or one for every layer.
    weights
        One number a token, ``(N,)``: finite, not negative, not all of them zero.
    """

    tokens: Tensor | dict[int, Tensor]
    label: Any = None
    id: str = ""
    split: str = "train"
    cls: Tensor | dict[int, Tensor] | None = None
    weights: Tensor | None = None


def pack_item(spec: StoreSpec, item: Item) -> Columns:
    """Check an item and turn it into columns of the store's types."""
    name = f"item {item.id!r}"
    _check_id(item.id, name)
    given = {"cls": item.cls, "weights": item.weights, "label": item.label}
    held = {"cls": spec.cls, "weights": spec.weights, "label": spec.labels.kind != "none"}
    for field, value in given.items():
        if value is not None and not held[field]:
            raise ValueError(f"{name}: expected no {field}, since the store holds none, as its first item had none")
        if value is None and held[field]:
            raise ValueError(f"{name}: expected a value for {field}, as every item of the store has, but got None")
    tokens: dict[int, list[Tensor]] = {}
    cls: dict[int, list[Tensor]] = {}
    lengths = set()
    for layer, dim in spec.layers.items():
        values = _of_layer(item.tokens, layer, spec, f"{name}: tokens")
        if values.ndim != 2 or values.shape[1] != dim:
            raise ValueError(f"{name}: expected tokens of shape (N, {dim}) but got {tuple(values.shape)}")
        if not len(values):
            raise ValueError(f"{name}: expected at least one token but got none")
        lengths.add(len(values))
        tokens[layer] = [to_stored(values, spec.dtype, f"{name}, layer {layer}")]
        if item.cls is not None:
            vector = _of_layer(item.cls, layer, spec, f"{name}: cls").reshape(1, -1)
            if vector.shape[1] != dim:
                raise ValueError(f"{name}: expected a CLS vector of shape ({dim},) but got ({vector.shape[1]},)")
            cls[layer] = [to_stored(vector, spec.dtype, f"{name}, layer {layer}, CLS")]
    if len(lengths) != 1:
        raise ValueError(f"{name}: expected equally many tokens in every layer but got {sorted(lengths)}")
    (length,) = lengths
    if item.split not in spec.splits:
        raise ValueError(f"{name}: expected split to be one of {list(spec.splits)} but got {item.split!r}")
    try:
        labels = spec.labels.column([item.label])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return Columns(
        tokens=tokens,
        lengths=[length],
        ids=[item.id],
        splits=[spec.splits.index(item.split)],
        labels=[] if labels is None else [labels],
        cls=cls,
        weights=[] if item.weights is None else [_weights(item.weights, length, name)],
    )


def _check_id(given: object, name: str) -> None:
    if not isinstance(given, str):
        raise TypeError(f"{name}: expected id to be text but got {type(given).__name__}")
    try:
        given.encode()
    except UnicodeEncodeError:  # a file name in an old encoding
        raise ValueError(f"{name}: expected an id that UTF-8 can hold") from None


def token_table(values: Any, name: str) -> Tensor:
    """Turn what a caller gave as tokens into a tensor; refuse, by name, what is not numbers."""
    return as_numbers(values, name, "a table of numbers")


def _weights(values: Tensor, length: int, name: str) -> Tensor:
    given = as_numbers(values, f"{name}: weights", "a number for every token")
    weights = given.detach().to("cpu", torch.float32).clone()
    if weights.shape != (length,):
        raise ValueError(f"{name}: expected weights of shape ({length},) but got {tuple(weights.shape)}")
    if fault := faulty_weights(weights.numpy()):
        raise ValueError(f"{name}: {fault}")
    return weights


def to_stored(values: Tensor, dtype: str, name: str) -> Tensor:
    """Turn values into the store's type on the CPU; refuse what that type cannot hold."""
    stored = values.detach().to("cpu", DTYPES[dtype])
    if not bool(torch.isfinite(stored).all()):
        if bool(torch.isfinite(values).all()):
            remedy = "; use bfloat16 or float32" if dtype == "float16" else ""
            raise ValueError(f"{name}: a value of {float(values.abs().max()):.4g} is beyond {dtype}{remedy}")
        raise ValueError(f"{name}: expected finite numbers but got NaN or infinity")
    # A view would keep the caller's memory alive, and follow the caller's changes.
    return stored.clone() if stored.data_ptr() == values.data_ptr() else stored.contiguous()


def _of_layer(values: Tensor | dict[int, Tensor], layer: int, spec: StoreSpec, name: str) -> Tensor:
    if isinstance(values, dict):
        if values.keys() != spec.layers.keys():
            raise ValueError(f"{name}: expected layers {sorted(spec.layers)} but got {sorted(values)}")
        return token_table(values[layer], name)
    if len(spec.layers) > 1:
        raise ValueError(f"{name}: expected a dict with layers {sorted(spec.layers)} but got one tensor")
    return token_table(values, name)


class StoreWriter:
    """A store opened for writing, by one process at a time.

    Use it as a context manager: inside, `manifest` is what the store's folder says, and no other process changes it.
    Shards are put in place as they fill; `finish` writes what is left and declares the store complete.

    Parameters
    ----------
    path
        The store's folder.
    spec
        What the store holds. None: the store is there already, and what it holds stays the same.
    resume
        Go on with a store that is there and that has this spec; otherwise one that is there is an error.
    publish
        Whether the manifest names each shard as soon as it is there (an extraction, which can resume) or only
        at the end (what is done entirely or not at all).
    """

    def __init__(
        self, path: str | Path, spec: StoreSpec | None = None, *, resume: bool = False, publish: bool = True
    ) -> None:
        self.path = Path(path)
        # Before the lock is held this is only a first look, to say at once what is wrong.
        self.spec = Manifest.read(path).spec if spec is None else spec
        self.manifest = Manifest(self.spec)
        self._resume = resume or spec is None
        self._publish = publish
        self._lock: int | None = None

    def __enter__(self) -> "StoreWriter":
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise TokenStoreError(f"{self.path}: expected a folder but got a file; choose another") from None
        except OSError as error:
            raise not_written(self.path, error) from error
        self._lock = _lock(self.path)
        try:
            self._begin()
        except BaseException:
            self.release()
            raise
        return self

    def _begin(self) -> None:
        """Find out what there is: under the lock, since another writer may have changed it up to then."""
        there = Manifest.read(self.path) if (self.path / MANIFEST).exists() else None
        if there is not None and there.begun:
            if not self._resume:
                raise TokenStoreError(f"{self.path}: holds a store already; use --resume, or choose another folder")
            if there.spec.key != self.spec.key:
                raise TokenStoreError(
                    f"{self.path}: cannot be resumed, since it was begun with other options or other data "
                    f"({there.spec.difference(self.spec)}); use the same, or another folder"
                )
            self.manifest = there
        leftovers = _leftovers(self.path, there)
        if self.manifest is not there:
            shards = self.path / SHARDS
            expected = {self.path / MANIFEST, *leftovers} | ({shards} if shards.is_dir() else set())
            if strange := {*self.path.iterdir(), *shards.glob("*")} - expected:
                fault = "expected an empty folder but there are files in it; choose another"
                if there is None and all(written_in(file) for file in strange):
                    fault = (
                        f"holds shards but no {MANIFEST}; restore it, or remove the folder if making it was broken off"
                    )
                raise TokenStoreError(f"{self.path}: {fault}")
        known = (*self.manifest.shards, *self.manifest.dropped)
        self.first = max((shard.stop for shard in known), default=0)
        self._number = max((shard.number for shard in known), default=-1) + 1
        self._columns = Columns.empty(self.spec)
        try:
            (self.path / SHARDS).mkdir(exist_ok=True)
            for leftover in leftovers:
                leftover.unlink()
        except OSError as error:
            raise not_written(self.path, error) from error
        if self._publish and not self.manifest.begun:
            self.manifest.write(self.path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._publish:
            named = Manifest.read(self.path).shards if (self.path / MANIFEST).exists() else ()
            for file in {shard.file for shard in self.manifest.shards} - {shard.file for shard in named}:
                with suppress(OSError):  # the error at hand says more; the next writer replaces what is left
                    (self.path / file).unlink(missing_ok=True)
        self.release()
        if error is None and self._columns.lengths:
            warnings.warn(
                f"{self.path}: the last {len(self._columns.lengths)} items added were not written, since finish() was "
                "not called after them",
                stacklevel=2,
            )

    def release(self) -> None:
        """Let go of the lock. A forked worker calls this too, or the lock would outlive a killed parent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def add(self, item: Item) -> None:
        """Add one item."""
        self._columns.extend(pack_item(self.spec, item))
        if self._columns.size >= self.spec.shard_bytes:
            self.close_shard(self.first + len(self._columns.lengths))

    def add_all(self, items: Iterable[Item]) -> None:
        """Add many items."""
        for item in items:
            self.add(item)

    def add_columns(self, columns: Columns) -> bool:
        """Add items that are columns already; say whether the shard is full."""
        self._columns.extend(columns)
        return self._columns.size >= self.spec.shard_bytes

    def close_shard(self, stop: int, *, number: int | None = None, first: int | None = None, content: str = "") -> None:
        """Write the shard in hand: it covers the data set from `first`, where the last one ended, up to `stop`."""
        at = self._number if number is None else number
        start = self.first if first is None else first
        entry = write_shard(self.path, self.spec, self._columns, number=at, first=start, stop=stop)
        # Only now: where a shard could not be written its items are still in hand, and the next try has them.
        self._columns = Columns.empty(self.spec)
        self.manifest = self.manifest.with_shard(replace(entry, content=content))
        self._number = max(self._number, at + 1)
        self.first = max(self.first, stop)
        if self._publish:
            self.manifest.write(self.path)

    def finish(self) -> Manifest:
        """Write what is left and declare the store complete."""
        if self._columns.lengths:
            self.close_shard(self.first + len(self._columns.lengths))
        self.manifest = replace(self.manifest, complete=True)
        self.manifest.write(self.path)
        return self.manifest


def _leftovers(folder: Path, there: Manifest | None) -> set[Path]:
    """Find what a writer left that was killed and had no time to name it: it is made again."""
    aside = {folder / f"{MANIFEST}.partial", *(folder / SHARDS).glob("[0-9]*.safetensors.partial")}
    first = folder / shard_file(0)
    # A shard is in place just before the manifest names it; where it is not the first, the next one replaces it.
    unnamed = there is not None and not there.begun and written_in(first) == (there.spec.key, 0)
    return {file for file in aside if file.exists()} | ({first} if unnamed else set())


def _lock(folder: Path) -> int | None:
    """Keep a second writer out; the system lets go of the lock when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # no such lock on this system
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise TokenStoreError(f"{folder}: another process is writing to this store; wait until it has ended") from None
    except OSError:  # a file system without locks
        pass
    return descriptor
