"""How good each pooling is: against the number of slices, against the size of the vector, and over the epochs."""

import math
from typing import Any

from cswe.report.gather import Run
from cswe.report.panels import Figure, Key, Panel
from cswe.report.style import INK, panel
from cswe.training.cells import label_of
from cswe.training.table import Row, Table
from cswe.training.verdict import metric_name


def draw_accuracy(table: Table, colours: dict[str, str]) -> Figure:
    """Draw the score against the number of slices, and against the number of numbers that a set becomes."""
    split = "test" if "test" in table.splits else "validation"
    layer = max(table.layers)
    rows = [row for row in table.at(layer) if math.isfinite(row.mean(split, table.metric).mean)]
    name = f"{split} {metric_name(table.metric)}, %"
    pools = list(dict.fromkeys(row.pool for row in rows))
    by_slices = panel("against the number of slices", "slices L", name, height=2.5)
    by_size = panel("against the length of the vector", "numbers per set", name, height=2.5)
    for number, pool in enumerate(pools):
        own = sorted((row for row in rows if row.pool == pool), key=lambda row: row.size or 0)
        # A little to the side of each other, so that equal values do not hide one another.
        shift = 2 ** (0.07 * (number - (len(pools) - 1) / 2)) if own[0].slices is not None else 1.0
        if own[0].slices is None:
            _level(by_slices, own[0], split, table.metric, colours[pool])
        else:
            _line(by_slices, [shift * (row.slices or 0) for row in own], own, split, table.metric, colours[pool])
        _line(by_size, [shift * (row.size or 0) for row in own], own, split, table.metric, colours[pool])
    _doubling(by_slices, sorted({row.slices for row in rows if row.slices is not None}))
    _doubling(by_size, sorted({row.size for row in rows if row.size}))
    panels = [
        Panel("accuracy-slices", by_slices, f"{name} of every pooling against the number of slices"),
        Panel("accuracy-size", by_size, f"{name} of every pooling against the length of its vector"),
    ]
    if len(table.layers) > 1:
        panels.append(Panel("accuracy-layers", _by_layer(table, split, name, colours), f"{name} against the layer"))
    where = f", tokens of layer {layer}" if len(table.layers) > 1 else ""
    return Figure(
        "accuracy",
        f"Means over seeds{where}; bars and bands are one standard deviation. Pools without slices are level lines; "
        "those with slices are drawn a little apart, so that none hides another.",
        panels,
        [Key(label_of(pool), colours[pool]) for pool in pools],
    )


def _by_layer(table: Table, split: str, name: str, colours: dict[str, str]) -> Any:
    """Draw the score over the backbone's layers, each pool with the most slices that it has."""
    axes = panel("against the layer", "layer, with the most slices", name, height=2.5)
    for pool in dict.fromkeys(row.pool for row in table.rows):
        rows = [row for row in table.rows if row.pool == pool and math.isfinite(row.mean(split, table.metric).mean)]
        most = max((row.slices or 0 for row in rows), default=0)
        own = sorted((row for row in rows if (row.slices or 0) == most), key=lambda row: row.layer)
        if own:
            _line(axes, [row.layer for row in own], own, split, table.metric, colours[pool])
    axes.set_xticks(table.layers)
    return axes


def draw_differences(table: Table, colours: dict[str, str]) -> Figure | None:
    """Draw the paired differences with their margins to each side; None if there is nothing to compare."""
    split = "test" if "test" in table.splits else "validation"
    entries = [entry for entry in table.differences(split) if math.isfinite(entry.mean.mean)]
    if not entries:
        return None
    several = len(table.layers) > 1
    axes = panel("", "points of difference", "", height=0.9 + 0.24 * len(entries))
    axes.axvline(0, color=INK, lw=0.8)
    names = []
    for place, entry in enumerate(reversed(entries)):
        error = 0.0 if math.isnan(entry.mean.margin) else 100 * entry.mean.margin
        colour = colours[entry.row.pool]
        axes.errorbar(100 * entry.mean.mean, place, xerr=error, fmt="o", color=colour, ms=5, lw=1.6, capsize=3)
        slices = "" if entry.slices is None else f", L = {entry.slices}"
        names.append(f"{entry.row.label}{slices}" + (f", layer {entry.row.layer}" if several else ""))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.grid(visible=False, axis="y")
    against = label_of(table.baseline)
    told = f"Difference of {split} {metric_name(table.metric)} to {against}, seed by seed; bars are 95 % intervals"
    about = f"{told}, by Student's t for so few seeds. A bar that crosses zero is no finding."
    return Figure("differences", about, [Panel("differences", axes, told)])


