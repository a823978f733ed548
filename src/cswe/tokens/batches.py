"""Batches of a store: shuffled the same way every time, sets of like length together."""

from collections.abc import Callable, Iterator
from copy import copy
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from cswe._devices import usable_device
from cswe.tokens.gather import Batch, HostGather, Indices, Layout, ResidentGather
from cswe.tokens.prefetch import prefetched
from cswe.tokens.randomness import permutation

if TYPE_CHECKING:
    from cswe.tokens.store import TokenStore

# Sets are sorted by length within runs of this many batches: enough for little padding, few enough to stay random.
_BUCKET_BATCHES = 50
# Share of the device's free memory that tokens may take; the rest is for training.
_RESIDENT_SHARE = 0.6


def plan_batches(
    lengths: Indices,
    batch_size: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
    max_tokens: int | None = None,
    drop_last: bool = False,
) -> list[Indices]:
    """Deal sets into batches; the same arguments give the same batches, on every machine.

    Shuffled: a random order is cut into runs of 50 batches, each run is sorted by length and cut into batches,
    and the batches are shuffled.

    Parameters
    ----------
    lengths
        Tokens in every set.
    batch_size
        Sets in a batch.
    seed, epoch
        Decide the order.
    shuffle
        False: in the given order.
    max_tokens
        Most tokens in a padded batch: a batch that would hold more is cut.
    drop_last
        Leave out what does not fill a batch. Which sets that is changes from epoch to epoch.

    Returns
    -------
    list of numpy.ndarray
        Positions into `lengths`.

    Examples
    --------
    >>> [batch.tolist() for batch in plan_batches(np.array([5, 1, 3]), 2, shuffle=False)]
    [[0, 1], [2]]
    """
    if batch_size < 1:
        raise ValueError(f"batch_size: expected at least 1 but got {batch_size}")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens: expected at least 1 but got {max_tokens}")
    count = len(lengths)
    order = permutation(count, "order", seed, epoch) if shuffle else np.arange(count)
    if drop_last:
        order = order[: count - count % batch_size]
    if shuffle and len(order) and lengths.min() != lengths.max():
        run = batch_size * _BUCKET_BATCHES
        parts = [order[start : start + run] for start in range(0, len(order), run)]
        order = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in parts])
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    if max_tokens is not None:
        batches = [part for batch in batches for part in _cut(batch, lengths, max_tokens)]
    if shuffle:
        batches = [batches[position] for position in permutation(len(batches), "batches", seed, epoch)]
    return batches


def _cut(batch: Indices, lengths: Indices, max_tokens: int) -> Iterator[Indices]:
    start, longest = 0, 0
    for position, index in enumerate(batch):
        longest = max(longest, int(lengths[index]))
        if position > start and longest * (position + 1 - start) > max_tokens:
            yield batch[start:position]
            start, longest = position, int(lengths[index])
    yield batch[start:]


