"""One shard: a safetensors file of flat tokens and offsets, written in one step and checked when read."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cswe.tokens.errors import ForeignShardError, TokenStoreError
from cswe.tokens.manifest import DTYPES, ShardEntry, StoreSpec, not_written, sync_folder

_NAMES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint8: "U8",
}


# Pieces are written in blocks of about this many bytes; what is larger, as it is.
_BLOCK = 4 * 2**20


@dataclass
class Columns:
    """What is kept of some consecutive items, column by column.

    Token columns are lists of pieces, so that a shard is never copied into one tensor to be written. Only `extend`
    adds to them: `size`, the bytes of tokens held, is counted as they come, since it is asked for after every item.
    """

    tokens: dict[int, list[Tensor]]
    lengths: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    splits: list[int] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    cls: dict[int, list[Tensor]] = field(default_factory=dict)
    weights: list[Tensor] = field(default_factory=list)
    skipped: list[Mapping[str, str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(piece.nbytes for pieces in self.tokens.values() for piece in pieces)

    @classmethod
    def empty(cls, spec: StoreSpec) -> "Columns":
        """Return columns without items."""
        layers = list(spec.layers)
        return cls({layer: [] for layer in layers}, cls={layer: [] for layer in layers} if spec.cls else {})

    def extend(self, other: "Columns") -> None:
        """Append the items of `other`."""
        self.size += other.size
        for layer, pieces in other.tokens.items():
            self.tokens[layer] += pieces
        for layer, pieces in other.cls.items():
            self.cls[layer] += pieces
        self.lengths += other.lengths
        self.ids += other.ids
        self.splits += other.splits
        self.labels += other.labels
        self.weights += other.weights
        self.skipped += other.skipped
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count


def write_shard(store: Path, spec: StoreSpec, columns: Columns, *, number: int, first: int, stop: int) -> ShardEntry:
    """Write a shard aside and rename it into place; return its entry for the manifest."""
    entry = ShardEntry(
        number=number,
        size=0,
        sha256="",
        items=len(columns.lengths),
        tokens=sum(columns.lengths),
        first=first,
        stop=stop,
        skipped=tuple(columns.skipped),
        counts=dict(columns.counts),
    )
    file = store / entry.file
    aside = file.with_name(file.name + ".partial")
    checksum = hashlib.sha256()
    size = 0
    try:
        file.parent.mkdir(exist_ok=True)
        with aside.open("wb") as stream, ThreadPoolExecutor(1) as hasher:
            for block in _blocks(spec, columns, number):
                # The disk and the checksum take about as long as each other: they work side by side.
                hashed = hasher.submit(checksum.update, block)
                stream.write(block)
                hashed.result()
                size += len(block)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(file)
        sync_folder(file.parent)
    except OSError as error:
        free = shutil.disk_usage(store).free
        needed = f"it needs about {columns.size / 2**20:.1f} MiB and {free / 2**20:.1f} MiB are free: "
        raise not_written(file, error, aside, needed) from error
    return ShardEntry(**{**vars(entry), "size": size, "sha256": checksum.hexdigest()})


def _blocks(spec: StoreSpec, columns: Columns, number: int) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file.

    The file is put together here rather than by the safetensors library for two reasons: the pieces go to the
    disk as they are, without a second copy in memory, and the bytes cannot change with the library's version.
    """
    offsets = torch.zeros(len(columns.lengths) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(columns.lengths, dtype=torch.int64), 0, out=offsets[1:])
    names, name_offsets = _pack_text(columns.ids)
    dtype = DTYPES[spec.dtype]
    tensors: list[tuple[str, tuple[int, ...], torch.dtype, Sequence[Tensor]]] = [
        ("offsets", tuple(offsets.shape), torch.int64, [offsets]),
        ("id_offsets", tuple(name_offsets.shape), torch.int64, [name_offsets]),
    ]
    if spec.labels.kind != "none":
        shape = (len(columns.lengths),) + (() if spec.labels.kind == "class" else (spec.labels.width,))
        tensors.append(("labels", shape, spec.labels.dtype, columns.labels))
    if spec.weights:
        tensors.append(("weights", (int(offsets[-1]),), torch.float32, columns.weights))
    for layer, dim in sorted(spec.layers.items()):
        tensors.append((f"tokens.{layer}", (int(offsets[-1]), dim), dtype, columns.tokens[layer]))
        if spec.cls:
            tensors.append((f"cls.{layer}", (len(columns.lengths), dim), dtype, columns.cls[layer]))
    splits = torch.tensor(columns.splits, dtype=torch.uint8)
    tensors.append(("splits", tuple(splits.shape), torch.uint8, [splits]))
    tensors.append(("ids", tuple(names.shape), torch.uint8, [names]))
    # Wide types first: every tensor then starts at a multiple of its own item size.
    tensors.sort(key=lambda tensor: (-tensor[2].itemsize, tensor[0]))

    header: dict[str, Any] = {"__metadata__": {"cswe": json.dumps({"store": spec.key, "shard": number})}}
    position = 0
    for name, shape, kind, pieces in tensors:
        size = torch.Size(shape).numel() * kind.itemsize
        held = sum(piece.nbytes for piece in pieces)
        if held != size or any(piece.dtype != kind for piece in pieces):
            raise ValueError(f"{name}: expected {size} bytes of {kind} for shape {shape} but got {held}")
        header[name] = {"dtype": _NAMES[kind], "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, _, _, pieces in tensors:
        for piece in _joined(pieces):
            yield piece.view(torch.uint8).numpy().data


def _joined(pieces: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the pieces flat, small ones put together: each is checksummed and written on its own, which takes time."""
    held: list[Tensor] = []
    size = 0
    for piece in pieces:
        if held and size + piece.nbytes > _BLOCK:
            yield _one(held)
            held, size = [], 0
        if piece.numel():
            held.append(piece.reshape(-1))
            size += piece.nbytes
    if held:
        yield _one(held)


def _one(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _pack_text(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    encoded = [text.encode() for text in texts]
    offsets = torch.zeros(len(texts) + 1, dtype=torch.int64)
    offsets[1:] = torch.tensor(list(map(len, encoded)), dtype=torch.int64).cumsum(0)
    flat = np.frombuffer(b"".join(encoded), dtype=np.uint8).copy()
    return torch.from_numpy(flat), offsets


class Shard:
    """A shard on disk, memory-mapped: only what is touched is read."""

    def __init__(self, store: Path, spec: StoreSpec, entry: ShardEntry) -> None:
        self.file = store / entry.file
        self.entry = entry
        self._of = store.absolute(), spec  # another process may be in another folder
        self._handle = open_checked(store, spec, entry)
        self._maps: dict[str, Tensor] = {}
        self.offsets = self._column("offsets").numpy()
        self.splits = self._column("splits").numpy()
        self.labels = self._column("labels") if spec.labels.kind != "none" else None
        tokens = {layer: self._handle.get_slice(f"tokens.{layer}").get_shape() for layer in spec.layers}
        in_order = self.offsets[0] == 0 and bool(np.all(np.diff(self.offsets) >= 0))
        if not in_order or any(shape != [self.offsets[-1], spec.layers[layer]] for layer, shape in tokens.items()):
            raise TokenStoreError(f"{self.file}: was altered: its offsets do not fit its tokens; {REMAKE}")

    def __reduce__(self) -> tuple[Any, ...]:
        # A map cannot travel to another process: there the file is opened, and checked, again.
        return Shard, (*self._of, self.entry)

    def _column(self, name: str) -> Tensor:
        column = self._handle.get_tensor(name)
        # Small columns are copied: they are used for the store's whole life, and a copy cannot be changed beneath us.
        return torch.as_tensor(column).clone()

    def _mapped(self, name: str) -> Tensor:
        if name not in self._maps:
            self._maps[name] = self._handle.get_tensor(name)
        return self._maps[name]

    def tokens(self, layer: int) -> Tensor:
        """Return all tokens of a layer, ``(tokens, dim)``, mapped from the file."""
        return self._mapped(f"tokens.{layer}")

    def cls(self, layer: int) -> Tensor:
        """Return the CLS vectors of a layer, ``(items, dim)``, mapped from the file."""
        return self._mapped(f"cls.{layer}")

    def weights(self) -> Tensor:
        """Return the token weights, ``(tokens,)``, mapped from the file."""
        return self._mapped("weights")

    def ids(self) -> list[str]:
        """Return the ids of all items."""
        flat = self._handle.get_tensor("ids").numpy().tobytes()
        offsets = self._handle.get_tensor("id_offsets").tolist()
        return [flat[start:stop].decode() for start, stop in pairwise(offsets)]


REMAKE = (
    "where an extraction made this shard, the same `cswe extract` with --resume makes it again; "
    "`cswe inspect --skip-bad` goes on without its items"
)


def open_checked(store: Path, spec: StoreSpec, entry: ShardEntry) -> Any:
    """Open a shard after the checks that cost nothing: that it is there, whole, and ours."""
    file = store / entry.file
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        raise TokenStoreError(f"{file}: this shard is missing ({entry.items} items); {REMAKE}") from None
    whole = size == entry.size
    try:
        handle = safe_open(file, framework="pt")
        store_key, number = _marks(handle)
    except _NOT_A_SHARD as error:
        if not whole:
            raise TokenStoreError(_truncated(file, entry, size)) from None
        raise TokenStoreError(f"{file}: was altered: it is no shard any more ({error}); {REMAKE}") from None
    if store_key != spec.key:
        raise ForeignShardError(
            f"{file}: is a shard of another store (it says {store_key}, this store is {spec.key}); "
            f"move it away; {REMAKE}"
        )
    if number != entry.number:
        raise ForeignShardError(
            f"{file}: is shard {number} of this store under the name of shard {entry.number}; move it away; {REMAKE}"
        )
    if not whole:
        raise TokenStoreError(_truncated(file, entry, size))
    return handle


_NOT_A_SHARD = (SafetensorError, KeyError, ValueError, TypeError)


def _marks(handle: Any) -> tuple[str, int]:
    metadata = json.loads((handle.metadata() or {})["cswe"])
    return metadata["store"], metadata["shard"]


def written_in(file: Path) -> tuple[str, int] | None:
    """Return the key of the store that a shard was written for, and its number there; None for any other file."""
    try:
        return _marks(safe_open(file, framework="pt"))
    except (*_NOT_A_SHARD, OSError):
        return None


def check_bytes(store: Path, spec: StoreSpec, entry: ShardEntry) -> None:
    """Check every byte of a shard against the manifest; raise an error that names the file if one differs."""
    open_checked(store, spec, entry)
    file = store / entry.file
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != entry.sha256:
        raise TokenStoreError(
            f"{file}: was altered after it was written (expected SHA-256 {entry.sha256[:16]}… but got {found[:16]}…); "
            f"{REMAKE}"
        )


def _truncated(file: Path, entry: ShardEntry, size: int) -> str:
    word = "cut short" if size < entry.size else "too long"
    return f"{file}: is {word}: expected {entry.size} bytes but got {size}; {REMAKE}"
