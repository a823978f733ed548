"""The token store: what a frozen backbone said about every item, on disk, memory-mapped."""

import operator
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cswe.tokens.errors import TokenStoreError
from cswe.tokens.labels import LabelKind, LabelSpec, as_numbers
from cswe.tokens.manifest import DTYPES, DTypeName, Manifest, ShardEntry, StoreSpec
from cswe.tokens.shards import Shard, check_bytes
from cswe.tokens.statistics import TokenStatistics, token_statistics
from cswe.tokens.writer import Item, StoreWriter, token_table

if TYPE_CHECKING:
    from cswe.tokens.batches import Batches


class TokenStore(Sequence[Item]):
    """A folder of token sets with labels, ids and splits; a sequence of `Item`.

    A store holds the tokens of one or several layers of a backbone in shards (safetensors: flat tokens and
    offsets) beside a JSON manifest. It is memory-mapped: opening costs little whatever its size, and only what
    is touched is read.

    Parameters
    ----------
    path
        The store's folder.
    layer
        Which layer's tokens to give; may be left out when the store holds one.
    partial
        Open a store whose extraction was not finished.
    check
        Check every byte of every shard against its checksum now. That each shard is there, whole and of this
        store is checked in any case; `verify` checks all bytes later.
    skip_bad
        Leave damaged shards out, with a warning, rather than raise.

    Examples
    --------
    >>> import tempfile, torch
    >>> folder = tempfile.TemporaryDirectory()
    >>> items = [Item(torch.randn(n, 3), label=n % 2, id=f"set {n}") for n in (4, 2, 5)]
    >>> store = TokenStore.create(folder.name, items, classes=["even", "odd"])
    >>> store
    TokenStore(3 items, 11 tokens, dim=3, layer=0, float16)
    >>> store[2].tokens.shape, store[2].id, store.lengths.tolist()
    (torch.Size([5, 3]), 'set 5', [4, 2, 5])
    >>> batch = next(iter(store.batches(2, shuffle=False)))
    >>> batch.tokens.shape, batch.mask.sum(1).tolist(), batch.labels.tolist()
    (torch.Size([2, 4, 3]), [4, 2], [0, 0])
    """

    def __init__(
        self,
        path: str | Path,
        layer: int | None = None,
        *,
        partial: bool = False,
        check: bool = False,
        skip_bad: bool = False,
    ) -> None:
        self.path = Path(path)
        self._place = self.path.absolute()
        self.manifest = Manifest.read(self.path)
        spec = self.manifest.spec
        if not self.manifest.complete and not partial:
            raise TokenStoreError(
                f"{self.path}: is not finished ({self.manifest.items} items so far); go on with it, by the same "
                "`cswe extract` with --resume or a StoreWriter with resume=True, or open it as it is with partial=True"
            )
        if layer is None and len(spec.layers) > 1:
            raise ValueError(f"layer: expected one of {sorted(spec.layers)}, which {self.path} holds, but got None")
        self.layer = next(iter(spec.layers)) if layer is None else layer
        if self.layer not in spec.layers:
            raise ValueError(f"layer: expected one of {sorted(spec.layers)} but got {layer}; {self.path} holds no more")
        self.damaged: list[tuple[ShardEntry, str]] = []
        self._shards: list[Shard] = []
        for entry in self.manifest.shards:
            try:
                if check:
                    check_bytes(self.path, spec, entry)
                self._shards.append(Shard(self.path, spec, entry))
            except TokenStoreError as error:
                if not skip_bad:
                    raise
                self.damaged.append((entry, str(error)))
                warnings.warn(f"left out: {error}", stacklevel=2)
        self._starts = np.cumsum([0] + [shard.entry.items for shard in self._shards])
        self.lengths: npt.NDArray[np.int64] = _join([np.diff(shard.offsets) for shard in self._shards], np.int64)
        self._splits: npt.NDArray[np.uint8] = _join([shard.splits for shard in self._shards], np.uint8)

    @property
    def spec(self) -> StoreSpec:
        """What the store holds and how it was made."""
        return self.manifest.spec

    @property
    def layers(self) -> list[int]:
        """The layers held."""
        return sorted(self.spec.layers)

    @property
    def dim(self) -> int:
        """Dimension of a token of this layer."""
        return self.spec.layers[self.layer]

    @property
    def dtype(self) -> torch.dtype:
        """The type that tokens are stored as."""
        return DTYPES[self.spec.dtype]

    @property
    def label_kind(self) -> LabelKind:
        """``"class"``, ``"multilabel"``, ``"real"`` or ``"none"``."""
        return self.spec.labels.kind

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.spec.labels.names

    @cached_property
    def labels(self) -> Tensor | None:
        """All labels: ``(n,)`` class numbers, or ``(n, width)`` as float32; None where there are none."""
        if self.label_kind == "none":
            return None
        spec = self.spec.labels
        empty = torch.empty((0,) if spec.kind == "class" else (0, spec.width), dtype=spec.dtype)
        labels = torch.cat([empty] + [shard.labels for shard in self._shards if shard.labels is not None])
        return labels if spec.kind == "class" else labels.float()

    @cached_property
    def ids(self) -> list[str]:
        """All ids."""
        return [name for shard in self._shards for name in shard.ids()]

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that have items."""
        present = np.bincount(self._splits, minlength=len(self.spec.splits))
        return tuple(name for name, count in zip(self.spec.splits, present, strict=True) if count)

    def split(self, name: str | None) -> npt.NDArray[np.int64]:
        """Positions of the items of a split; of all items for None."""
        if name is None:
            return np.arange(len(self))
        if name not in self.spec.splits:
            raise ValueError(f"split: expected one of {list(self.spec.splits)} but got {name!r}")
        return np.flatnonzero(self._splits == self.spec.splits.index(name))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        shard, row, position = self._find(index)
        start, stop = int(shard.offsets[row]), int(shard.offsets[row + 1])
        labels = self.labels
        return Item(
            # Copies: a view into the map would let a change of the caller's show up in the next read.
            tokens=shard.tokens(self.layer)[start:stop].clone(),
            label=None if labels is None else labels[position].clone(),
            id=self.ids[position],
            split=self.spec.splits[self._splits[position]],
            cls=shard.cls(self.layer)[row].clone() if self.spec.cls else None,
            weights=shard.weights()[start:stop].clone() if self.spec.weights else None,
        )

    def locate(self, index: int) -> tuple[Shard, int]:
        """Return the shard that holds an item, and the item's row there."""
        return self._find(index)[:2]

    def _find(self, index: int) -> tuple[Shard, int, int]:
        try:
            position = operator.index(index)
        except TypeError:  # a number with a fraction, an id
            raise TypeError(f"index: expected a whole number or a slice but got {index!r}") from None
        if position < 0:
            position += len(self)
        if not 0 <= position < len(self):
            raise IndexError(f"index: expected one below {len(self)} but got {index}")
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        return self._shards[number], position - int(self._starts[number]), position

    def shards(self) -> list[tuple[int, Shard]]:
        """Return every shard with the position of its first item."""
        return list(zip(self._starts[:-1].tolist(), self._shards, strict=True))

    def __repr__(self) -> str:
        tokens = int(self.lengths.sum())
        return f"TokenStore({len(self)} items, {tokens} tokens, dim={self.dim}, layer={self.layer}, {self.spec.dtype})"

    def cls(self, indices: npt.NDArray[np.int64] | None = None) -> Tensor:
        """Return the CLS vectors, ``(n, dim)``, of some items or of all."""
        if not self.spec.cls:
            raise ValueError(f"{self.path}: holds no CLS vectors; the backbone has none")
        vectors = torch.cat(
            [torch.empty(0, self.dim, dtype=self.dtype)] + [shard.cls(self.layer) for shard in self._shards]
        )
        return vectors if indices is None else vectors[torch.from_numpy(np.asarray(indices))]

    def batches(self, batch_size: int, **options: Any) -> "Batches":
        """Return reproducible, length-bucketed batches; see `Batches` for the options."""
        from cswe.tokens.batches import Batches

        return Batches(self, batch_size, **options)

    def statistics(self, split: str | None = None, max_items: int | None = None) -> TokenStatistics:
        """Return mean, spread and norms of the tokens of a split, in one pass that keeps nothing in memory."""
        return token_statistics(self, self.split(split), max_items)

    def verify(self) -> None:
        """Check every byte of every shard; raise an error that names the first file that differs."""
        for entry in self.manifest.shards:
            check_bytes(self._reached_by(), self.spec, entry)

    def append(self, items: Iterable[Item]) -> "TokenStore":
        """Add items, all of them or, if anything fails, none; return the store opened anew."""
        path = self._reached_by()
        with StoreWriter(path, publish=False) as writer:
            if not writer.manifest.complete:
                raise TokenStoreError(f"{self.path}: is not finished; finish it with --resume before adding to it")
            writer.add_all(items)
            writer.finish()
        return TokenStore(path, self.layer)

    def _reached_by(self) -> Path:
        """Return the path as it was given, or, where it leads elsewhere since the process changed folder, in full."""
        return self.path if self.path.absolute() == self._place else self._place

    @classmethod
    def create(
        cls,
        path: str | Path,
        items: Iterable[Item],
        *,
        classes: Sequence[str] | None = None,
        label_kind: LabelKind | None = None,
        splits: Sequence[str] = ("train", "validation", "test"),
        dtype: DTypeName = "float16",
        licence: str = "",
        shard_bytes: int = 256 * 2**20,
    ) -> "TokenStore":
        """Write items of your own into a new store, all or, if anything fails, none.

        What items hold is read off the first: labels, CLS vectors, weights, layers.

        Parameters
        ----------
        path
            A folder that is empty or not there yet.
        items
            Any iterable; it is read once, and memory stays flat however long it is.
        classes
            Names of the classes, if labels are classes.
        label_kind
            What the labels are, where the first item's label does not say it: an integer is a class, a real
            number or a list is real-valued, so ``"multilabel"`` must be given.
        splits
            Names of the splits that items may belong to.
        dtype, licence, shard_bytes
            As in `StoreSpec`.
        """
        stream = iter(items)
        first = next(stream, None)
        if first is None:
            raise ValueError("items: expected at least one but got none")
        given = first.tokens if isinstance(first.tokens, dict) else {0: first.tokens}
        tokens = {layer: token_table(values, f"item {first.id!r}: tokens") for layer, values in given.items()}
        for values in tokens.values():
            if values.ndim != 2:
                raise ValueError(f"items: expected tokens of shape (N, d) but got {tuple(values.shape)}")
        spec = StoreSpec(
            layers={layer: int(values.shape[1]) for layer, values in tokens.items()},
            dtype=dtype,
            labels=_label_spec(first.label, classes, label_kind),
            splits=tuple(splits),
            cls=first.cls is not None,
            weights=first.weights is not None,
            data={"licence": licence} if licence else {},
            shard_bytes=shard_bytes,
        )
        with StoreWriter(Path(path), spec, publish=False) as writer:
            writer.add(first)
            writer.add_all(stream)
            writer.finish()
        return cls(path, layer=max(spec.layers))


