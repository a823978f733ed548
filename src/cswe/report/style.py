"""How figures look, once for all of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cswe._extras import require

# Distinguishable by people who do not see red and green, and in print.
BLUE, AMBER, GREEN, PURPLE, GREY = "#2364aa", "#d9822b", "#3a9a78", "#7b5ea7", "#6b7280"
COLOURS = (BLUE, AMBER, GREEN, PURPLE, GREY)


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


def save(plot: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG, the same bytes for the same figure."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with matplotlib.rc_context({"svg.hashsalt": name}):
        plot.savefig(paths[0], dpi=150, metadata={"Software": None})
        plot.savefig(paths[1], metadata={"Date": None})
    return paths
