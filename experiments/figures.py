"""Draw accuracy against the number of slices, and the evolution of the bound: ``python -m experiments.figures``."""

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np

from cswe.report.style import AMBER, BLUE, FAINT, GREEN, GREY, PURPLE, ROSE, TEAL, figure, save
from cswe.training.cells import Result
from cswe.training.choices import parse_pool
from cswe.training.table import Row
from experiments.lookup import Results
from experiments.pools import RAW, RAW_POOLS, TOKEN_POOLS, TOKENS, Named, with_choices
from experiments.records import RESULTS, read_study
from experiments.studies import LITERAL
from experiments.tables import FIGURES
from experiments.tuning import PROTEIN_LAYER

Line = tuple[str, str, str]  # pool, label, colour
_PAPER: tuple[Line, ...] = (("swe", "SWE", AMBER), ("cswe", "C-SWE", BLUE))
_IMAGES: tuple[Line, ...] = (
    ("swe", "SWE, 30 epochs", AMBER),
    ("swe:epochs=80", "SWE, 80 epochs", ROSE),
    ("cswe", "C-SWE, 30 epochs", BLUE),
    ("cswe:epochs=80", "C-SWE, 80 epochs", PURPLE),
)
_PROTEINS: tuple[Line, ...] = (
    ("swe", "SWE, 256 × 20", AMBER),
    (with_choices("swe", LITERAL), "SWE, 32 × 50", ROSE),
    ("cswe", "C-SWE, 256 × 20", BLUE),
    (with_choices("cswe", LITERAL), "C-SWE, 32 × 50", PURPLE),
)
_LEVELS: tuple[Line, ...] = (("mean", "mean", GREY), ("cls", "CLS", TEAL), ("attention:queries=1", "attention", GREEN))
_MARKERS = "os^vD"
_BALANCED = [("top1", "accuracy"), ("balanced", "balanced accuracy")]


def _ours(pools: dict[str, Named], statistics: str, weighted: str, label: str) -> tuple[Line, ...]:
    return (
        (pools[statistics].text, "attentive statistics", PURPLE),
        (pools["moments"].text, "L-moments, K = 8", ROSE),
        (pools[weighted].text, label, TEAL),
    )


