"""How figures look, once for all of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cswe._extras import require

# Distinguishable by people who do not see red and green, and in print. On the page they are CSS variables, so that
# each has another shade in the dark.
BLUE, AMBER, GREEN, PURPLE, GREY = "#2364aa", "#d9822b", "#3a9a78", "#7b5ea7", "#6b7280"
ROSE, TEAL, BROWN = "#c2477f", "#2a9db0", "#8a6d3b"
COLOURS = (BLUE, AMBER, GREEN, PURPLE, ROSE, TEAL, BROWN, GREY)
INK, FAINT = "#1f2933", "#c9ced6"
# What a colour is called in the page's style sheet.
VARIABLES = {INK: "ink", FAINT: "faint"} | {colour: f"series-{number}" for number, colour in enumerate(COLOURS)}


def figure(
    width: float = 6, height: float = 4, columns: int = 1, ratios: Sequence[float] | None = None
) -> tuple[Any, Any]:
    """Give a figure and its axes, side by side, drawn without a screen."""
    require("matplotlib", "report")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    plot = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(plot)
    axes = plot.subplots(1, columns, width_ratios=ratios)
    for axis in [axes] if columns == 1 else axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(11)
    return plot, axes


def panel(title: str, xlabel: str = "", ylabel: str = "", *, width: float = 4.1, height: float = 2.9) -> Any:
    """Give the axes of a small figure: what a phone shows over its whole width and a desk side by side."""
    _, axes = figure(width, height)
    axes.set_title(title, color=INK, loc="left", fontsize=10)
    axes.set_xlabel(xlabel, color=INK, fontsize=9)
    axes.set_ylabel(ylabel, color=INK, fontsize=9)
    axes.tick_params(colors=INK, labelsize=8.5, length=3)
    for spine in axes.spines.values():
        spine.set_color(INK)
        spine.set_linewidth(0.8)
    axes.grid(color=FAINT, lw=0.5)
    axes.set_axisbelow(True)
    return axes


def save(plot: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG, the same bytes for the same figure."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with matplotlib.rc_context({"svg.hashsalt": name}):
        plot.savefig(paths[0], dpi=150, metadata={"Software": None})
        plot.savefig(paths[1], metadata={"Date": None})
    return paths
