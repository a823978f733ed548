"""Filling a store: one shard after another, each in place before the manifest names it."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from cswe.tokens.errors import TokenStoreError
from cswe.tokens.manifest import DTYPES, MANIFEST, SHARDS, Manifest, StoreSpec
from cswe.tokens.shards import Columns, write_shard


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
        One positive number a token, ``(N,)``.
    """

    tokens: Tensor | dict[int, Tensor]
    label: Any = None
    id: str = ""
    split: str = "train"
    cls: Tensor | dict[int, Tensor] | None = None
    weights: Tensor | None = None


def pack_item(spec: StoreSpec, item: Item) -> Columns:
    """Check an item and turn it into columns of the store's types."""
    columns = Columns.empty(spec)
    name = f"item {item.id!r}"
    lengths = set()
    for layer, dim in spec.layers.items():
        tokens = _of_layer(item.tokens, layer, spec, f"{name}: tokens")
        if tokens.ndim != 2 or tokens.shape[1] != dim:
            raise ValueError(f"{name}: expected tokens of shape (N, {dim}) but got {tuple(tokens.shape)}")
        if not len(tokens):
            raise ValueError(f"{name}: expected at least one token but got none")
        lengths.add(len(tokens))
        columns.tokens[layer].append(to_stored(tokens, spec.dtype, f"{name}, layer {layer}"))
        if spec.cls:
            if item.cls is None:
                raise ValueError(f"{name}: expected a CLS vector of shape ({dim},) but got None")
            vector = _of_layer(item.cls, layer, spec, f"{name}: cls").reshape(1, -1)
            if vector.shape[1] != dim:
                raise ValueError(f"{name}: expected a CLS vector of shape ({dim},) but got ({vector.shape[1]},)")
            columns.cls[layer].append(to_stored(vector, spec.dtype, f"{name}, layer {layer}, CLS"))
    if len(lengths) != 1:
        raise ValueError(f"{name}: expected equally many tokens in every layer but got {sorted(lengths)}")
    columns.lengths = list(lengths)
    if spec.weights:
        if item.weights is None or item.weights.shape != (columns.lengths[0],):
            got = None if item.weights is None else tuple(item.weights.shape)
            raise ValueError(f"{name}: expected weights of shape ({columns.lengths[0]},) but got {got}")
        columns.weights.append(item.weights.detach().to("cpu", torch.float32).clone())
    if item.split not in spec.splits:
        raise ValueError(f"{name}: expected split to be one of {list(spec.splits)} but got {item.split!r}")
    labels = spec.labels.column([item.label])
    columns.labels = [] if labels is None else [labels]
    columns.splits = [spec.splits.index(item.split)]
    columns.ids = [item.id]
    return columns


def to_stored(values: Tensor, dtype: str, name: str) -> Tensor:
    """Turn values into the store's type on the CPU; refuse what that type cannot hold."""
    stored = values.detach().to("cpu", DTYPES[dtype])
    if not bool(torch.isfinite(stored).all()):
        if bool(torch.isfinite(values).all()):
            raise ValueError(
                f"{name}: a value of {float(values.abs().max()):.4g} is beyond {dtype}; use bfloat16 or float32"
            )
        raise ValueError(f"{name}: expected finite numbers but got NaN or infinity")
    # A view would keep the caller's memory alive, and follow the caller's changes.
    return stored.clone() if stored.data_ptr() == values.data_ptr() else stored.contiguous()


def _of_layer(values: Tensor | dict[int, Tensor], layer: int, spec: StoreSpec, name: str) -> Tensor:
    if isinstance(values, dict):
        if layer not in values:
            raise ValueError(f"{name}: expected layers {sorted(spec.layers)} but got {sorted(values)}")
        return torch.as_tensor(values[layer])
    if len(spec.layers) > 1:
        raise ValueError(f"{name}: expected a dict with layers {sorted(spec.layers)} but got one tensor")
    return torch.as_tensor(values)


class StoreWriter:
    """A store opened for writing, by one process at a time.

    Use it as a context manager. Shards are put in place as they fill; `finish` writes what is left and declares
    the store complete.

    Parameters
    ----------
    path
        The store's folder.
    spec
        What the store holds.
    manifest
        The manifest to go on from; None starts a new store.
    publish
        Whether the manifest names each shard as soon as it is there (an extraction, which can resume) or only
        at the end (an append, which is done entirely or not at all).
    """

    def __init__(self, path: Path, spec: StoreSpec, manifest: Manifest | None = None, *, publish: bool = True) -> None:
        self.path = path
        self.spec = spec
        self.manifest = manifest or Manifest(spec)
        self._publish = publish
        self._fresh = manifest is None
        self._lock: int | None = None
        self._columns = Columns.empty(spec)
        self._first = max((shard.stop for shard in (*self.manifest.shards, *self.manifest.dropped)), default=0)
        self._number = max((shard.number for shard in (*self.manifest.shards, *self.manifest.dropped)), default=-1) + 1

    def __enter__(self) -> "StoreWriter":
        if self._fresh and (self.path / MANIFEST).exists():
            raise TokenStoreError(f"{self.path}: holds a store already; use --resume, or choose another folder")
        if self._fresh and self.path.exists() and any(map(_is_foreign, self.path.iterdir())):
            raise TokenStoreError(f"{self.path}: expected an empty folder but there are files in it; choose another")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.path)
        (self.path / SHARDS).mkdir(exist_ok=True)
        for leftover in [*self.path.glob("*.partial"), *(self.path / SHARDS).glob("*.partial")]:
            leftover.unlink()
        if self._fresh:
            self.manifest.write(self.path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._publish:
            named = {shard.number for shard in Manifest.read(self.path).shards}
            for shard in self.manifest.shards:
                if shard.number not in named:
                    (self.path / shard.file).unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Let go of the lock. A forked worker calls this too, or the lock would outlive a killed parent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def add(self, item: Item) -> None:
        """Add one item."""
        self._columns.extend(pack_item(self.spec, item))
        if self._columns.size >= self.spec.shard_bytes:
            self.close_shard(self._first + len(self._columns.lengths))

    def add_all(self, items: Iterable[Item]) -> None:
        """Add many items."""
        for item in items:
            self.add(item)

    def add_columns(self, columns: Columns) -> bool:
        """Add items that are columns already; say whether the shard is full."""
        self._columns.extend(columns)
        return self._columns.size >= self.spec.shard_bytes

    def close_shard(self, stop: int, *, number: int | None = None, first: int | None = None) -> None:
        """Write the shard in hand: it covers the data set from where the last one ended up to `stop`."""
        at = self._number if number is None else number
        start = self._first if first is None else first
        columns, self._columns = self._columns, Columns.empty(self.spec)
        entry = write_shard(self.path, self.spec, columns, number=at, first=start, stop=stop)
        self.manifest = self.manifest.with_shard(entry)
        self._number = max(self._number, at + 1)
        self._first = max(self._first, stop)
        if self._publish:
            self.manifest.write(self.path)

    def finish(self) -> Manifest:
        """Write what is left and declare the store complete."""
        if self._columns.lengths:
            self.close_shard(self._first + len(self._columns.lengths))
        self.manifest = replace(self.manifest, complete=True)
        self.manifest.write(self.path)
        return self.manifest


def _is_foreign(entry: Path) -> bool:
    """Say whether a file is anything but what a writer leaves that was killed before it wrote the first manifest."""
    if entry.name == SHARDS and entry.is_dir():
        return any(entry.iterdir())
    return entry.name != f"{MANIFEST}.partial"


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