def drop_damaged(path: str | Path) -> list[ShardEntry]:
    """Take damaged shards out of a store's manifest, where they are listed with the reason; keep the rest.

    An extraction with ``--resume`` makes dropped shards again.
    """
    folder = Path(path)
    # All the while under the writer's lock: what another process adds in between would be lost.
    with StoreWriter(folder) as writer:
        manifest, dropped = writer.manifest, []
        for entry in manifest.shards:
            try:
                check_bytes(folder, manifest.spec, entry)
                Shard(folder, manifest.spec, entry)
            except TokenStoreError as error:
                reason = str(error).removeprefix(f"{folder / entry.file}: ").split(";")[0]
                dropped.append(replace(entry, damage=reason))
        if dropped:
            numbers = {entry.number for entry in dropped}
            kept = tuple(entry for entry in manifest.shards if entry.number not in numbers)
            replace(manifest, shards=kept, dropped=(*manifest.dropped, *dropped)).write(folder)
    return dropped


def _label_spec(label: Any, classes: Sequence[str] | None, kind: LabelKind | None) -> LabelSpec:
    # Python's own, since the manifest holds no numbers of NumPy's.
    names = tuple(
        name.item() if isinstance(name, np.generic) else name for name in (() if classes is None else classes)
    )
    if label is None:
        if kind not in (None, "none") or names:
            raise ValueError("label: expected one on every item, since classes or label_kind was given, but got None")
        return LabelSpec()
    value = as_numbers(label)
    if kind is None:
        kind = "class" if value.ndim == 0 and not value.is_floating_point() else "real"
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"classes: expected every name once but {repeated[0]!r} comes again")
    if kind == "real" and names and len(names) != value.numel():
        raise ValueError(
            f"classes: expected a name for each of {value.numel()} real numbers but got {len(names)}; labels that are "
            "class numbers are integers"
        )
    return LabelSpec(kind, names, 1 if kind == "class" else value.numel())


def _join(parts: list[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype=dtype), *parts]).astype(dtype)
