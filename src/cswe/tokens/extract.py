"""From a data set through a frozen backbone into a store."""

import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from cswe.tokens.ahead import ahead
from cswe.tokens.backbones.base import Backbone, Encoded
from cswe.tokens.errors import ForeignShardError, TokenStoreError
from cswe.tokens.loading import Loaded, default_workers, load_units
from cswe.tokens.manifest import DTypeName, ShardEntry, StoreSpec
from cswe.tokens.shards import Columns, check_bytes
from cswe.tokens.sources.base import SPLITS, Source
from cswe.tokens.store import TokenStore
from cswe.tokens.writer import StoreWriter


@dataclass(frozen=True)
class _Task:
    """A stretch of the data set that is to become shard `number`, or, without a stop, shards from there on."""

    number: int
    first: int
    stop: int | None


def extract(
    source: Source,
    backbone: Backbone,
    out: str | Path,
    *,
    dtype: DTypeName = "float16",
    resume: bool = False,
    skip_bad: bool = False,
    shard_bytes: int = 256 * 2**20,
    workers: int | None = None,
    limit: int | None = None,
    licence: str = "",
    progress: bool = True,
) -> TokenStore:
    """Run a frozen backbone over a data set once, and keep the tokens.

    The same source, backbone and options give the same bytes, in one go or in many: items are taken in groups of a
    fixed size, a shard is a whole number of groups, and no batch reaches beyond its group.

    Parameters
    ----------
    source, backbone
        What `open_source` and `open_backbone` give.
    out
        The store's folder: empty, not there yet, or, to resume, the one begun before.
    dtype
        How tokens are stored.
    resume
        Keep the shards that are there and whole; make the others. That the items of a kept shard are still what they
        were is checked as far as `Source.stamp` tells.
    skip_bad
        Leave out items that cannot be used; the manifest lists them with the reason. Otherwise the first such item is
        an error.
    shard_bytes
        A shard is closed when its tokens reach this size. What is lost when the process is killed is at most one, and
        what was encoded meanwhile, as much again; so much is held in memory, too.
    workers
        Processes that load and decode; by default as many as there are cores for images, none for the rest.
    limit
        Take only so many items from the start of the data set.
    licence
        A note for the manifest, besides what the data set itself says.
    progress
        Show a progress bar.

    Returns
    -------
    TokenStore
        The store, opened at its last layer.

    Examples
    --------
    >>> import tempfile
    >>> from cswe.tokens.backbones import open_backbone
    >>> from cswe.tokens.sources import open_source
    >>> digits = open_source()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     extract(digits, open_backbone("identity", digits), folder, limit=100, progress=False)
    TokenStore(100 items, 3211 tokens, dim=2, layer=0, float16)
    """
    if source.kind != backbone.kind:
        raise ValueError(f"backbone: expected one for {source.kind!r} but got one for {backbone.kind!r}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit: expected at least 1 but got {limit}")
    count = len(source) if limit is None else min(limit, len(source))
    chosen = _workers(workers, source, backbone)
    spec = _spec(source, backbone, dtype, shard_bytes, count, licence)
    folder = Path(out)
    with StoreWriter(folder, spec, resume=resume) as writer:
        _warn_of_empty_splits(source, count)
        tasks = _tasks(writer, source, count)
        groups = [(task, group) for task in tasks for group in _groups(task, count, backbone.group)]
        done = count - sum(stop - start for _, (start, stop) in groups)
        bar = tqdm(total=count, initial=done, unit=" items", disable=not progress, smoothing=0.1)
        with (
            closing(bar),
            closing(_load(source, backbone, groups, chosen, writer)) as stream,
            # The disk takes about as long as a small backbone: while a shard is written the next is encoded.
            closing(ahead(_encoded(source, backbone, spec, stream, skip_bad), shard_bytes, _size)) as encoded,
        ):
            tokens = 0
            for (task, (start, stop)), columns in zip(groups, encoded, strict=True):
                full = writer.add_columns(columns)
                end = count if task.stop is None else task.stop
                if stop == end or (full and task.stop is None):
                    _close(writer, source, task, stop)
                tokens += sum(columns.lengths)
                bar.update(stop - start)
                rate = bar.format_dict["elapsed"]
                bar.set_postfix_str(f"{tokens / max(rate, 1e-9):,.0f} tokens/s", refresh=False)
        writer.finish()
    return TokenStore(folder, layer=max(spec.layers))


