"""What a pool has learned to look along: angles between slices, their weight, and what classes look like on them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from cswe.nn import SWEPool
from cswe.nn.readouts import Flatten, MapPoints, MeanPoints, Moments, Statistics
from cswe.report.panels import Figure, Panel
from cswe.report.style import AMBER, BLUE, INK, panel
from cswe.tokens import Batches, TokenStore
from cswe.training.model import Model

Matrix = npt.NDArray[np.float64]
MOMENTS = ("mean", "spread", "skewness", "peakedness")
_SETS = 2000  # enough for profiles of classes


@dataclass(frozen=True)
class Seen:
    """What is measured of a pool's slices.

    Parameters
    ----------
    angles
        Between every two slices, in degrees from 0 to 90, ``(L, L)``.
    weights
        The share of every slice in what the head adds up, ``(L,)``; None if the readout mixes slices.
    profiles
        The first L-moments of every class along every slice, ``(moments, classes, L)``: how far its mean lies from that
        of all classes, in standard deviations within a class. None without tokens or classes.
    classes
        Names of the classes.
    """

    angles: Matrix
    weights: Matrix | None
    profiles: Matrix | None
    classes: tuple[str, ...]


def look_at(model: Model, store: TokenStore | None) -> Seen | None:
    """Measure the slices of a trained model; None if it has none."""
    if not isinstance(model.pool, SWEPool):
        return None
    with torch.no_grad():
        directions = model.pool.slicer.directions().double()
        angles = torch.rad2deg(torch.arccos((directions @ directions.T).abs().clamp(max=1)))
        sample = _sample(model, store)
        features = None if sample is None else sample[0]
        return Seen(
            angles.numpy(),
            slice_weights(model, features),
            None if sample is None else class_profiles(sample[1], sample[2], model.facts.outputs),
            model.facts.labels.names or tuple(map(str, range(model.facts.outputs))),
        )


@torch.no_grad()
def slice_weights(model: Model, features: Tensor | None) -> Matrix | None:
    """Return each slice's share of the spread of what the head adds up; features are what the head sees."""
    pool = model.pool
    assert isinstance(pool, SWEPool)
    layers = [layer for layer in model.head.modules() if isinstance(layer, nn.Linear)]
    weight: Tensor = layers[-1].weight.double()
    if model.facts.task == "classification":
        weight = weight - weight.mean(0)  # what all classes gain alike changes no answer
    if len(layers) > 1:
        # A hidden unit counts by what it can do to the answer.
        weight = layers[0].weight.double() * weight.norm(dim=0).unsqueeze(1)
    spread = torch.ones(weight.shape[1]) if features is None else features.double().std(0)
    power = (weight * spread).square().sum(0)
    heads = max(1, pool.weightings)
    if isinstance(pool.readout, Statistics) or (isinstance(pool.readout, Moments) and pool.readout.means is not None):
        # All means, which some slices may not have, and then the rest.
        means = pool.readout.means or pool.slices
        located, rest = power.split([heads * means, len(power) - heads * means])
        power = rest.view(heads, pool.slices, -1).sum((0, 2))
        power[:means] += located.view(heads, means).sum(0)
    elif isinstance(pool.readout, Moments | Flatten | MapPoints | MeanPoints):
        power = power.view(heads, pool.slices, -1).sum((0, 2))
    else:
        return None
    total = power.sum()
    return (power / total).numpy() if float(total) > 0 else None


def class_profiles(moments: Tensor, labels: Tensor, classes: int) -> Matrix:
    """Average L-moments ``(n, L, k)`` by class, in units of the spread within a class: ``(k, classes, L)``."""
    counts = torch.bincount(labels, minlength=classes).double()
    means = torch.zeros(classes, *moments.shape[1:], dtype=torch.float64)
    means.index_add_(0, labels, moments.double())
    means /= counts.clamp(min=1).view(-1, 1, 1)
    within = (moments.double() - means[labels]).square().mean(0).sqrt()
    present = counts > 0
    centred = (means - means[present].mean(0)) / within.clamp(min=1e-12)
    centred[~present] = torch.nan
    return centred.permute(2, 0, 1).numpy()


