"""The commands `cswe embed`, `cswe neighbors` and `cswe explain`."""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro

from cswe.tokens import LabelSpec
from cswe.tokens.sources.opening import Format
from cswe.training.checkpoint import load
from cswe.training.data import open_store
from cswe.training.embed import embed as write_vectors
from cswe.training.embed import embed_blocks
from cswe.training.errors import UserError
from cswe.training.explain import EXPLANATIONS, position, write_explanation
from cswe.training.explain import explain as share_out
from cswe.training.inputs import StoreInput, open_input
from cswe.training.neighbors import Metric, nearest
from cswe.training.outputs import check_out
from cswe.training.parallel import default_device


def embed(
    model: Annotated[Path, tyro.conf.Positional],
    input: Annotated[Path, tyro.conf.Positional],
    out: Path,
    split: str | None = None,
    format: Format | None = None,
    backbone: str | None = None,
    batch_size: int = 256,
    device: str | None = None,
    quiet: bool = False,
) -> None:
    """Turn sets into vectors: of a token store, or of raw input through the backbone that the model was trained on.

    Example: cswe embed run/ digits/ --out vectors.npy

    Raw: cswe embed run/ proteins.fasta --backbone facebook/esm2_t6_8M_UR50D --out vectors.parquet

    Parameters
    ----------
    model
        A run's folder, for its best model, or a model's, run/last say.
    input
        A token store; or a data set, any that `cswe extract` takes (digits: scikit-learn's).
    out
        vectors.npy (with the ids in vectors.ids.txt), vectors.parquet or vectors.h5.
    split
        Of a store: train, validation or test; otherwise all.
    format
        Of a data set: what it is, if that cannot be told from names and contents.
    backbone
        A folder or hub name of the backbone, if it is not where it was when the tokens were made.
    batch_size
        Sets at a time.
    device
        cpu or cuda; a GPU if there is one.
    quiet
        No progress bar.
    """
    where = str(default_device(device))
    trained = load(model)
    sets = open_input(input, trained.facts, split=split, format=format, backbone=backbone, device=where)
    count = write_vectors(trained, sets, out, batch_size=batch_size, device=where, progress=not quiet)
    print(f"{out}: {count:,} vectors of length {trained.size}")


def neighbors(
    model: Annotated[Path, tyro.conf.Positional],
    store: Annotated[Path, tyro.conf.Positional],
    query: tuple[str, ...],
    k: int = 10,
    metric: Metric = "cosine",
    split: str | None = None,
    batch_size: int = 256,
    device: str | None = None,
    json_: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Find the items of a store that are nearest to some of them: exact, in embedding space.

    Example: cswe neighbors run/ digits/ --query digit-0004 digit-0010 --k 5

    Parameters
    ----------
    model
        A run's folder, for its best model, or a model's, run/last say.
    store
        A token store.
    query
        Ids, or positions in the store.
    k
        How many neighbours of each.
    metric
        cosine or euclidean.
    split
        Look among the items of this split alone.
    batch_size
        Sets at a time.
    device
        cpu or cuda; a GPU if there is one.
    json_
        Print JSON.
    """
    if not query:
        raise UserError("query: expected at least one id or position but got none")
    where = str(default_device(device))
    trained = load(model)
    opened = open_store(store, trained.facts)
    everything, sets = StoreInput(opened), StoreInput(opened, split)
    places = np.array([position(everything, name) for name in query])
    asked = next(iter(opened.batches(len(places), indices=places, shuffle=False, device=where)))
    with torch.no_grad():
        queries = trained.to(where).embed_batch(asked).float().cpu()
    among = sets.items
    # A query that is among the items is not its own neighbour.
    skip = torch.tensor([int(np.flatnonzero(among == place)[0]) if place in among else -1 for place in places])
    blocks = (vectors for vectors, _ in embed_blocks(trained, sets, batch_size=batch_size, device=where))
    distances, found = nearest(queries, blocks, k, metric, skip)
    ids, labels = opened.ids, opened.labels
    count = Counter(ids)

    def name_of(place: int) -> str:
        """Name an item so that it is no other."""
        return ids[place] if count[ids[place]] == 1 else f"{ids[place]} (position {place})".lstrip()

    result = {
        name_of(place): [
            {
                "id": ids[among[row]],
                "position": int(among[row]),
                "distance": distance,
                **({"label": _label(labels[among[row]], opened.spec.labels)} if labels is not None else {}),
            }
            for distance, row in zip(distances[number].tolist(), found[number].tolist(), strict=True)
        ]
        for number, place in enumerate(places.tolist())
    }
    if json_:
        print(json.dumps(result, indent=1, ensure_ascii=False))
        return
    for name, rows in result.items():
        print(name)
        for row in rows:
            label = f"  {row['label']}" if "label" in row else ""
            print(f"  {row['distance']:.6f}  {name_of(row['position'])}{label}")


def explain(
    model: Annotated[Path, tyro.conf.Positional],
    input: Annotated[Path, tyro.conf.Positional],
    item: str,
    out: Path,
    label: str | None = None,
    slice: int | None = None,
    format: Format | None = None,
    backbone: str | None = None,
    device: str | None = None,
) -> None:
    """Say which tokens of an item speak for an answer: residues of a protein, patches of an image, points of a cloud.

    Example: cswe explain run/ digits --item digit-0004 --label 4 --out four.ply

    Residues: cswe explain run/ proteins.fasta --item P12345 --label Nucleus --out residues.csv

    Parameters
    ----------
    model
        A run's folder, for its best model, or a model's, run/last say.
    input
        A data set, any that `cswe extract` takes (digits: scikit-learn's); or a token store, for a table without
        residues or pictures.
    item
        An id, or a position.
    out
        A .csv for anything, a .png for images (a heat map over the image), a .ply for clouds.
    label
        Share out the evidence for this answer; otherwise the squared length of the embedding.
    slice
        Of one slice alone.
    format
        Of a data set: what it is, if that cannot be told from names and contents.
    backbone
        A folder or hub name of the backbone, if it is not where it was when the tokens were made.
    device
        Where the backbone runs.
    """
    check_out(out, EXPLANATIONS)
    where = None if device is None else str(default_device(device))
    trained = load(model)
    sets = open_input(input, trained.facts, format=format, backbone=backbone, device=where)
    told = share_out(trained, sets, item, label=label, slice=slice)
    write_explanation(told, out)
    first = told.shares.argsort(descending=True)[:3].tolist()
    most = ", ".join(f"{place + 1} ({told.shares[place]:.3g})" for place in first)
    print(f"{out}: shares of {told.of}, {float(told.shares.sum()):.4g} in all; most from tokens {most}")


def _label(value: torch.Tensor, labels: LabelSpec) -> object:
    """Return a label as people know it: a class or several by name, where they have names; otherwise numbers."""
    if labels.kind == "class":
        return labels.names[int(value)] if labels.names else int(value)
    if labels.kind == "multilabel" and labels.names:
        return [name for name, given in zip(labels.names, value.tolist(), strict=True) if given]
    return value.tolist()