class Batches:
    """The batches of a store, epoch after epoch.

    Iterating gives one epoch and goes on to the next. The order is a function of `seed` and the epoch, so that
    `state_dict`, three numbers, is enough to go on exactly where a run was broken off.

    Parameters
    ----------
    store
        The store.
    batch_size
        Sets in a batch.
    split
        Name of a split; None for all items.
    indices
        Positions of the items to use, instead of a split.
    shuffle, seed, max_tokens, drop_last
        As in `plan_batches`.
    device
        Where batches are wanted.
    dtype
        Type of tokens and CLS; None leaves them as stored.
    layout
        ``"padded"``: ``(B, N, d)`` and a mask. ``"ragged"``: ``(T, d)`` and ptr.
    resident
        Keep all tokens on the device. None: if the device is a GPU and they fit. What is not resident is read
        from the memory-mapped shards, for a GPU by a thread that keeps pinned batches ready.

    Examples
    --------
    >>> import tempfile
    >>> from cswe.tokens import Item, TokenStore
    >>> folder = tempfile.TemporaryDirectory()
    >>> store = TokenStore.create(folder.name, [Item(torch.ones(n, 2)) for n in (1, 2, 3)])
    >>> batches = Batches(store, 2, seed=7)
    >>> len(batches), sorted(i for batch in batches for i in batch.index.tolist())
    (2, [0, 1, 2])
    >>> batches.state_dict()
    {'seed': 7, 'epoch': 1, 'step': 0}
    >>> batch = next(iter(store.batches(3, layout="ragged", shuffle=False)))
    >>> batch.tokens.shape, batch.ptr.tolist()
    (torch.Size([6, 2]), [0, 1, 3, 6])
    """

    def __init__(
        self,
        store: "TokenStore",
        batch_size: int,
        *,
        split: str | None = None,
        indices: Indices | None = None,
        shuffle: bool = True,
        seed: int = 0,
        max_tokens: int | None = None,
        drop_last: bool = False,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = torch.float32,
        layout: Layout = "padded",
        resident: bool | None = None,
    ) -> None:
        if layout not in get_args(Layout):
            raise ValueError(f"layout: expected one of {get_args(Layout)} but got {layout!r}")
        if indices is not None and split is not None:
            raise ValueError("indices: expected a split or indices but got both")
        self.store = store
        self.batch_size = batch_size
        # With its number: the current device, which stands for one without, is another in the prefetching thread.
        self.device = usable_device(device)
        self.dtype = dtype
        self.layout: Layout = layout
        self.seed = seed
        self.epoch = 0
        self.step = 0
        self.items: Indices = store.split(split) if indices is None else _positions(indices)
        if len(self.items) and not 0 <= self.items.min() <= self.items.max() < len(store):
            wrong = self.items.min() if self.items.min() < 0 else self.items.max()
            raise ValueError(f"indices: expected positions from 0 on and below {len(store)} but got {wrong}")
        self._start = 0
        self._options: dict[str, Any] = {"shuffle": shuffle, "max_tokens": max_tokens, "drop_last": drop_last}
        plan_batches(np.empty(0, dtype=np.int64), batch_size, max_tokens=max_tokens)  # refuse wrong arguments now
        self.resident = self._fits() if resident is None else resident
        self._gather: Callable[[Indices, Layout], Batch] = (
            ResidentGather(store, self.items, self.device)
            if self.resident
            else HostGather(store, pin=self.device.type == "cuda")
        )

    def narrowed(self, indices: Indices | None = None, batch_size: int | None = None) -> "Batches":
        """Return batches of some of these items, dealt anew; tokens that lie on the device are shared, not copied.

        Parameters
        ----------
        indices
            Positions in the store, all among this object's items; None for all of them.
        batch_size
            Sets in a batch; None for as many as here.

        Examples
        --------
        >>> import tempfile
        >>> from cswe.tokens import Item, TokenStore
        >>> folder = tempfile.TemporaryDirectory()
        >>> store = TokenStore.create(folder.name, [Item(torch.ones(n, 2)) for n in (1, 2, 3)])
        >>> sorted(i for batch in Batches(store, 3).narrowed([0, 2], 1) for i in batch.index.tolist())
        [0, 2]
        """
        chosen = self.items if indices is None else _positions(indices)
        if not bool(np.isin(chosen, self.items).all()):
            raise ValueError("indices: expected some of these batches' own items but got others")
        other = copy(self)
        other.items = chosen
        other.batch_size = self.batch_size if batch_size is None else batch_size
        other.seed = other.epoch = other.step = other._start = 0
        plan_batches(np.empty(0, dtype=np.int64), other.batch_size)  # refuse a wrong size now
        return other

    def _fits(self) -> bool:
        if self.device.type != "cuda":
            return False
        needed = int(self.store.lengths[self.items].sum()) * self.store.dim * self.store.dtype.itemsize
        free, _ = torch.cuda.mem_get_info(self.device)
        return needed <= free * _RESIDENT_SHARE

    def order(self, epoch: int) -> list[Indices]:
        """Return the batches of an epoch as positions into the store."""
        lengths = self.store.lengths[self.items]
        plan = plan_batches(lengths, self.batch_size, seed=self.seed, epoch=epoch, **self._options)
        return [self.items[batch] for batch in plan]

    def __len__(self) -> int:
        return len(self.order(self.epoch))

    def __iter__(self) -> Iterator[Batch]:
        order = self.order(self.epoch)
        start, self._start = self._start, 0
        self.step = start
        for batch in self._stream(order[start:]):
            # Counted before it is handed out: a state saved after the training step says what comes next.
            self.step += 1
            yield batch
        self.epoch += 1
        self.step = 0

    def _stream(self, order: list[Indices]) -> Iterator[Batch]:
        if self.resident or self.device.type != "cuda":
            for indices in order:
                yield self._gather(indices, self.layout).to(self.device, self.dtype)
        else:
            yield from prefetched(order, lambda part: self._gather(part, self.layout), self.device, self.dtype)

    def state_dict(self) -> dict[str, int]:
        """Return what is needed to go on from here."""
        return {"seed": self.seed, "epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken: the next iteration starts at its step of its epoch."""
        self.seed, self.epoch, self.step = (int(state[name]) for name in ("seed", "epoch", "step"))
        self._start = self.step


def _positions(indices: Any) -> Indices:
    given = np.asarray(indices)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        hint = "; np.flatnonzero turns a mask into positions" if given.dtype.kind == "b" else ""
        raise ValueError(f"indices: expected whole numbers, (n,), but got {given.dtype} of shape {given.shape}{hint}")
    return given.astype(np.int64)
