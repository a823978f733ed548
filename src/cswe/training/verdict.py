"""What a comparison says, in one sentence computed from its table: whichever method wins, and however narrowly."""

import math

from cswe.training.table import Mean, Row, Table

METRICS = {
    "top1": "top-1 accuracy",
    "top5": "top-5 accuracy",
    "macro_f1": "macro F1",
    "balanced": "balanced accuracy",
    "nearest": "accuracy of the nearest neighbour",
    "f_max": "F-max",
    "r2": "R²",
}


def metric_name(metric: str) -> str:
    """Return the name of a score for people.

    Examples
    --------
    >>> metric_name("top1")
    'top-1 accuracy'
    """
    return METRICS.get(metric, metric)


def verdict(table: Table) -> str:
    """Say in a sentence which kind of pool is best, by how much, and what the bound on SWE changes.

    Of each kind the setting is chosen by validation; what is told of it is the test score. What is not clear
    (:attr:`~cswe.training.table.Mean.clear`) is not told as if it were.
    """
    layer, split = max(table.layers, default=0), _told_split(table)
    best = [row for family in dict.fromkeys(map(_family, table.rows)) if (row := _best(table, family, layer))]
    if not best:
        return "No run has a score yet."
    first, *others = sorted(best, key=lambda row: -row.mean(split, table.metric).mean)
    where = f" at layer {layer}" if len(table.layers) > 1 else ""
    told = f"With settings chosen by validation, {_name(first)} has the best {split} {metric_name(table.metric)}{where}"
    parts = [f"{told}, {_percent(first.mean(split, table.metric))}"]
    rivals = others[:1]
    if rivals and {_family(first), _family(rivals[0])} <= {"swe", "cswe"}:
        # Twins: the one that is neither says more.
        rivals += [row for row in others[1:] if _family(row) not in ("swe", "cswe")][:1]
    if rivals:
        leads = [_lead(_paired(first, rival, split, table.metric), _name(rival)) for rival in rivals]
        parts.append(" and ".join(leads))
    families = [_family(row) for row in (first, *rivals)]
    if not {"swe", "cswe"} <= set(families) and (bound := _bound_effect(best, split, table.metric)):
        parts.append(bound)
    return ", ".join(parts) + "."


def _told_split(table: Table) -> str:
    return "test" if "test" in table.splits else "validation"


def _family(row: Row) -> str:
    """Return the pool without the choices of its own."""
    return row.pool.partition(":")[0]


def _best(table: Table, family: str, layer: int) -> Row | None:
    """Return the row of a kind of pool that is best by validation; None if none has a score."""
    split = _told_split(table)
    rows = [
        row
        for row in table.at(layer)
        if _family(row) == family
        and all(math.isfinite(row.mean(name, table.metric).mean) for name in ("validation", split))
    ]
    return max(rows, key=lambda row: row.mean("validation", table.metric).mean, default=None)


def _paired(row: Row, other: Row, split: str, metric: str) -> Mean:
    mine, theirs = row.by_seed(split, metric), other.by_seed(split, metric)
    return Mean.of([mine[seed] - theirs[seed] for seed in mine if seed in theirs])


def _lead(difference: Mean, name: str) -> str:
    if _is_nothing(difference):
        return f"level with {name}" + (", on one seed" if difference.count < 2 else "")
    if difference.count < 2:
        return f"{_points(difference)} ahead of {name}, on one seed, which proves nothing"
    if difference.clear:
        return f"{_points(difference)} ahead of {name}"
    return f"not clearly ahead of {name} ({_points(difference)})"


def _bound_effect(best: list[Row], split: str, metric: str) -> str:
    """Say what the bound changes, if there are runs with and without it."""
    rows = {_family(row): row for row in best}
    if "swe" not in rows or "cswe" not in rows:
        return ""
    difference = _paired(rows["cswe"], rows["swe"], split, metric)
    if not math.isfinite(difference.mean):
        return ""
    if _is_nothing(difference):
        return "while the bound on SWE changes nothing"
    told = f"while the bound changes SWE by {_points(difference, signed=True)}"
    return told if difference.count < 2 or difference.clear else f"{told}, no more than chance would"


def _is_nothing(difference: Mean) -> bool:
    """Say whether every seed gave the same with and without."""
    return difference.mean == 0 and not difference.error > 0


def _name(row: Row) -> str:
    name, _, choices = row.label.partition(", ")
    slices = "" if row.slices is None else f"{row.slices} slice{'s' * (row.slices > 1)}"
    about = " and ".join(filter(None, (choices, slices)))
    return f"{name} with {about}" if about else name


def _percent(mean: Mean) -> str:
    spread = "" if math.isnan(mean.std) else f" ± {100 * mean.std:.1f} over {mean.count} seeds"
    return f"{100 * mean.mean:.1f} %{spread}"


def _points(difference: Mean, *, signed: bool = False) -> str:
    number = f"{100 * difference.mean:{'+' if signed else ''}.1f}"
    error = "" if math.isnan(difference.error) else f" ± {100 * difference.error:.1f}"
    return f"{number}{error} points"
