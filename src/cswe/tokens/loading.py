"""Items loaded and prepared by worker processes, handed over in order."""

import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from cswe.tokens.backbones.base import Preparer
from cswe.tokens.errors import BadItemError
from cswe.tokens.sources.base import Source

_MOST_WORKERS = 16
_AHEAD = 2


@dataclass
class Loaded:
    """Some consecutive items: packed, with the positions that are good, and the reasons why others are not."""

    packed: Any
    good: list[int]
    bad: list[tuple[int, str]]


class _Units(Dataset[Loaded]):
    def __init__(self, source: Source, preparer: Preparer) -> None:
        self._source = source
        self._preparer = preparer

    def __getitem__(self, unit: Any) -> Loaded:
        start, stop = unit
        prepared, good, bad = [], list[int](), list[tuple[int, str]]()
        for index in range(start, stop):
            try:
                prepared.append(self._preparer.one(self._source.load(index)))
                good.append(index)
            except BadItemError as error:
                bad.append((index, str(error)))
        return Loaded(self._preparer.pack(prepared), good, bad)


def load_units(
    source: Source,
    preparer: Preparer,
    units: Sequence[tuple[int, int]],
    *,
    workers: int,
    in_worker: Callable[[], None],
) -> Iterator[Loaded]:
    """Load ranges of items and give them in the order of `units`, however the work is shared.

    Processes are started here and now: by the thread that asks, and not by the one that takes what they load.

    Parameters
    ----------
    source, preparer
        What loads an item, and what prepares it.
    units
        Ranges of items.
    workers
        Processes; 0 loads here.
    in_worker
        Called once in every worker.
    """
    loader = DataLoader(
        _Units(source, preparer),
        sampler=units,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=_AHEAD if workers else None,
        worker_init_fn=(lambda number: in_worker()) if workers else None,
        # Forked workers share what is loaded already; they never touch the GPU, so that forking is safe.
        multiprocessing_context="fork" if workers else None,
        collate_fn=_as_it_is,
        # A generator of its own, since the loader would draw from, and so change, the global one.
        generator=torch.Generator(),
    )
    return iter(loader)


def _as_it_is(loaded: Any) -> Any:
    return loaded


def default_workers(source: Source, device: torch.device, unit_bytes: int) -> int:
    """Choose a number of workers: decoding images is worth processes of its own, most when the model is on a GPU."""
    if source.kind != "image" or "fork" not in multiprocessing.get_all_start_methods():
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    wanted = min(cores, _MOST_WORKERS) if device.type == "cuda" else max(cores - 1, 0)
    # Workers hand over tensors in shared memory; in a container there may be little of it.
    try:
        room = shutil.disk_usage("/dev/shm").free
    except OSError:
        return wanted
    return min(wanted, int(room // ((_AHEAD + 1) * unit_bytes)))
