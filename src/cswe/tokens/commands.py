"""The commands `cswe extract` and `cswe inspect`."""

import json
import math
import sys
from pathlib import Path
from typing import Annotated

import tyro

from cswe.tokens.backbones.base import Norm, Precision
from cswe.tokens.backbones.hf_sequence import Long
from cswe.tokens.backbones.opening import BackboneOptions, open_backbone
from cswe.tokens.extract import extract as run_extraction
from cswe.tokens.inspection import inspect_store, render
from cswe.tokens.labels import LabelKind
from cswe.tokens.manifest import DTypeName
from cswe.tokens.sources.digits import Ink
from cswe.tokens.sources.opening import Format, SourceOptions, open_source
from cswe.tokens.store import drop_damaged


def extract(
    out: Path,
    data: tuple[Path, ...] = (),
    format: Format | None = None,
    backbone: str = "identity",
    layers: tuple[int, ...] = (),
    resume: bool = False,
    skip_bad: bool = False,
    dtype: DTypeName = "float16",
    norm: Norm = "final",
    precision: Precision = "float32",
    device: str | None = None,
    revision: str | None = None,
    batch_tokens: int = 2**15,
    long: Long = "cut",
    max_length: int | None = None,
    points: int | None = None,
    ink: Ink = "weight",
    multi_label: bool = False,
    labels: Path | None = None,
    label_kind: LabelKind | None = None,
    seed: int = 0,
    shard_mib: float = 256,
    workers: int | None = None,
    limit: int | None = None,
    licence: str = "",
    quiet: bool = False,
) -> None:
    """Run a frozen backbone over a data set once, and keep its tokens.

    Without a data set and a backbone it takes the digits that come with scikit-learn, as weighted point sets:
    cswe extract --out digits/

    Parameters
    ----------
    out
        The store's folder.
    data
        A folder of class folders of images, a CSV, TSV or FASTA file, point sets in NPZ or HDF5, ModelNet40, or Tiny
        ImageNet, in several zips even. Without it: scikit-learn's digits.
    format
        What the data is, if that cannot be told from names and contents.
    backbone
        A folder or hub name of a vision, protein or text encoder; a file with the weights of a Point Cloud
        Transformer; or identity, for sets that are tokens already.
    layers
        Blocks after which tokens are kept, 6 9 12 say; -1 is the last, and the default.
    resume
        Go on with a store begun before; damaged or missing shards are made again.
    skip_bad
        Leave out items that cannot be used; the manifest lists them.
    dtype
        How tokens are stored.
    norm
        Apply the model's final norm after every layer kept, or none.
    precision
        The type the model runs in.
    device
        cpu or cuda; a GPU if there is one.
    revision
        Which commit of the model on the hub.
    batch_tokens
        Tokens in a batch; less needs less memory.
    long
        What becomes of sequences too long for the model.
    max_length
        The length from which on they are, if not the model's own limit.
    points
        Points drawn from a set: 512 for ModelNet, otherwise all.
    ink
        Digits: what a pixel's intensity becomes.
    multi_label
        Localization: keep every label of a protein rather than the proteins with one.
    labels
        FASTA: a table with columns id, label and, if wanted, split.
    label_kind
        FASTA, point sets and tables: what the labels are.
    seed
        Decides splits and drawn points.
    shard_mib
        Size of a shard in MiB.
    workers
        Processes that load and decode.
    limit
        Take only so many items.
    licence
        A note for the manifest.
    quiet
        No progress bar.
    """
    if not 0 < shard_mib < math.inf:
        raise ValueError(f"shard_mib: expected a positive number but got {shard_mib}")
    choices = SourceOptions(seed, points, ink, multi_label, labels, label_kind)
    source = open_source(data, format, choices, strict=True)
    options = BackboneOptions(layers, norm, precision, device, revision, batch_tokens, long, max_length)
    encoder = open_backbone(backbone, source, options)
    try:
        store = run_extraction(
            source,
            encoder,
            out,
            dtype=dtype,
            resume=resume,
            skip_bad=skip_bad,
            shard_bytes=int(shard_mib * 2**20),
            workers=workers,
            limit=limit,
            licence=licence,
            progress=not quiet,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command with --resume goes on from here") from None
    held = f"layers {', '.join(map(str, store.layers))}" if len(store.layers) > 1 else f"layer {store.layer}"
    print(f"{out}: {len(store):,} items, {int(store.lengths.sum()):,} tokens of dimension {store.dim}, {held}")
    for name, count in store.manifest.counts.items():
        print(f"  {name}: {count:,}")
    if source.left_out:
        print(f"  left out: {source.left_out}")
    if store.manifest.skipped:
        print(f"  skipped: {len(store.manifest.skipped):,} items, listed in the manifest")


def inspect(
    store: Annotated[Path, tyro.conf.Positional],
    check: bool = True,
    skip_bad: bool = False,
    sample: int = 1000,
    json_: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Say what is in a store: counts, lengths, classes, layers, norms, checksums.

    Parameters
    ----------
    store
        The store's folder.
    check
        Check every byte against the checksums.
    skip_bad
        Take damaged shards out of the store, and list them in its manifest; the rest is kept.
    sample
        Measure norms on so many items.
    json_
        Print JSON.
    """
    if skip_bad:
        for entry in drop_damaged(store):
            print(f"dropped {store / entry.file} ({entry.items:,} items): {entry.damage}", file=sys.stderr)
    report = inspect_store(store, check=check, sample=sample)
    print(json.dumps(report, indent=1, ensure_ascii=False) if json_ else render(report))