def main(arguments: list[str] | None = None) -> None:
    """Draw all figures that there are results for."""
    parser = argparse.ArgumentParser(prog="python -m experiments.figures", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder for the figures")
    chosen = parser.parse_args(arguments)
    results = Results(chosen.results)
    drawn = {
        "images-slices": _against_slices(
            results,
            [("images-slices", 12), ("images-table1", 12)],
            _IMAGES,
            [("top1", "top-1"), ("top5", "top-5")],
            (("mean:epochs=80", "mean", GREY), ("cls:epochs=80", "CLS", TEAL)),
        ),
        "proteins-slices": _against_slices(
            results,
            [("proteins-table", PROTEIN_LAYER)],
            _PROTEINS,
            [("top1", "accuracy")],
            (
                (with_choices("mean", LITERAL), "mean, 32 × 50", GREY),
                (with_choices("cls", LITERAL), "CLS, 32 × 50", TEAL),
            ),
        ),
        "points-slices": _against_slices(
            results,
            [("points-table", TOKENS)],
            (
                *_PAPER,
                *_ours(TOKEN_POOLS, "statistics-directions", "weighted-directions", "weighted L-moments"),
            ),
            _BALANCED,
            (_LEVELS[0], (TOKEN_POOLS["attention-directions"].text, "attention", GREEN)),
        ),
        "raw-slices": _against_slices(
            results,
            [("points-table", RAW)],
            (
                _PAPER[0],
                (RAW_POOLS["cswe"].text, "C-SWE", BLUE),
                *_ours(RAW_POOLS, "statistics", "weighted-8", "weighted, K = 8"),
            ),
            _BALANCED,
        ),
        "proteins-evolution": _evolution(list(read_study(chosen.results, "proteins-evolution").values())),
    }
    for name, plot in drawn.items():
        if plot is None:
            print(f"{name}: no results yet")
            continue
        print(", ".join(map(str, save(plot, chosen.out, name))))


def _against_slices(
    results: Results,
    sources: list[tuple[str, int]],
    lines: tuple[Line, ...],
    metrics: list[tuple[str, str]],
    levels: tuple[Line, ...] = _LEVELS,
) -> Any:
    """Draw test scores over the number of slices, one panel a metric; poolings without slices are level lines."""
    rows = [row for study, layer in sources for row in results.of(study).at(layer)]
    points = [[row.slices for row in rows if row.pool == pool] for pool, _, _ in lines]
    if max(map(len, points)) < 2:  # one point is no line
        return None
    plot, axes = figure(4.4 * len(metrics) + 1.8, 3.4, len(metrics))
    panels = [axes] if len(metrics) == 1 else list(axes)
    drawn = [line for line, found in zip(lines, points, strict=True) if found]
    for axis, (metric, title) in zip(panels, metrics, strict=True):
        for number, (pool, label, colour) in enumerate(drawn):
            own = sorted((row for row in rows if row.pool == pool), key=lambda row: row.slices or 0)
            means = [row.mean("test", metric) for row in own]
            spread = [0.0 if math.isnan(mean.std) else 100 * mean.std for mean in means]
            # A little to the side, so that bars do not hide each other.
            aside = 2 ** (0.05 * (number - (len(drawn) - 1) / 2))
            axis.errorbar(
                [aside * (row.slices or 0) for row in own], [100 * mean.mean for mean in means], spread,
                label=label, color=colour, marker=_MARKERS[number % len(_MARKERS)], ms=4, lw=1.5, elinewidth=0.9,
                capsize=2,
            )  # fmt: skip
        for pool, label, colour in levels:
            _level(axis, [row for row in rows if row.pool == pool], metric, label, colour)
        known = sorted({row.slices for row in rows if row.slices is not None})
        axis.set_xscale("log", base=2)
        axis.set_xticks(known, [str(number) for number in known])
        axis.minorticks_off()
        axis.grid(axis="y", color=FAINT, lw=0.5)
        axis.set_xlabel("slices L")
        axis.set_ylabel(f"test {title}, %")
    # Beside the panels: inside, it would lie on some line.
    plot.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    return plot


def _level(axis: Any, rows: list[Row], metric: str, label: str, colour: str) -> None:
    if rows:
        axis.axhline(100 * rows[0].mean("test", metric).mean, color=colour, lw=1.2, ls="--", label=label)


def _evolution(found: list[Result]) -> Any:
    """Draw SWGG, slack and dual variable of every slice over the epochs: of runs to the letter, if all are there."""
    done = [result for result in found if result.error is None]
    literal = [result for result in done if LITERAL in result.cell.pool]
    rest = [result for result in done if LITERAL not in result.cell.pool]
    whole = sorted(literal if len(literal) >= len(rest) else rest, key=lambda result: result.cell.pool)
    if not whole:
        return None
    plot, axes = figure(13, 3.4, 3)
    for result, colour in zip(whole, (AMBER, BLUE, GREEN), strict=False):
        bound = parse_pool(result.cell.pool)[1].get("bound")
        log = result.facts["log"]
        epochs = [record["epoch"] for record in log]
        series = {
            "exact SWGG on validation": [record.get("swgg_exact") for record in log],
            "slack s": [record.get("swgg", {}).get("slack") for record in log],
            "dual variable λ": [record.get("swgg", {}).get("dual") for record in log],
        }
        for axis, (title, values) in zip(axes, series.items(), strict=True):
            axis.set_title(title)
            axis.set_xlabel("epoch")
            axis.locator_params(axis="x", integer=True)
            if all(values):
                table = np.asarray(values, dtype=np.float64)
                axis.plot(epochs, table, color=colour, lw=0.5, alpha=0.4)
                axis.plot(epochs, table.mean(1), color=colour, lw=2, label=f"ε = {bound:g}" if bound else "no bound")
        if bound:
            axes[0].axhline(bound, color=colour, lw=1, ls="--")
    axes[0].legend(frameon=False, fontsize=8)
    return plot


if __name__ == "__main__":
    main()
