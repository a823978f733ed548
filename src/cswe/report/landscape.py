"""The SWGG landscape of a pair of point sets in the plane (the paper's Figure 1, left)."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cswe._extras import require
from cswe.ops import swgg
from cswe.report.style import AMBER, BLUE, GREEN, GREY, figure, save


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


def draw_landscape(landscape: Landscape, folder: Path) -> list[Path]:
    """Draw the pair and its landscape, as ``swgg-landscape.png`` and ``.svg``."""
    plot, (left, right) = figure(width=10, height=4.2, columns=2, ratios=(1, 1.5))
    least = float(landscape.degrees[landscape.distances.argmin()])
    left.scatter(*landscape.x.T.tolist(), s=16, color=BLUE, label="μ", linewidths=0)
    left.scatter(*landscape.y.T.tolist(), s=16, color=AMBER, label="ν", linewidths=0)
    left.axline(
        (0, 0), slope=float(torch.tan(torch.deg2rad(torch.tensor(least)))), color=GREEN, lw=1.2, label="best slice"
    )
    left.set(aspect="equal", title="two point sets in the plane", xlabel="x", ylabel="y")
    left.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=9)

    degrees, distances = landscape.degrees.numpy(), landscape.distances.numpy()
    right.plot(degrees, distances, color=BLUE, lw=1.6)
    is_open = distances <= landscape.bound
    bottom = landscape.floor - 0.08 * (distances.max() - landscape.floor)
    right.fill_between(
        degrees, bottom, distances.max() * 1.02, where=is_open, color=GREEN, alpha=0.18, lw=0,
        label=f"directions within the bound ({landscape.open_share:.0%})",
    )  # fmt: skip
    right.axhline(landscape.bound, color=GREEN, lw=1, ls="--", label=f"bound ε = {landscape.bound:.2f}")
    right.axhline(landscape.floor, color=GREY, lw=1, ls=":", label=f"W₂ = {landscape.floor:.2f}, the floor")
    right.set(
        title="SWGG over the direction of the slice", xlabel="angle of θ in degrees", ylabel="D(θ)",
        xlim=(0, 180), ylim=(bottom, distances.max() * 1.02), xticks=range(0, 181, 30),
    )  # fmt: skip
    right.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=9)
    return save(plot, folder, "swgg-landscape")