def _sample(model: Model, store: TokenStore | None) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return features, L-moments and labels of some sets; those of the test split, if there is one."""
    if store is None or model.facts.task != "classification" or store.labels is None:
        return None
    items = store.split("test" if "test" in store.splits else None)
    items = items[np.linspace(0, len(items) - 1, min(len(items), _SETS)).round().astype(np.int64)]
    features, moments, labels = [], [], []
    pool = model.pool
    assert isinstance(pool, SWEPool)
    for batch in Batches(store, 256, indices=items, shuffle=False):
        features.append(model.normalization(model.embed_batch(batch)))
        sets = pool.project(batch.tokens, batch.mask, batch.weights)
        # Under the first weighting, if there are several.
        read = Moments(len(MOMENTS))(sets).view(len(batch), -1, pool.slices, len(MOMENTS))
        moments.append(read[:, 0])
        assert batch.labels is not None
        labels.append(batch.labels)
    return torch.cat(features), torch.cat(moments), torch.cat(labels)


EXPLANATION = (
    "Weight: a slice's share in what the head adds up; dashed, if all had the same. By class: how far a class lies "
    "from the mean of all classes along a slice, for the first four L-moments, in standard deviations within a class; "
    "blue is below, amber above."
)


def draw_slices(seen: Seen, name: str, label: str) -> Figure:
    """Draw angles, weights and profiles."""
    panels = [_angles(seen, name)]
    if seen.weights is not None:
        panels.append(_weights(seen.weights, name))
    if seen.profiles is not None:
        limit = float(np.nanquantile(np.abs(seen.profiles), 0.99)) or 1.0
        panels += [_profile(seen, number, name, limit) for number in range(len(MOMENTS))]
    return Figure(f"slices-{name}", _told_angles(seen.angles), panels, title=label)


def _told_angles(angles: Matrix) -> str:
    count = len(angles)
    if count == 1:
        return "There is one slice, so there are no angles."
    between = angles[np.triu_indices(count, 1)]
    return f"Angles between slices: {between.min():.0f}° to {between.max():.0f}°, {between.mean():.0f}° on average."


def _angles(seen: Seen, name: str) -> Panel:
    count = len(seen.angles)
    axes = panel("angle between slices", "slice", "slice")
    shown = seen.angles.copy()
    if count > 1:
        np.fill_diagonal(shown, np.nan)
    _picture(axes, shown, _ramp("angles", [(*_rgb(BLUE), 1.0), (*_rgb(BLUE), 0.05)]), 0, 90, "°")
    return Panel(f"slices-{name}-angles", axes, _told_angles(seen.angles))


def _weights(weights: Matrix, name: str) -> Panel:
    axes = panel("weight in the answer", "slice", "share, %")
    count, shares = len(weights), 100 * weights
    axes.bar(np.arange(1, count + 1), shares, color=BLUE, width=0.8 if count < 40 else 1.0)
    axes.axhline(100 / count, color=AMBER, lw=1.2, ls="--")
    axes.grid(visible=False, axis="x")
    axes.set_xlim(0.5, count + 0.5)
    axes.set_ylim(0, max(shares.max(), 100 / count) * 1.08)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return Panel(f"slices-{name}-weights", axes, "weight of every slice; dashed, if all had the same")


def _profile(seen: Seen, number: int, name: str, limit: float) -> Panel:
    assert seen.profiles is not None
    classes = seen.profiles.shape[1]
    axes = panel(f"{MOMENTS[number]} by class", "slice", "", height=2.9 if classes <= 12 else 3.6)
    clear = [(*_rgb(BLUE), 1.0), (*_rgb(BLUE), 0.0), (*_rgb(AMBER), 0.0), (*_rgb(AMBER), 1.0)]
    _picture(axes, seen.profiles[number], _ramp("profile", clear, (0.0, 0.5, 0.5, 1.0)), -limit, limit, "σ")
    if classes <= 20:
        names = [text if len(text) <= 14 else f"{text[:13]}…" for text in seen.classes]
        # A dollar is a dollar, and no formula.
        axes.set_yticks(range(1, classes + 1), names, parse_math=False)
    else:
        axes.set_ylabel("class", fontsize=9)
    return Panel(f"slices-{name}-{MOMENTS[number]}", axes, f"{MOMENTS[number]} of every class along every slice")


def _picture(axes: Any, values: Matrix, colours: Any, low: float, high: float, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.grid(visible=False)
    rows, columns = values.shape
    # Slices are counted from one.
    extent = (0.5, columns + 0.5, rows + 0.5, 0.5)
    image = axes.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="none", extent=extent)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, fraction=0.06)
    bar.ax.tick_params(colors=INK, labelsize=8, length=2)
    bar.outline.set_visible(False)
    bar.ax.set_title(unit, fontsize=8, color=INK)


def _ramp(name: str, colours: list[tuple[float, ...]], places: tuple[float, ...] | None = None) -> Any:
    """Make a colour map that fades into the page's background, light or dark."""
    from matplotlib.colors import LinearSegmentedColormap

    where = places or tuple(np.linspace(0, 1, len(colours)).tolist())
    return LinearSegmentedColormap.from_list(name, list(zip(where, colours, strict=True)))


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
