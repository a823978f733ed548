"""The SWGG landscape of a pair of point sets in the plane, and a slice that learns in it (the paper's Figure 1)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cswe._extras import require
from cswe.nn import learn_slices
from cswe.ops import SoftSort, swgg
from cswe.report.panels import Figure, Key, Panel
from cswe.report.style import AMBER, BLUE, GREEN, GREY, INK, PURPLE, figure, panel, save


@dataclass(frozen=True)
class Landscape:
    """D(θ) over the half circle, its floor W₂, and a bound with the arcs it leaves open."""

    x: Tensor
    y: Tensor
    degrees: Tensor
    distances: Tensor
    floor: float
    bound: float

    @property
    def open_share(self) -> float:
        """The share of directions that the bound leaves open."""
        return float((self.distances <= self.bound).double().mean())


def example_pair(count: int = 60, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Draw two mixtures of three clouds, such that some directions pair up the wrong clouds."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.tensor([[[-2.0, 0.0], [0.5, 1.5], [2.0, -1.0]], [[-1.0, 2.5], [2.5, 2.0], [0.5, -2.0]]])
    cloud = torch.arange(count) % 3
    noise = torch.randn(2, count, 2, generator=generator, dtype=torch.float64)
    x, y = centres[:, cloud] + 0.35 * noise
    return x, y


def measure_landscape(x: Tensor, y: Tensor, bound_above_least: float = 0.1, steps: int = 720) -> Landscape:
    """Compute D(θ) for directions over the half circle.

    Parameters
    ----------
    x, y
        Point sets of equal size, ``(N, 2)``.
    bound_above_least
        Where the bound lies between the smallest and the largest D, from 0 to 1.
    steps
        Number of directions.
    """
    assignment = require("scipy.optimize", "demo").linear_sum_assignment
    degrees = torch.arange(steps, dtype=torch.float64) * 180 / steps
    radians = torch.deg2rad(degrees)
    distances = swgg(x.unsqueeze(0), y, torch.stack([radians.cos(), radians.sin()], dim=1))[0]
    costs = torch.cdist(x, y).square()
    floor = float(costs[assignment(costs.numpy())].mean().sqrt())
    least, most = float(distances.min()), float(distances.max())
    return Landscape(x, y, degrees, distances, floor, least + bound_above_least * (most - least))


@dataclass(frozen=True)
class Path2D:
    """The way a slice took: its angle in degrees at every step, with the bound and without."""

    wanted: float
    free: Tensor
    bound: Tensor


def learn_in(landscape: Landscape, wanted: float = 105.0, start: float = 165.0, steps: int = 400) -> Path2D:
    r"""Learn one slice that wants to point at an angle which the bound forbids, with and without that bound.

    Parameters
    ----------
    landscape
        The pair and the bound.
    wanted
        The angle, in degrees, at which the objective :math:`1 - \cos^2(φ - φ^*)` is least.
    start
        Where the slice starts.
    steps
        Number of steps of Algorithm 1.
    """
    angle = torch.deg2rad(torch.tensor(wanted, dtype=torch.float64))
    target = torch.stack([angle.cos(), angle.sin()])
    first = torch.deg2rad(torch.tensor([start], dtype=torch.float64))
    theta = torch.stack([first.cos(), first.sin()], dim=1)
    paths = []
    for bound in (1e6, landscape.bound):
        found = learn_slices(
            landscape.x,
            landscape.y,
            lambda slices: (1 - (slices @ target).square()).sum(),
            theta,
            bound,
            slack=20.0,
            relaxation=SoftSort(0.1, relative=True),
            steps=steps,
            lr=0.01,
            dual_lr=0.1,
            slack_lr=0.05,
        )
        x, y = found.record["slices"][:, 0].unbind(-1)
        paths.append(torch.rad2deg(torch.atan2(y, x)) % 180)
    return Path2D(wanted, paths[0], paths[1])


def draw_landscape(landscape: Landscape, path: Path2D, folder: Path) -> list[Path]:
    """Draw the pair, its landscape and the learning slice, as ``swgg-landscape.png`` and ``.svg``."""
    plot, axes = figure(width=13, height=4.4, columns=3, ratios=(1, 1.5, 1.2))
    draws = (_draw_pair, _draw_distances, _draw_objective)
    for axis, draw, title, columns in zip(axes, draws, _TITLES, (3, 3, 2), strict=True):
        draw(axis, landscape, path)
        axis.set_title(title)
        axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns, fontsize=9)
    return save(plot, folder, "swgg-landscape")


def landscape_figure(landscape: Landscape, path: Path2D) -> Figure:
    """Draw the same for a page, as panels."""
    panels = []
    for draw, title, name in zip(
        (_draw_pair, _draw_distances, _draw_objective), _TITLES, ("pair", "distances", "objective"), strict=True
    ):
        axes = panel(title)
        draw(axes, landscape, path)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set(color=INK, fontsize=9)
        panels.append(Panel(f"landscape-{name}", axes, title))
    caption = (
        f"D(θ) is {landscape.distances.min():.2f} to {landscape.distances.max():.2f}; no plan costs less than "
        f"W₂ = {landscape.floor:.2f} (dotted). The bound {landscape.bound:.2f} (dashed) leaves "
        f"{landscape.open_share:.0%} of the directions open. A slice that wants to point at {path.wanted:.0f}° ends at "
        f"{path.free[-1]:.0f}°; under the bound, with slack, at {path.bound[-1]:.0f}°."
    )
    keys = [
        Key("μ; D(θ)", BLUE),
        Key("ν; objective f(θ)", AMBER),
        Key("best slice; within the bound", GREEN),
        Key("free slice", GREY),
        Key("bound slice", PURPLE),
    ]
    return Figure("landscape", caption, panels, keys)


_TITLES = ("two point sets in the plane", "SWGG over the direction of the slice", "objective")


def _draw_pair(axes: Any, landscape: Landscape, path: Path2D) -> None:
    least = float(landscape.degrees[landscape.distances.argmin()])
    axes.scatter(*landscape.x.T.tolist(), s=16, color=BLUE, label="μ", linewidths=0)
    axes.scatter(*landscape.y.T.tolist(), s=16, color=AMBER, label="ν", linewidths=0)
    slope = float(torch.tan(torch.deg2rad(torch.tensor(least))))
    axes.axline((0, 0), slope=slope, color=GREEN, lw=1.2, label="best slice")
    axes.set(aspect="equal", xlabel="x", ylabel="y")


def _draw_distances(axes: Any, landscape: Landscape, path: Path2D) -> None:
    degrees, distances = landscape.degrees.numpy(), landscape.distances.numpy()
    axes.plot(degrees, distances, color=BLUE, lw=1.6)
    bottom = landscape.floor - 0.08 * (distances.max() - landscape.floor)
    axes.fill_between(
        degrees, bottom, distances.max() * 1.02, where=distances <= landscape.bound, color=GREEN, alpha=0.18, lw=0,
        label=f"within ε ({landscape.open_share:.0%})",
    )  # fmt: skip
    axes.axhline(landscape.bound, color=GREEN, lw=1, ls="--", label=f"bound ε = {landscape.bound:.2f}")
    axes.axhline(landscape.floor, color=GREY, lw=1, ls=":", label=f"W₂ = {landscape.floor:.2f}")
    axes.set(
        xlabel="angle of θ in degrees", ylabel="D(θ)",
        xlim=(0, 180), ylim=(bottom, distances.max() * 1.02), xticks=range(0, 181, 30),
    )  # fmt: skip
    for angles, colour, name in ((path.free, GREY, "free slice"), (path.bound, PURPLE, "bound slice")):
        values = [float(landscape.distances[int(angle / 180 * len(degrees)) % len(degrees)]) for angle in angles]
        axes.plot(angles.tolist(), values, color=colour, lw=2.4, alpha=0.8)
        axes.plot(float(angles[-1]), values[-1], "o", color=colour, ms=7, label=f"{name}, {angles[-1]:.0f}°")


def _draw_objective(axes: Any, landscape: Landscape, path: Path2D) -> None:
    degrees = landscape.degrees.numpy()
    is_open = landscape.distances.numpy() <= landscape.bound
    cost = 1 - torch.cos(torch.deg2rad(landscape.degrees - path.wanted)).square()
    axes.plot(degrees, cost.numpy(), color=AMBER, lw=1.6, label="objective f(θ)")
    axes.fill_between(degrees, 0, 1.05, where=is_open, color=GREEN, alpha=0.18, lw=0, label="within ε")
    for angles, colour in ((path.free, GREY), (path.bound, PURPLE)):
        end = float(angles[-1])
        height = float(1 - torch.cos(torch.deg2rad(torch.tensor(end - path.wanted))).square())
        axes.plot(end, height, "o", color=colour, ms=7)
    axes.set(xlabel="angle of θ in degrees", ylabel="f(θ)", xlim=(0, 180), ylim=(0, 1.05), xticks=range(0, 181, 30))
