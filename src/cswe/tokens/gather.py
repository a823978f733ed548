"""Putting the sets of a batch together, padded or ragged, on the host or on the device."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from cswe.tokens.store import TokenStore

Layout = Literal["padded", "ragged"]
Indices = npt.NDArray[np.int64]

# NumPy has no bfloat16, and copies bytes all the same: rows are moved as integers of equal width.
_AS_INTEGER = {2: torch.int16, 4: torch.int32}


@dataclass
class Batch:
    """Some sets of tokens, on one device.

    Parameters
    ----------
    tokens
        Padded: ``(B, N, d)``, zero beyond a set's end. Ragged: ``(T, d)``, one set after another.
    mask
        Padded: ``(B, N)``, True for a token, False for padding; None when no set is padded.
    ptr
        Ragged: ``(B + 1,)``, set b being ``tokens[ptr[b]:ptr[b + 1]]``.
    labels
        ``(B,)`` class numbers or ``(B, width)`` float32; None where there are none.
    weights
        Token weights in the layout of the tokens without d, zero at padding; None where there are none.
    cls
        ``(B, d)``; None where there are none.
    index
        Positions of the sets in the store, ``(B,)``, always on the CPU.
    """

    tokens: Tensor
    mask: Tensor | None
    ptr: Tensor | None
    labels: Tensor | None
    weights: Tensor | None
    cls: Tensor | None
    index: Tensor

    def __len__(self) -> int:
        return len(self.index)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "Batch":
        """Return the batch on a device, tokens and CLS as `dtype`; the copy does not wait if memory is pinned."""

        def move(values: Tensor | None, kind: torch.dtype | None = None) -> Tensor | None:
            return None if values is None else values.to(device, non_blocking=True).to(kind or values.dtype)

        return Batch(
            tokens=self.tokens.to(device, non_blocking=True).to(dtype or self.tokens.dtype),
            mask=move(self.mask),
            ptr=move(self.ptr),
            labels=move(self.labels),
            weights=move(self.weights),
            cls=move(self.cls, dtype),
            index=self.index,
        )

    def tensors(self) -> list[Tensor]:
        """Return the tensors that lie on the device."""
        held = [self.tokens, self.mask, self.ptr, self.labels, self.weights, self.cls]
        return [values for values in held if values is not None]


class HostGather:
    """Reads the sets of a batch from the memory-mapped shards, into pinned memory if asked."""

    def __init__(self, store: "TokenStore", *, pin: bool = False) -> None:
        self._store = store
        self._pin = pin

    def __call__(self, indices: Indices, layout: Layout) -> Batch:
        """Gather the sets at `indices` of the store."""
        store = self._store
        lengths = store.lengths[indices]
        longest = int(lengths.max(initial=0))
        padded = layout == "padded"
        shape = (len(indices), longest) if padded else (int(lengths.sum()),)
        tokens = self._empty((*shape, store.dim), store.dtype)
        rows = _rows(tokens)
        weights = self._empty(shape, torch.float32) if store.spec.weights else None
        cls = self._empty((len(indices), store.dim), store.dtype) if store.spec.cls else None
        start = 0
        for position, (index, length) in enumerate(zip(indices.tolist(), lengths.tolist(), strict=True)):
            shard, row = store.locate(index)
            first = int(shard.offsets[row])
            here: Any = (position, slice(0, length)) if padded else slice(start, start + length)
            rows[here] = _rows(shard.tokens(store.layer))[first : first + length]
            if weights is not None:
                weights[here] = shard.weights()[first : first + length]
            if cls is not None:
                cls[position] = shard.cls(store.layer)[row]
            if padded and length < longest:
                rows[position, length:] = 0
                if weights is not None:
                    weights[position, length:] = 0
            start += length
        index_tensor = torch.from_numpy(np.ascontiguousarray(indices))
        return Batch(
            tokens=tokens,
            mask=_mask(lengths, longest) if padded else None,
            ptr=None if padded else torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])),
            labels=None if store.labels is None else store.labels[index_tensor],
            weights=weights,
            cls=cls,
            index=index_tensor,
        )

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._pin)


class ResidentGather:
    """Holds the tokens of some items on the device, and gathers a batch there without touching the host."""

    def __init__(self, store: "TokenStore", items: Indices, device: torch.device) -> None:
        self._lengths = store.lengths[items]
        # Where an item of the store lies among the items held.
        self._place = np.full(len(store), -1, dtype=np.int64)
        self._place[items] = np.arange(len(items))
        self._device = device
        self._tokens = torch.empty((int(self._lengths.sum()), store.dim), dtype=store.dtype, device=device)
        self._weights = torch.empty(len(self._tokens), device=device) if store.spec.weights else None
        cls_shape = (len(items), store.dim)
        self._cls = torch.empty(cls_shape, dtype=store.dtype, device=device) if store.spec.cls else None
        self._labels = None if store.labels is None else store.labels[torch.from_numpy(items)].to(device)
        gather = HostGather(store, pin=device.type == "cuda")
        start = 0
        for at in range(0, len(items), _LOAD_ITEMS):
            part = gather(items[at : at + _LOAD_ITEMS], "ragged")
            stop = start + len(part.tokens)
            self._tokens[start:stop].copy_(part.tokens)
            if self._weights is not None and part.weights is not None:
                self._weights[start:stop].copy_(part.weights)
            if self._cls is not None and part.cls is not None:
                self._cls[at : at + len(part)].copy_(part.cls)
            start = stop
        self._starts = np.concatenate([[0], np.cumsum(self._lengths)])[:-1]
        self._starts_there = torch.from_numpy(self._starts).to(device)
        self._lengths_there = torch.from_numpy(self._lengths).to(device)
        same = bool(len(items)) and bool((self._lengths == self._lengths[0]).all())
        self._sets = self._tokens.view(len(items), int(self._lengths[0]), store.dim) if same else None

    def __call__(self, indices: Indices, layout: Layout) -> Batch:
        """Gather the sets at `indices` of the store."""
        place = self._place[indices]
        lengths = self._lengths[place]
        there = torch.from_numpy(place)
        if self._device.type == "cuda":
            there = there.pin_memory().to(self._device, non_blocking=True)
        mask = ptr = weights = None
        if layout == "ragged":
            flat = self._ragged_rows(there, lengths)
            ptr = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).to(self._device, non_blocking=True)
            tokens = self._tokens.index_select(0, flat)
            weights = None if self._weights is None else self._weights[flat]
        elif self._sets is not None:
            tokens = self._sets.index_select(0, there)
            if self._weights is not None:
                weights = self._weights.view(len(self._sets), -1).index_select(0, there)
        else:
            longest = int(lengths.max(initial=0))
            steps = torch.arange(longest, device=self._device)
            valid = steps < self._lengths_there[there, None]
            rows = torch.where(valid, self._starts_there[there, None] + steps, 0).flatten()
            tokens = self._tokens.index_select(0, rows).view(len(place), longest, -1)
            if not bool((lengths == longest).all()):
                mask = valid
                tokens.masked_fill_(~valid[:, :, None], 0)
            if self._weights is not None:
                weights = self._weights[rows].view(len(place), longest) * valid
        return Batch(
            tokens=tokens,
            mask=mask,
            ptr=ptr,
            labels=None if self._labels is None else self._labels[there],
            weights=weights,
            cls=None if self._cls is None else self._cls[there],
            index=torch.from_numpy(np.ascontiguousarray(indices)),
        )

    def _ragged_rows(self, there: Tensor, lengths: Indices) -> Tensor:
        total = int(lengths.sum())
        counts = self._lengths_there[there]
        ends = counts.cumsum(0)
        shift = self._starts_there[there] - (ends - counts)
        # output_size is known on the host, so the device need not be asked for it.
        return torch.arange(total, device=self._device) + torch.repeat_interleave(shift, counts, output_size=total)


_LOAD_ITEMS = 1024


def _rows(tokens: Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = tokens.view(_AS_INTEGER[tokens.dtype.itemsize]).numpy()
    return array


def _mask(lengths: Indices, longest: int) -> Tensor | None:
    if bool((lengths == longest).all()):
        return None
    return torch.arange(longest) < torch.from_numpy(lengths)[:, None]
