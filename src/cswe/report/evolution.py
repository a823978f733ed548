"""The evolution of SWGG, slack and dual variables, slice by slice (the paper's appendix figure)."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from cswe.report.gather import Run
from cswe.report.panels import Figure, Key, Panel
from cswe.report.style import panel

Series = npt.NDArray[np.float64]
_LINES = 32  # more slices than this are drawn as a band


def draw_evolution(runs: list[Run], colours: dict[str, str]) -> Figure | None:
    """Draw what every slice did over the epochs; None if no run has slices with a reference.

    Parameters
    ----------
    runs
        One run for every pool, of like numbers of slices.
    colours
        By pool.
    """
    followed = [run for run in runs if any("swgg" in line or "swgg_exact" in line for line in run.log)]
    if not followed:
        return None
    panels = [
        _panel("exact", "SWGG on validation, exact", followed, colours, "values", exact=True),
        _panel("relaxed", "SWGG in training, relaxed, and ε", followed, colours, "values"),
        _panel("slack", "slack s", followed, colours, "slack"),
        _panel("dual", "dual variable λ", followed, colours, "dual"),
    ]
    several = max(run.cell.slices or 0 for run in followed) > _LINES
    drawn = "Bands hold four fifths of the slices" if several else "Thin lines are slices"
    caption = (
        f"{drawn}, thick lines their mean, over the epochs of one seed. First the dissimilarity as it is, for runs "
        "with and without a bound; then what the bound acts on, the relaxed one, with ε dashed; the slack that was "
        "bought, and its price."
    )
    keys = [Key(f"{run.label}, seed {run.cell.seed}", colours[run.cell.pool]) for run in followed]
    return Figure("evolution", caption, [entry for entry in panels if entry is not None], keys)


def _panel(
    name: str, title: str, runs: list[Run], colours: dict[str, str], what: str, *, exact: bool = False
) -> Panel | None:
    axes = panel(title, "epoch", "")
    drawn = False
    for run in runs:
        values = _series(run, what, exact=exact)
        if not values.size:
            continue
        drawn = True
        _draw(axes, values, colours[run.cell.pool])
        if what == "values" and not exact and (bound := _series(run, "bound")).size:
            means = _means(bound)
            axes.plot(_epochs(means), means, color=colours[run.cell.pool], lw=1.2, ls="--")
    axes.xaxis.get_major_locator().set_params(integer=True)
    return Panel(f"evolution-{name}", axes, f"{title} of every slice over the epochs") if drawn else None


def _series(run: Run, what: str, *, exact: bool = False) -> Series:
    """Return values ``(epochs, slices)``; epochs in which there was none yet are not a number."""
    lines: list[list[float] | None] = [
        line.get("swgg_exact") if exact else line.get("swgg", {}).get(what) for line in run.log
    ]
    slices = max((len(line) for line in lines if line), default=0)
    rows = [line if line else [math.nan] * slices for line in lines]
    values = np.asarray(rows, dtype=np.float64).reshape(len(rows), slices)
    return values if np.isfinite(values).any() else np.empty((0, 0))


def _draw(axes: Any, values: Series, colour: str) -> None:
    epochs, few = _epochs(values), len(values) < 3
    if values.shape[1] > _LINES:
        known = np.where(np.isfinite(values).any(1, keepdims=True), values, 0.0)
        low, high = np.where(np.isfinite(values).any(1), np.nanquantile(known, [0.1, 0.9], axis=1), np.nan)
        axes.fill_between(epochs, low, high, color=colour, alpha=0.2, lw=0)
    else:
        axes.plot(epochs, values, color=colour, lw=0.7, alpha=0.4, marker="." if few else None, ms=4)
    axes.plot(epochs, _means(values), color=colour, lw=2, marker="o" if few else None, ms=5)


def _means(values: Series) -> Series:
    """Average over slices; an epoch without any number has none."""
    return np.array([np.nanmean(row) if np.isfinite(row).any() else np.nan for row in values])


def _epochs(values: Series) -> Series:
    return np.arange(1, len(values) + 1, dtype=np.float64)
