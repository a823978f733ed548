"""The manifest of a store: how the tokens were made, and a checksum for every shard.

Nothing in it depends on when, where or by whom it was written, so that the same input gives the same bytes.
"""

import errno
import hashlib
import json
import operator
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from cswe.tokens.errors import TokenStoreError
from cswe.tokens.labels import LabelSpec

FORMAT = "cswe-tokens"
VERSION = 1
MANIFEST = "manifest.json"
SHARDS = "shards"

DTypeName = Literal["float16", "bfloat16", "float32"]
DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class StoreSpec:
    """What makes a store the store it is: two stores with equal specs hold parts of the same thing.

    Parameters
    ----------
    layers
        Number and dimension of every layer held, ``{6: 192, 12: 192}``. Layer 0 is the input of the first block.
    dtype
        How tokens are stored: ``"float16"``, ``"bfloat16"`` or ``"float32"``.
    labels
        What the labels are.
    splits
        Names of the splits.
    cls, weights
        Whether a CLS vector per item and layer, and a weight per token, are held.
    backbone, preprocessing, data
        Notes for people and for `resume`: which model, from what, how. No paths, no dates.
    shard_bytes
        A shard is closed when its tokens reach this size.
    """

    layers: Mapping[int, int]
    dtype: DTypeName = "float16"
    labels: LabelSpec = field(default_factory=LabelSpec)
    splits: tuple[str, ...] = ("train", "validation", "test")
    cls: bool = False
    weights: bool = False
    backbone: Mapping[str, Any] = field(default_factory=dict)
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    shard_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        if self.dtype not in get_args(DTypeName):
            raise ValueError(f"dtype: expected one of {get_args(DTypeName)} but got {self.dtype!r}")
        if not self.layers:
            raise ValueError("layers: expected at least one layer but got none")
        # As a file gives them back: a spec that reads otherwise than it was written would not know its own shards.
        layers = {_whole("layers", number): _whole("layers", dim) for number, dim in self.layers.items()}
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "shard_bytes", _whole("shard_bytes", self.shard_bytes))
        if min(self.layers.values()) < 1:
            raise ValueError(f"layers: expected dimensions of at least 1 but got {dict(self.layers)}")
        if not 0 < len(self.splits) < 256:
            raise ValueError(f"splits: expected 1 to 255 names but got {len(self.splits)}")
        if self.shard_bytes <= 0:
            raise ValueError(f"shard_bytes: expected a positive number but got {self.shard_bytes}")

    def to_json(self) -> dict[str, Any]:
        """Return the form that goes into the manifest."""
        return {
            "layers": [{"layer": number, "dim": dim} for number, dim in sorted(self.layers.items())],
            "dtype": self.dtype,
            "labels": self.labels.to_json(),
            "splits": list(self.splits),
            "cls": self.cls,
            "weights": self.weights,
            "backbone": dict(self.backbone),
            "preprocessing": dict(self.preprocessing),
            "data": dict(self.data),
            "shard_bytes": self.shard_bytes,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "StoreSpec":
        """Read the manifest's form."""
        return cls(
            layers={int(entry["layer"]): int(entry["dim"]) for entry in data["layers"]},
            dtype=data["dtype"],
            labels=LabelSpec.from_json(data["labels"]),
            splits=tuple(data["splits"]),
            cls=bool(data["cls"]),
            weights=bool(data["weights"]),
            backbone=data["backbone"],
            preprocessing=data["preprocessing"],
            data=data["data"],
            shard_bytes=int(data["shard_bytes"]),
        )

    @property
    def key(self) -> str:
        """A fingerprint; every shard carries it, so that a shard of another store is recognised."""
        return digest(self.to_json())[:32]

    def difference(self, other: "StoreSpec") -> str:
        """Say what differs between two specs, for an error message."""
        mine, theirs = (_flatten(as_read(spec.to_json())) for spec in (self, other))
        lines = [
            f"{name}: {mine.get(name)!r} there, {theirs.get(name)!r} now"
            for name in sorted({*mine, *theirs})
            if mine.get(name) != theirs.get(name)
        ]
        return "; ".join(lines[:5]) + ("; …" if len(lines) > 5 else "")


def _whole(name: str, value: Any) -> int:
    try:
        return int(operator.index(value))
    except TypeError:
        raise ValueError(f"{name}: expected whole numbers but got {value!r}") from None


def shard_file(number: int) -> str:
    """Say where a shard lies in a store."""
    return f"{SHARDS}/{number:05d}.safetensors"


@dataclass(frozen=True)
class ShardEntry:
    """One shard: its file's checksum, and which items of the data set it covers.

    `content` tells whether those items are still what they were; it is empty where that is not known.
    """

    number: int
    size: int
    sha256: str
    items: int
    tokens: int
    first: int
    stop: int
    skipped: tuple[Mapping[str, str], ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    damage: str = ""
    content: str = ""

    @property
    def file(self) -> str:
        """Where the shard lies, relative to the store. Never read from the manifest, so it cannot lead outside."""
        return shard_file(self.number)

    def to_json(self) -> dict[str, Any]:
        """Return the form that goes into the manifest."""
        entry: dict[str, Any] = {
            "file": self.file,
            "number": self.number,
            "bytes": self.size,
            "sha256": self.sha256,
            "items": self.items,
            "tokens": self.tokens,
            "first": self.first,
            "stop": self.stop,
            "skipped": [dict(entry) for entry in self.skipped],
            "counts": dict(sorted(self.counts.items())),
        }
        notes = {"content": self.content, "damage": self.damage}
        return entry | {name: note for name, note in notes.items() if note}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ShardEntry":
        """Read the manifest's form."""
        return cls(
            number=int(data["number"]),
            size=int(data["bytes"]),
            sha256=str(data["sha256"]),
            items=int(data["items"]),
            tokens=int(data["tokens"]),
            first=int(data["first"]),
            stop=int(data["stop"]),
            skipped=tuple(data["skipped"]),
            counts=data["counts"],
            damage=str(data.get("damage", "")),
            content=str(data.get("content", "")),
        )


@dataclass(frozen=True)
class Manifest:
    """A spec, the shards written so far, those dropped because they were damaged, and whether that is all."""

    spec: StoreSpec
    shards: tuple[ShardEntry, ...] = ()
    dropped: tuple[ShardEntry, ...] = ()
    complete: bool = False

    @property
    def begun(self) -> bool:
        """Whether there is anything that starting anew would lose."""
        return bool(self.shards or self.dropped or self.complete)

    @property
    def items(self) -> int:
        """Items in all shards."""
        return sum(shard.items for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens of one layer in all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def skipped(self) -> list[Mapping[str, str]]:
        """Items that could not be used, with the reason."""
        return [entry for shard in self.shards for entry in shard.skipped]

    @property
    def counts(self) -> dict[str, int]:
        """What the backbone counted while it ran: unusual residues, sequences cut and so on."""
        total: dict[str, int] = {}
        for shard in self.shards:
            for name, count in shard.counts.items():
                total[name] = total.get(name, 0) + count
        return dict(sorted(total.items()))

    def with_shard(self, entry: ShardEntry) -> "Manifest":
        """Return a manifest that has this shard, in its place."""
        others = [shard for shard in self.shards if shard.number != entry.number]
        dropped = tuple(shard for shard in self.dropped if shard.number != entry.number)
        shards = tuple(sorted([*others, entry], key=lambda shard: shard.number))
        return replace(self, shards=shards, dropped=dropped)

    def to_json(self) -> dict[str, Any]:
        """Return the whole manifest, its own checksum included."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "spec": self.spec.to_json(),
            "items": self.items,
            "tokens": self.tokens,
            "counts": self.counts,
            "shards": [shard.to_json() for shard in self.shards],
            "dropped": [shard.to_json() for shard in self.dropped],
            "complete": self.complete,
        }
        return content | {"sha256": digest(content)}

    def write(self, store: Path) -> None:
        """Replace the manifest of a store, in one step."""
        replace_file(store / MANIFEST, json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, store: str | Path) -> "Manifest":
        """Read and check the manifest of a store."""
        file = Path(store) / MANIFEST
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise TokenStoreError(
                f"{store}: expected a token store but there is no {MANIFEST} in it; "
                "make one with `cswe extract --out`, or with TokenStore.create"
            ) from None
        except NotADirectoryError:
            raise TokenStoreError(f"{store}: expected the folder of a token store but got a file") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise TokenStoreError(f"{file}: is damaged ({error}); {_RESTORE}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise TokenStoreError(f"{file}: expected the manifest of a token store but got something else")
        if data.get("version") != VERSION:
            raise TokenStoreError(
                f"{file}: expected format version {VERSION} but got {data.get('version')}; update cswe"
            )
        checksum = data.pop("sha256", None)
        if checksum != digest(data):
            raise TokenStoreError(f"{file}: was altered after it was written; {_RESTORE}")
        return cls(
            spec=StoreSpec.from_json(data["spec"]),
            shards=tuple(ShardEntry.from_json(entry) for entry in data["shards"]),
            dropped=tuple(ShardEntry.from_json(entry) for entry in data["dropped"]),
            complete=bool(data["complete"]),
        )


_RESTORE = "restore it from a copy, or extract into a new folder"


def as_read(data: Any) -> Any:
    """Return a JSON value as a file gives it back: a tuple becomes a list.

    Examples
    --------
    >>> as_read({"size": (224, 224)})
    {'size': [224, 224]}
    """
    return json.loads(json.dumps(data))


def digest(data: Any) -> str:
    """Return the SHA-256 of a JSON value, in a form that does not depend on the order of its keys."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def replace_file(file: Path, text: str) -> None:
    """Write a file aside, then put it in place: a reader sees the old one or the new one, whole."""
    aside = file.with_name(file.name + ".partial")
    try:
        with aside.open("w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(file)
    except OSError as error:
        raise not_written(file, error, aside) from error
    sync_folder(file.parent)


def not_written(file: Path, error: OSError, aside: Path | None = None, needed: str = "") -> TokenStoreError:
    """Say why a file or folder could not be written, and what to do; remove what is written aside of it."""
    if aside is not None:
        with suppress(OSError):  # where nothing can be written, nothing can be removed either
            aside.unlink(missing_ok=True)
    remedy = "see that files may be written there, or choose another folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = (
            f"{needed}free some space; an extraction, run again with --resume, goes on after the shards that are there"
        )
    return TokenStoreError(f"{file}: could not be written ({error.strerror}); {remedy}")


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flatten(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict):
        return {prefix: data}
    flat: dict[str, Any] = {}
    for name, value in data.items():
        flat |= _flatten(value, f"{prefix}.{name}" if prefix else name)
    return flat
