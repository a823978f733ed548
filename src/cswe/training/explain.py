"""Which tokens speak for an answer: tables, heat maps and coloured clouds."""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO, StringIO
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from cswe._extras import require
from cswe.nn import CLSPool, MaxPool, MeanPool, SumPool, SWEPool, explain_slices, explain_tokens
from cswe.tokens import Batch
from cswe.tokens.backbones.hf_vision import VisionBackbone
from cswe.tokens.sources.base import Points
from cswe.training.errors import UserError
from cswe.training.inputs import RawInput, StoreInput
from cswe.training.model import Model
from cswe.training.outputs import check_out, written_aside


@dataclass(frozen=True)
class Explanation:
    """Every token's share of something.

    Parameters
    ----------
    id
        Of the item.
    of
        What is shared out, in words.
    shares
        One number a token, ``(N,)``.
    tokens
        The tokens, ``(N, d)``.
    raw
        What the tokens were made from, where it is known: text, a Pillow image, or points.
    grid
        Of an image: rows and columns of its patches, and the image as the model saw it.
    """

    id: str
    of: str
    shares: Tensor
    tokens: Tensor
    raw: Any = None
    grid: tuple[int, int] | None = None


def explain(
    model: Model,
    sets: StoreInput | RawInput,
    item: str | int,
    *,
    label: str | int | None = None,
    slice: int | None = None,
) -> Explanation:
    """Say which tokens of an item speak for an answer, or carry the embedding.

    Parameters
    ----------
    model
        As `cswe.load` gives it.
    sets
        A store, or raw input through the model's backbone.
    item
        An id, or a position.
    label
        Share out the evidence for this answer, a name or a number: how far the head's output is above that for an
        average embedding (with layer normalisation: for one whose numbers are all equal). By default the squared length
        of the embedding.
    slice
        Of one slice alone.

    Notes
    -----
    Exact and complete for pools with slices, for mean, sum and max, and for a linear head: shares sum to what is shared
    out. A set's own spread counts as given in layer normalisation, as its order does in the pool. For attention, pma,
    wasserstein, and a head with a hidden layer, shares are gradient times token (or number), and `of` says so.
    """
    if isinstance(model.pool, CLSPool):
        raise UserError("pool cls: expected a pool that reads tokens but it reads the CLS vector alone")
    index = position(sets, item)
    batch, name, raw = _fetch(sets, index)
    tokens, mask, weights = batch.tokens, batch.mask, batch.weights
    if model.statistics is not None:
        tokens = model.statistics(tokens)
    target, average = None, 0.0
    of = "the squared length of the embedding"
    if label is not None:
        number = _answer(model, label)
        with torch.no_grad():
            vector = model.embed_batch(batch)
        vector.requires_grad_()
        with torch.enable_grad():
            normalized = _normalized(model.eval().normalization, vector)
            (target,) = torch.autograd.grad(model.decide(normalized)[0, number], [vector])
        mean = getattr(model.normalization, "running_mean", None)
        average = 0.0 if mean is None else float(target[0] @ mean)
        of = f"the evidence for {str(label)!r}"
    if slice is None:
        shares = explain_tokens(model.pool, tokens, mask, weights, target)[0]
        # What the average embedding would say is no token's doing: all of them bear it alike.
        shares = shares - average / len(shares)
    else:
        shares = explain_slices(_sliced(model, slice), tokens, mask, weights, target)[0, slice]
        of += f" along slice {slice}"
    hidden = label is not None and not isinstance(model.head, nn.Linear)
    if hidden or not isinstance(model.pool, SWEPool | MeanPool | SumPool | MaxPool):
        of += ", to first order (gradient times token)"
    grid = None
    if isinstance(sets, RawInput) and isinstance(sets.backbone, VisionBackbone):
        raw, grid = _as_seen(sets.backbone, raw, len(shares))
    return Explanation(name, of, shares, batch.tokens[0], raw, grid)


def position(sets: StoreInput | RawInput, item: str | int) -> int:
    """Find an item by its id, or by its position; a number that is no text is a position, whatever ids there are."""
    ids = sets.store.ids if isinstance(sets, StoreInput) else list(sets.source.ids)
    text = str(item)
    named = [place for place, name in enumerate(ids) if name == text] if isinstance(item, str) else []
    if len(named) > 1:
        places = ", ".join(map(str, named[:10])) + (f" and {len(named) - 10} more" if len(named) > 10 else "")
        raise UserError(
            f"item: expected an id of one item but {len(named)} are called {text!r}; ask for one of them by its "
            f"position ({places})"
        )
    if named:
        return named[0]
    if (number := _number(text, len(ids))) is not None:
        return number
    like = f"; ids look like {ids[0]!r}" if ids else ""
    raise UserError(f"item: expected an id or a position below {len(ids)} but got {text!r}{like}")


def write_explanation(told: Explanation, out: Path) -> None:
    """Write an explanation: ``.csv`` for anything, ``.png`` for images, ``.ply`` for clouds in space."""
    check_out(out, EXPLANATIONS)
    content = EXPLANATIONS[out.suffix](told)
    with written_aside(out) as aside:
        aside.write_bytes(content)


def _normalized(normalization: nn.Module, vector: Tensor) -> Tensor:
    """Normalise with the spread as given: a layer's does not change with the vector's length, so no share would."""
    if not isinstance(normalization, nn.LayerNorm):
        out: Tensor = normalization(vector)
        return out
    centred = vector - vector.mean(-1, keepdim=True)
    variance = centred.detach().square().mean(-1, keepdim=True)
    return centred / (variance + normalization.eps).sqrt()