def draw_curves(runs: list[Run], metric: str, colours: dict[str, str]) -> Figure:
    """Draw training loss and validation score over the epochs, one line a pool: the mean of its seeds."""
    loss = panel("training loss", "epoch", "")
    score = panel(f"validation {metric_name(metric)}, %", "epoch", "")
    pools = list(dict.fromkeys(run.cell.pool for run in runs if run.log))
    for pool in pools:
        logs = [run.log for run in runs if run.cell.pool == pool and run.log]
        _curve(loss, [[line["loss"] for line in log] for log in logs], colours[pool])
        curves = [[100 * line["validation"].get(metric, math.nan) for line in log] for log in logs]
        _curve(score, curves, colours[pool])
    slices = sorted({run.cell.slices for run in runs if run.cell.slices is not None})
    where = f"L = {slices[-1]}. " if slices else ""
    return Figure(
        "training",
        f"{where}Lines are means over seeds, bands reach from the lowest to the highest.",
        [
            Panel("training-loss", loss, "training loss of every pooling over the epochs"),
            Panel("training-score", score, f"validation {metric_name(metric)} of every pooling over the epochs"),
        ],
        [Key(label_of(pool), colours[pool]) for pool in pools],
    )


def _line(axes: Any, places: list[float], rows: list[Row], split: str, metric: str, colour: str) -> None:
    means = [row.mean(split, metric) for row in rows]
    spread = [0.0 if math.isnan(mean.std) else 100 * mean.std for mean in means]
    values = [100 * mean.mean for mean in means]
    axes.errorbar(places, values, yerr=spread, color=colour, marker="o", ms=4.5, lw=1.6, capsize=2.5, elinewidth=1)


def _level(axes: Any, row: Row, split: str, metric: str, colour: str) -> None:
    mean = row.mean(split, metric)
    axes.axhline(100 * mean.mean, color=colour, lw=1.6)
    if not math.isnan(mean.std):
        axes.axhspan(100 * (mean.mean - mean.std), 100 * (mean.mean + mean.std), color=colour, alpha=0.15, lw=0)


def _doubling(axes: Any, places: list[int]) -> None:
    """Scale an axis by doublings, with a tick at every place that occurs."""
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    if not places:
        axes.set_xticks([])
        return
    shown = places if len(places) <= 7 else places[:: math.ceil(len(places) / 7)]
    axes.set_xticks(shown, [str(place) for place in shown])
    axes.set_xlim(places[0] / 1.3, places[-1] * 1.3)


def _curve(axes: Any, logs: list[list[float]], colour: str) -> None:
    length = max(map(len, logs))
    # Runs that stopped early, or failed, end earlier.
    columns = [[log[epoch] for log in logs if epoch < len(log)] for epoch in range(length)]
    columns = [[value for value in column if math.isfinite(value)] for column in columns]
    epochs = list(range(1, length + 1))
    means = [math.fsum(column) / len(column) if column else math.nan for column in columns]
    axes.plot(epochs, means, color=colour, lw=1.6, marker="o" if length < 3 else None, ms=4)
    if len(logs) > 1:
        low, high = ([pick(column, default=math.nan) for column in columns] for pick in (min, max))
        axes.fill_between(epochs, low, high, color=colour, alpha=0.15, lw=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
