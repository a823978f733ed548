"""Sets to embed, in batches: from a store, or raw through the backbone that a model was trained on."""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from cswe.tokens import Batch, Batches, TokenStore
from cswe.tokens.backbones.base import Backbone
from cswe.tokens.backbones.opening import BackboneOptions, open_backbone
from cswe.tokens.loading import Loaded, default_workers, load_units
from cswe.tokens.manifest import MANIFEST
from cswe.tokens.sources.base import Source
from cswe.tokens.sources.opening import Format, SourceOptions, open_source
from cswe.training.data import check_backbone, items_of, open_store
from cswe.training.errors import UserError
from cswe.training.model import Facts


class Input(Protocol):
    """Sets of tokens with their ids, in order."""

    def __len__(self) -> int: ...

    def batches(self, batch_size: int, device: torch.device) -> Iterator[tuple[Batch, list[str]]]:
        """Yield batches, and the ids of their sets."""


@dataclass
class StoreInput:
    """The items of a store, of one split or of all."""

    store: TokenStore
    split: str | None = None

    def __post_init__(self) -> None:
        self.items = items_of(self.store, self.split)

    def __len__(self) -> int:
        return len(self.items)

    def batches(self, batch_size: int, device: torch.device) -> Iterator[tuple[Batch, list[str]]]:
        """Yield batches; ids are read shard by shard, so that memory stays flat."""
        shard, names = None, list[str]()
        for batch in Batches(self.store, batch_size, indices=self.items, shuffle=False, device=device, resident=False):
            ids = []
            for index in batch.index.tolist():
                here, row = self.store.locate(index)
                if here is not shard:
                    shard, names = here, here.ids()
                ids.append(names[row])
            yield batch, ids


@dataclass
class RawInput:
    """A data set through a frozen backbone: what `cswe extract` would store, without storing it."""

    source: Source
    backbone: Backbone
    facts: Facts

    def __len__(self) -> int:
        return len(self.source)

    def batches(self, batch_size: int, device: torch.device) -> Iterator[tuple[Batch, list[str]]]:
        """Yield batches; items are encoded in the groups of an extraction, so that tokens are the same to the bit."""
        if batch_size < 1:
            raise UserError(f"batch_size: expected at least 1 but got {batch_size}")
        group = self.backbone.group
        waiting: list[_Encoded] = []
        with closing(self._encode([(at, min(at + group, len(self))) for at in range(0, len(self), group)])) as stream:
            for encoded in stream:
                waiting += encoded
                while len(waiting) >= batch_size:
                    yield _batch(waiting[:batch_size], device)
                    waiting = waiting[batch_size:]
        if waiting:
            yield _batch(waiting, device)

    def one(self, index: int) -> Batch:
        """Encode a single item."""
        with closing(self._encode([(index, index + 1)])) as stream:
            return _batch(next(stream), torch.device("cpu"))[0]

    def _encode(self, groups: list[tuple[int, int]]) -> "Generator[list[_Encoded], None, None]":
        """Yield the items of one group after another; workers load ahead over all of them."""
        backbone, unit = self.backbone, self.backbone.unit
        parts = [[(at, min(at + unit, stop)) for at in range(start, stop, unit)] for start, stop in groups]
        units = [entry for part in parts for entry in part]
        workers = default_workers(self.source, backbone.device, unit * 3 * 512 * 512) if len(units) > 1 else 0
        stream = load_units(self.source, backbone.preparer, units, workers=workers, in_worker=lambda: None)
        for (start, stop), part in zip(groups, parts, strict=True):
            yield self._encoded([next(stream) for _ in part], start, stop)

    def _encoded(self, loaded: list[Loaded], start: int, stop: int) -> "list[_Encoded]":
        spec, backbone, layer = self.facts.tokens, self.backbone, self.facts.layer
        for part in loaded:
            for index, reason in part.bad:
                raise UserError(f"{self.source.locate(index)}: {reason}; repair or remove it")
        encoded = backbone.encode([part.packed for part in loaded], spec.dtype)
        if not bool(encoded.finite.all()):
            index = start + int((~encoded.finite).nonzero()[0])
            raise UserError(f"{self.source.locate(index)}: gives values that {spec.dtype} cannot hold")
        tokens = torch.cat(encoded.tokens[layer]).split(encoded.lengths)
        weights = torch.cat(encoded.weights).split(encoded.lengths) if encoded.weights else None
        return [
            _Encoded(
                self.source.ids[start + row],
                tokens[row],
                None if weights is None else weights[row],
                encoded.cls[layer][row] if encoded.cls else None,
            )
            for row in range(stop - start)
        ]


