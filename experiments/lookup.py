"""Results as tables look them up and print them."""

import math
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from cswe.training.table import Mean, Row, Table, grid
from experiments.pools import POOLS
from experiments.records import read_study
from experiments.tuning import Search, read_choices

NOTHING = "–"


class Results:
    """The results of all studies, as tables look them up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._studies: dict[str, Table] = {}

    def of(self, study: str) -> Table:
        """Return the table of a study, failed runs left out."""
        if study not in self._studies:
            results = sorted(read_study(self.folder, study).values(), key=lambda result: result.cell.seed)
            self._studies[study] = Table.of([result for result in results if result.error is None])
        return self._studies[study]

    def row(self, study: str, pool: str, layer: int, slices: int | None = None) -> Row | None:
        """Return the seeds of a pool; without a number of slices, of the only one that there is."""
        rows = [row for row in self.of(study).at(layer) if row.pool == pool]
        return next((row for row in rows if slices is None or row.slices in (None, slices)), None)

    def named(self, study: str, key: str, layer: int) -> Row | None:
        """Return the seeds of a pooling of `POOLS`, in the size that it comes in."""
        return self.row(study, POOLS[key].text, layer, POOLS[key].slices)


def mean_text(row: Row | None, split: str = "test", metric: str = "top1") -> str:
    """Print mean and deviation over seeds in percent."""
    return NOTHING if row is None or not _has(row, split, metric) else row.mean(split, metric).text()


def _has(row: Row, split: str, metric: str) -> bool:
    return any(metric in result.scores.get(split, {}) for result in row.whole)


def gain(row: Row | None, rival: Row | None, split: str = "test", metric: str = "top1") -> Mean:
    """Average the differences between two rows, seed by seed."""
    if row is None or rival is None or not (_has(row, split, metric) and _has(rival, split, metric)):
        return Mean.of([])
    mine, theirs = row.by_seed(split, metric), rival.by_seed(split, metric)
    return Mean.of([mine[seed] - theirs[seed] for seed in mine if seed in theirs])


def for_overlap(difference: Mean, test_by_train: float) -> Mean:
    """Widen the error of a mean over random splits of the same items, which are not independent of each other.

    Nadeau and Bengio, Inference for the generalization error, Machine Learning 52, 2003.
    """
    return replace(difference, std=difference.std * math.sqrt(1 + difference.count * test_by_train))


def gain_text(
    row: Row | None, rival: Row | None, split: str = "test", metric: str = "top1", test_by_train: float = 0.0
) -> str:
    """Print a difference with its standard error, bold if it is clear; corrected for overlap if splits do."""
    difference = for_overlap(gain(row, rival, split, metric), test_by_train)
    if not difference.count:
        return NOTHING
    text = f"{round(100 * difference.mean, 2) + 0.0:+.2f}"  # a difference of nothing has no sign
    if math.isnan(difference.error):
        return f"{text} (one seed)"
    text += f" ± {100 * difference.error:.2f}"
    return f"**{text}**" if difference.clear else text


def swgg_text(row: Row | None) -> str:
    """Print exact SWGG after the last epoch, averaged over slices and seeds."""
    if row is None:
        return NOTHING
    return f"{mean(mean(result.facts['log'][-1]['swgg_exact']) for result in row.whole):.1f}"


def count_text(row: Row | None) -> str:
    """Print the number of seeds."""
    return NOTHING if row is None else str(len(row.whole))


def size_text(row: Row | None) -> str:
    """Print the length of the vector."""
    return NOTHING if row is None or row.size is None else str(row.size)


def rates_text(row: Row | None) -> str:
    """Print the learning rates of the seeds."""
    if row is None:
        return NOTHING
    return ", ".join(f"{rate:g}" for rate in sorted({result.cell.recipe.optimization.lr for result in row.whole}))


def seconds_text(row: Row | None) -> str:
    """Print the median time of a run: one that had to wait for others would say little in a mean."""
    if row is None:
        return NOTHING
    return f"{median(result.facts['seconds'] for result in row.whole):.0f} s"


def memory_text(row: Row | None) -> str:
    """Print the most memory of any run."""
    if row is None:
        return NOTHING
    return f"{max(result.facts['memory']['bytes'] for result in row.whole) / 1e9:.1f} GB"


def only_seeds(row: Row | None, seeds: Container[int]) -> Row | None:
    """Keep some seeds of a row."""
    if row is None:
        return None
    kept = tuple(result for result in row.results if result.cell.seed in seeds)
    return Row(row.pool, row.layer, row.slices, kept) if kept else None


def choices_table(results: Results, search: Search, layers: tuple[int, ...], keys: tuple[str, ...]) -> str:
    """Say what a search chose for every pooling at every layer."""
    chosen = read_choices(search, [results.folder])
    head = ["Layer", "Pooling", "Weight decay", "Dropout", "Rate", "Validation", "Points tried", "Worst of them"]
    lines = []
    for layer in layers:
        for key in keys:
            if (entry := chosen.get((layer, key, None))) is not None:
                values = [choice.partition("=")[2] for choice in entry["choices"]]
                tried = entry["tried"].values()
                scores = [f"{100 * entry['validation']:.2f}", str(len(tried)), f"{100 * min(tried):.2f}"]
                lines.append([str(layer), POOLS[key].label, *values, *scores])
    return grid(head, lines)