def _spec(
    source: Source, backbone: Backbone, dtype: DTypeName, shard_bytes: int, count: int, licence: str
) -> StoreSpec:
    data: dict[str, Any] = source.describe()
    if count != len(source):
        data["limit"] = count
    if licence:
        data["licence"] = "; ".join(part for part in (str(data.get("licence", "")), licence) if part)
    return StoreSpec(
        layers=dict(backbone.layers),
        dtype=dtype,
        labels=source.labels.spec,
        splits=SPLITS,
        cls=backbone.has_cls,
        weights=source.has_weights,
        backbone=backbone.describe(),
        preprocessing=backbone.preprocessing(),
        data=data,
        shard_bytes=shard_bytes,
    )


def _warn_of_empty_splits(source: Source, count: int) -> None:
    if source.labels.spec.kind == "none":
        return  # there is nothing to learn from, and so nothing to hold out
    held, all_held = (set(splits.tolist()) for splits in (source.splits[:count], source.splits))
    empty = [name for number, name in enumerate(SPLITS) if number not in held]
    if empty:
        why = (
            "a table that names no splits is all for training, and so is, where splits are dealt, a class of fewer "
            "than 6 items"
        )
        if len(all_held) == len(SPLITS):
            why = f"the first {count:,} items, which are all that was asked for, have none"
        warnings.warn(f"{source.name}: no items for {' and '.join(empty)}; {why}", stacklevel=3)


def _tasks(writer: StoreWriter, source: Source, count: int) -> list[_Task]:
    """List what is still to be made: shards that are missing, damaged or dropped, then the rest of the data set."""
    tasks = []
    known = (*writer.manifest.shards, *writer.manifest.dropped)
    for entry in known:
        appended, dropped = entry.stop > count, bool(entry.damage)
        if appended and dropped:
            continue
        damage = _damage(writer, entry)
        if appended and damage:
            raise TokenStoreError(
                f"{damage.split(';')[0]}; `append` added its {entry.items} items, which are not in the data set: "
                "restore the file from a copy, or go on without them with `cswe inspect --skip-bad`"
            )
        if damage or dropped:
            tasks.append(_Task(entry.number, entry.first, entry.stop))
        elif not appended:
            _check_content(writer, source, entry)
    end = max((entry.stop for entry in known), default=0)
    if end < count:
        tasks.append(_Task(max((entry.number for entry in known), default=-1) + 1, end, None))
    return sorted(tasks, key=lambda task: task.number)


def _damage(writer: StoreWriter, entry: ShardEntry) -> str:
    """Say what is wrong with a shard; nothing, if nothing is."""
    try:
        check_bytes(writer.path, writer.spec, entry)
    except ForeignShardError:
        raise  # it may be the only copy of something else: not ours to replace
    except TokenStoreError as error:
        return str(error)
    return ""


def _check_content(writer: StoreWriter, source: Source, entry: ShardEntry) -> None:
    """Refuse to put new items beside those of a shard whose own, of the same names, have changed."""
    if entry.content and source.content(entry.first, entry.stop) not in ("", entry.content):
        raise TokenStoreError(
            f"{writer.path / entry.file}: was made from items {source.ids[entry.first]!r} to "
            f"{source.ids[entry.stop - 1]!r}, some of which have changed since; remove this file to make it again with "
            "--resume, or extract into a new folder"
        )


def _groups(task: _Task, count: int, size: int) -> Iterator[tuple[int, int]]:
    end = count if task.stop is None else task.stop
    for start in range(task.first, end, size):
        yield start, min(start + size, end)