def _fetch(sets: StoreInput | RawInput, index: int) -> tuple[Batch, str, Any]:
    if isinstance(sets, RawInput):
        return sets.one(index), sets.source.ids[index], sets.source.load(index)
    batches = sets.store.batches(1, indices=np.array([index]), shuffle=False)
    return next(iter(batches)), sets.store.ids[index], None


def _number(text: str, count: int) -> int | None:
    """Read a number below a count; digits that `int` does not take, a superscript say, are none."""
    number = int(text) if text.isascii() and text.isdecimal() else count
    return number if number < count else None


def _answer(model: Model, label: str | int) -> int:
    names = model.facts.labels.names
    if label in names:
        return names.index(str(label))
    if (number := _number(str(label), model.facts.outputs)) is not None:
        return number
    known = ", ".join(names[:10]) or f"0 to {model.facts.outputs - 1}"
    raise UserError(f"label: expected one of {known} but got {label!r}")


def _sliced(model: Model, slice: int) -> SWEPool:
    if not isinstance(model.pool, SWEPool):
        raise UserError(f"slice: expected a pool with slices but it is {model.facts.recipe.pooling.pool}")
    if not 0 <= slice < model.pool.slices:
        raise UserError(f"slice: expected a number below {model.pool.slices} but got {slice}")
    return model.pool


def _as_seen(backbone: VisionBackbone, image: Any, patches: int) -> tuple[Any, tuple[int, int]]:
    """Return the image as it came to the model, and the rows and columns of its patches."""
    recipe = backbone.preparer.recipe
    height, width = recipe.resized(image.height, image.width)
    high, wide = recipe.output
    top, left = (height - high) // 2, (width - wide) // 2
    seen = image.resize((width, height)).crop((left, top, left + wide, top + high))
    rows = round(sqrt(patches * high / wide))
    return seen, (rows, patches // rows)


def _table(told: Explanation) -> bytes:
    """Return a row a token: position, residue or coordinates where they are known, share."""
    residues = "".join(told.raw.split()) if isinstance(told.raw, str) else None
    points = told.raw.points if isinstance(told.raw, Points) else None
    if points is None and told.tokens.shape[1] <= 3:
        points = told.tokens.numpy()
    columns: dict[str, Any] = {"position": range(1, len(told.shares) + 1)}
    if residues is not None and len(residues) >= len(told.shares):
        columns["residue"] = residues[: len(told.shares)]
    elif told.grid is not None:
        columns |= dict(zip(("row", "column"), np.divmod(np.arange(len(told.shares)), told.grid[1]), strict=True))
    elif points is not None:
        columns |= {axis: points[:, number] for number, axis in zip(range(points.shape[1]), "xyz", strict=False)}
    columns["share"] = [f"{share:.6g}" for share in told.shares.tolist()]
    stream = StringIO(newline="")
    table = csv.writer(stream)
    table.writerow(columns)
    table.writerows(zip(*columns.values(), strict=True))
    return stream.getvalue().encode()


def _heat_map(told: Explanation) -> bytes:
    """Return the image with the shares over it."""
    if told.grid is None:
        raise UserError("out: expected images for a .png but these are none; write a .csv or .ply")
    image = require("PIL.Image", "data")
    red, green, blue = _colours(told.shares)
    small = np.stack([red, green, blue], axis=1).reshape(*told.grid, 3)
    heat = image.fromarray(small).resize(told.raw.size, image.Resampling.BILINEAR)
    stream = BytesIO()
    image.blend(told.raw.convert("RGB"), heat, 0.5).save(stream, "PNG")
    return stream.getvalue()


def _cloud(told: Explanation) -> bytes:
    """Return the points with their shares as colours: any viewer of clouds shows it."""
    points = told.raw.points if isinstance(told.raw, Points) else told.tokens.numpy()
    if points.shape[1] not in (2, 3):
        raise UserError(
            f"out: expected points in the plane or in space for a .ply but got {points.shape[1]} dimensions"
        )
    flat = np.zeros((len(points), 3))
    flat[:, : points.shape[1]] = points
    header = ["ply", "format ascii 1.0", f"comment share of {told.of}", f"element vertex {len(flat)}"]
    header += [f"property float {axis}" for axis in "xyz"] + [f"property uchar {c}" for c in ("red", "green", "blue")]
    header += ["property float share", "end_header"]
    rows = [
        f"{x:.6g} {y:.6g} {z:.6g} {red} {green} {blue} {share:.6g}"
        for (x, y, z), red, green, blue, share in zip(flat, *_colours(told.shares), told.shares.tolist(), strict=True)
    ]
    return ("\n".join([*header, *rows]) + "\n").encode()


def _colours(shares: Tensor) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Colour what speaks for it red, against it blue, neither white; the largest share is fully coloured."""
    scaled = (shares / shares.abs().max().clamp(min=1e-30)).numpy()
    rest = np.round(255 * (1 - np.abs(scaled))).astype(np.uint8)
    full = np.full_like(rest, 255)
    return np.where(scaled >= 0, full, rest), rest, np.where(scaled >= 0, rest, full)


# What a file becomes, by its suffix.
EXPLANATIONS: dict[str, Callable[[Explanation], bytes]] = {".csv": _table, ".png": _heat_map, ".ply": _cloud}