@dataclass
class _Encoded:
    id: str
    tokens: Tensor
    weights: Tensor | None
    cls: Tensor | None


def _batch(sets: list[_Encoded], device: torch.device) -> tuple[Batch, list[str]]:
    """Pad sets as a store's batches do."""
    lengths = torch.tensor([len(entry.tokens) for entry in sets])
    longest = int(lengths.max())
    padded = torch.nn.utils.rnn.pad_sequence([entry.tokens for entry in sets], batch_first=True)
    weights = [entry.weights for entry in sets if entry.weights is not None]
    cls = [entry.cls for entry in sets if entry.cls is not None]
    batch = Batch(
        tokens=padded,
        mask=None if bool((lengths == longest).all()) else torch.arange(longest) < lengths.unsqueeze(1),
        ptr=None,
        labels=None,
        weights=torch.nn.utils.rnn.pad_sequence(weights, batch_first=True) if weights else None,
        cls=torch.stack(cls) if cls else None,
        index=torch.arange(len(sets)),
    )
    return batch.to(device, torch.float32), [entry.id for entry in sets]


def open_input(
    path: str | Path,
    facts: Facts,
    *,
    split: str | None = None,
    format: Format | None = None,
    backbone: str | None = None,
    device: str | None = None,
) -> StoreInput | RawInput:
    """Open what is to be embedded.

    Parameters
    ----------
    path
        A token store; or a data set, any that `cswe extract` takes (``digits``: scikit-learn's).
    facts
        The model's, which name the backbone and how items were prepared.
    split
        Of a store: which items; None for all.
    format
        Of a data set: what it is, if that cannot be told from names and contents.
    backbone
        Where the backbone is, if it is not on the hub under the name that the model knows.
    device
        Where the backbone runs.
    """
    if (Path(path) / MANIFEST).exists():
        return StoreInput(open_store(path, facts), split)
    if split is not None:
        raise UserError(f"split: {path} is no token store, and all of it is taken; leave out --split")
    return _open_raw(Path(path), facts, format, backbone, device)


def _open_raw(path: Path, facts: Facts, format: Format | None, backbone: str | None, device: str | None) -> RawInput:
    spec = facts.tokens
    known: dict[str, Any] = dict(spec.data.get("options", {}))
    # Labels are not looked at: a table needs none, and no item is left out for having none or several.
    names = ("seed", "points", "ink")
    options = SourceOptions(label_kind="none", **{name: known[name] for name in names if known.get(name) is not None})
    digits = format == "digits" or (str(path) == "digits" and not path.exists())
    source = open_source(() if digits else path, "digits" if digits else format, options)
    if source.has_weights != spec.weights:
        had = "had weights" if spec.weights else "had none"
        raise UserError(f"{path}: expected sets like those the model was trained on, which {had}")
    name = backbone or spec.backbone.get("name")
    if not name:
        raise UserError("backbone: the model does not know what made its tokens; extract a store, and embed that")
    opened = open_backbone(str(name), source, _backbone_options(facts, device))
    check_backbone(facts, opened.describe(), opened.preprocessing(), "backbone")
    return RawInput(source, opened, facts)


def _backbone_options(facts: Facts, device: str | None) -> BackboneOptions:
    notes, prepared = facts.tokens.backbone, facts.tokens.preprocessing
    options: dict[str, Any] = {"device": device}
    if notes.get("name") != "identity":
        options["layers"] = (facts.layer,)
    if notes.get("norm") == "none":
        options["norm"] = "none"
    revision = notes.get("revision")
    if revision and revision != "unknown" and not str(revision).startswith("sha256:"):
        options["revision"] = revision
    for source, name in ((notes, "precision"), (notes, "batch_tokens"), (prepared, "long"), (prepared, "max_length")):
        if name in source:
            options[name] = source[name]
    return BackboneOptions(**options)