def _workers(workers: int | None, source: Source, backbone: Backbone) -> int:
    if workers is not None:
        if workers < 0:
            raise ValueError(f"workers: expected 0 or more but got {workers}")
        return workers
    return default_workers(source, backbone.device, backbone.unit_bytes)


def _load(
    source: Source,
    backbone: Backbone,
    groups: Sequence[tuple[_Task, tuple[int, int]]],
    workers: int,
    writer: StoreWriter,
) -> Generator[list[Loaded], None, None]:
    """Give what was loaded of each group, in units, one group after another."""
    parts = [
        [(at, min(at + backbone.unit, stop)) for at in range(start, stop, backbone.unit)] for _, (start, stop) in groups
    ]
    units = [unit for part in parts for unit in part]
    stream = load_units(source, backbone.preparer, units, workers=workers, in_worker=writer.release)
    return ([next(stream) for _ in part] for part in parts)


def _encoded(
    source: Source, backbone: Backbone, spec: StoreSpec, groups: Iterable[list[Loaded]], skip_bad: bool
) -> Iterator[Columns]:
    """Give the groups' columns; whichever thread draws them, it computes on the device that is current here."""
    chosen = torch.cuda.device(torch.cuda.current_device()) if backbone.device.type == "cuda" else nullcontext()

    def columns() -> Iterator[Columns]:
        with chosen:
            for loaded in groups:
                yield _encode(source, backbone, spec, loaded, skip_bad=skip_bad)

    return columns()


def _size(columns: Columns) -> int:
    return columns.size


def _encode(source: Source, backbone: Backbone, spec: StoreSpec, loaded: list[Loaded], *, skip_bad: bool) -> Columns:
    """Encode a group; leave out its bad items, or raise the error that names the first."""
    bad = {index: reason for unit in loaded for index, reason in unit.bad}
    good = [index for unit in loaded for index in unit.good]
    if bad and not skip_bad:
        raise _bad_item(source, *min(bad.items()))
    columns = Columns.empty(spec)
    if good:
        encoded = backbone.encode([unit.packed for unit in loaded if unit.good], spec.dtype)
        if not bool(encoded.finite.all()):
            reason = f"gives values that {spec.dtype} cannot hold; bfloat16 or float32 may"
            infinite = [index for index, fine in zip(good, encoded.finite.tolist(), strict=True) if not fine]
            if not skip_bad:
                remedy = "Extract into a new folder with another --dtype"
                raise _bad_item(source, infinite[0], reason, remedy)
            bad |= dict.fromkeys(infinite, reason)
            good = [index for index in good if index not in bad]
            encoded = encoded.only(encoded.finite)
        columns = _columns(source, spec, good, encoded)
    columns.skipped = [{"id": source.ids[index], "reason": bad[index]} for index in sorted(bad)]
    return columns


def _columns(source: Source, spec: StoreSpec, items: list[int], encoded: Encoded) -> Columns:
    labels = source.labels.values
    return Columns(
        tokens=encoded.tokens,
        lengths=encoded.lengths,
        ids=[source.ids[index] for index in items],
        splits=source.splits[items].tolist(),
        labels=[] if labels is None else [labels[items]],
        cls={layer: [vectors] for layer, vectors in encoded.cls.items()},
        weights=encoded.weights,
        counts=encoded.counts,
    )


def _close(writer: StoreWriter, source: Source, task: _Task, stop: int) -> None:
    if task.stop is None:
        writer.close_shard(stop, content=source.content(writer.first, stop))
    else:
        content = source.content(task.first, stop)
        writer.close_shard(stop, number=task.number, first=task.first, content=content)


def _bad_item(source: Source, index: int, reason: str, remedy: str = "Repair it") -> TokenStoreError:
    return TokenStoreError(
        f"{source.locate(index)}: {reason}. {remedy}, or leave such items out with --skip-bad; "
        "what is done so far is kept for --resume"
    )
