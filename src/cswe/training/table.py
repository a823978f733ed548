"""Tables of a comparison: mean (std) over seeds as the paper prints them, and paired differences."""

import csv
import io
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cswe.training.cells import Result, label_of
from cswe.training.checkpoint import replace_text
from cswe.training.task import CHOSEN_BY, check_metric

SPLITS = ("train", "validation", "test")
# Student's t: how many standard errors a mean is away from zero once in twenty times by chance, from two values on.
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
CLEAR = "more than chance would give once in twenty times, by Student's t for so few seeds"


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, with the standard deviation between them (of a sample: n − 1)."""

    mean: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """Average some numbers; one alone has no deviation.

        Examples
        --------
        >>> Mean.of([0.5, 0.75, 1.0])
        Mean(mean=0.75, std=0.25, count=3)
        """
        if not values:
            return cls(math.nan, math.nan, 0)
        finite = all(map(math.isfinite, values))
        std = statistics.stdev(values) if len(values) > 1 and finite else math.nan
        return cls(math.fsum(values) / len(values) if finite else math.nan, std, len(values))

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return self.std / math.sqrt(self.count) if self.count else math.nan

    @property
    def margin(self) -> float:
        """How far from zero a mean may be by chance, once in twenty times more: some standard errors.

        With few seeds that takes more than two, since the error itself is known badly: 12.7 of them with two seeds, 4.3
        with three, 2.8 with five.
        """
        return _STUDENT[min(self.count - 1, len(_STUDENT)) - 1] * self.error if self.count > 1 else math.nan

    @property
    def clear(self) -> bool:
        """Whether the mean differs from zero by more than chance would give once in twenty times.

        Examples
        --------
        >>> Mean.of([0.01, 0.02, 0.03]).clear, Mean.of([0.01, 0.02, 0.03, 0.02, 0.02]).clear
        (False, True)
        """
        return abs(self.mean) > self.margin

    def text(self, *, signed: bool = False, error: bool = False) -> str:
        """Print in percent, the deviation (or the standard error) in brackets.

        Examples
        --------
        >>> Mean(0.5787, 0.0027, 3).text(), Mean(0.5787, math.nan, 1).text(), Mean(math.nan, math.nan, 3).text()
        ('57.87 (0.27)', '57.87', 'nan')
        """
        if not self.count:
            return "–"
        if math.isnan(self.mean):
            return "nan"
        spread = self.error if error else self.std
        text = f"{100 * self.mean:+.2f}" if signed else f"{100 * self.mean:.2f}"
        return text if math.isnan(spread) else f"{text} ({100 * spread:.2f})"


UNFINISHED = "unfinished"  # how the error of a run begins that may yet be gone on with


@dataclass(frozen=True)
class Row:
    """All seeds of a pool with a number of slices at a layer."""

    pool: str
    layer: int
    slices: int | None
    results: tuple[Result, ...]

    @property
    def label(self) -> str:
        """The pool's name."""
        return label_of(self.pool)

    @property
    def whole(self) -> tuple[Result, ...]:
        """The runs that did not fail."""
        return tuple(result for result in self.results if result.error is None)

    @property
    def size(self) -> int | None:
        """Length of the embedding."""
        return self.whole[0].size if self.whole else None

    @property
    def note(self) -> str:
        """What must be said beside the numbers."""
        errors = [result.error for result in self.results if result.error is not None]
        unfinished = sum(error.startswith(UNFINISHED) for error in errors)
        counts = {"failed": len(errors) - unfinished, UNFINISHED: unfinished}
        return ", ".join(f"{count} of {len(self.results)} runs {what}" for what, count in counts.items() if count)

    def mean(self, split: str, metric: str) -> Mean:
        """Average a score over seeds."""
        return Mean.of(
            [result.scores[split][metric] for result in self.whole if metric in result.scores.get(split, {})]
        )

    def by_seed(self, split: str, metric: str) -> dict[int, float]:
        """Return a score of every seed that has it."""
        scored = [result for result in self.whole if metric in result.scores.get(split, {})]
        return {result.cell.seed: result.scores[split][metric] for result in scored}


@dataclass(frozen=True)
class Difference:
    """A row against the baseline: the mean of the differences seed by seed."""

    row: Row
    baseline: Row
    mean: Mean

    @property
    def slices(self) -> int | None:
        """The number of slices at which they are compared: that of both, or of the one that has some."""
        return self.baseline.slices if self.row.slices is None else self.row.slices

    @property
    def clear(self) -> bool:
        """Whether the difference is more than chance."""
        return self.mean.clear


@dataclass(frozen=True)
class Table:
    """Rows of a comparison.

    Parameters
    ----------
    rows
        In the order in which they are printed.
    metric
        The score that tables print.
    baseline
        The pool that others are compared with.
    """

    rows: tuple[Row, ...]
    metric: str
    baseline: str

    @classmethod
    def of(cls, results: Sequence[Result], metric: str | None = None, baseline: str | None = None) -> "Table":
        """Group results by pool, layer and slices; the order is that of the results."""
        groups: dict[tuple[str, int, int | None], list[Result]] = {}
        for result in results:
            groups.setdefault((result.cell.pool, result.cell.layer, result.cell.slices), []).append(result)
        rows = tuple(Row(*key, tuple(group)) for key, group in groups.items())
        # A run that failed may not know its task, and is noted with one nevertheless: whole ones are asked first.
        tasks = [result.facts["task"] for result in sorted(results, key=lambda result: result.error is not None)]
        chosen = metric or (CHOSEN_BY[tasks[0]] if tasks else "top1")
        known = {name: None for result in results for scores in result.scores.values() for name in scores}
        if known:
            check_metric(chosen, known)
        return cls(rows, chosen, baseline or (rows[0].pool if rows else ""))

    @property
    def layers(self) -> list[int]:
        """The layers compared."""
        return sorted({row.layer for row in self.rows})

    @property
    def splits(self) -> list[str]:
        """The splits that have scores."""
        return [name for name in SPLITS if any(name in result.scores for row in self.rows for result in row.whole)]

    def at(self, layer: int) -> list[Row]:
        """Return the rows of a layer."""
        return [row for row in self.rows if row.layer == layer]

    def find(self, pool: str, layer: int, slices: int | None) -> Row | None:
        """Return a row; a pool without slices is the same for every number of them."""
        for row in self.at(layer):
            if row.pool == pool and row.slices in (None, slices):
                return row
        return None

    def differences(self, split: str = "test", baseline: str | None = None) -> list[Difference]:
        """Compare every row with the baseline at the same layer and number of slices, seed by seed.

        A pool without slices is the same for every number of them: it is compared at each that the other has.
        """
        name = baseline or self.baseline
        found = []
        for row in self.rows:
            if row.pool == name:
                continue
            for other in self.at(row.layer):
                if other.pool != name or not (None in (row.slices, other.slices) or row.slices == other.slices):
                    continue
                mine, theirs = row.by_seed(split, self.metric), other.by_seed(split, self.metric)
                shared = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
                if shared:
                    found.append(Difference(row, other, Mean.of(shared)))
        return found

    def markdown(self) -> str:
        """Print everything as Markdown: the table, layers side by side, and the differences."""
        keys = list(dict.fromkeys((row.pool, row.slices) for row in self.rows))
        splits = self.splits
        several = len(self.layers) > 1
        head = ["Pooling", "L", "Size"]
        for layer in self.layers:
            head += [f"Layer {layer}: {split}" if several else split.capitalize() for split in splits]
        lines = []
        for pool, slices in keys:
            rows = {layer: self.find(pool, layer, slices) for layer in self.layers}
            known = [row for row in rows.values() if row is not None]
            notes = sorted({row.note for row in known if row.note})
            name = label_of(pool) + (f" ({'; '.join(notes)})" if notes else "")
            # Layers of different width give embeddings of different length.
            sizes = dict.fromkeys(str(row.size) for row in known if row.size)
            cells = [name, "" if slices is None else str(slices), " / ".join(sizes)]
            for row in rows.values():
                cells += ["–" if row is None else row.mean(split, self.metric).text() for split in splits]
            lines.append(cells)
        seeds = sorted({len(row.whole) for row in self.rows if row.whole})
        count = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1])))) if seeds else "no"
        title = f"{self.metric} in percent, mean (standard deviation) over {count} seeds"
        text = f"{title}\n\n{grid(head, lines)}"
        for split in splits[-1:]:
            if differences := self.differences(split):
                text += f"\n{self._differences(differences, split)}"
        return text

    def _differences(self, differences: list[Difference], split: str) -> str:
        head = ["Pooling", "L", "Layer", "Difference", "Seeds", "Clear"]
        lines = [
            [
                entry.row.label,
                "" if entry.slices is None else str(entry.slices),
                str(entry.row.layer),
                entry.mean.text(signed=True, error=True),
                str(entry.mean.count),
                "yes" if entry.clear else "no",
            ]
            for entry in differences
        ]
        against = label_of(self.baseline)
        title = f"{split.capitalize()} {self.metric} against {against}, points of difference at the same seed"
        return f"{title} (standard error); clear: {CLEAR}\n\n{grid(head, lines)}"

    def csv(self) -> str:
        """Return every score of every row: one line each, with mean, deviation and number of seeds.

        A row of which all runs failed has no score, and a line that says so.
        """
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["pool", "layer", "slices", "size", "split", "metric", "mean", "std", "seeds", "failed"])
        for row in self.rows:
            lead = [row.pool, row.layer, "" if row.slices is None else row.slices, row.size]
            failed = len(row.results) - len(row.whole)
            for split in SPLITS:
                known = {name: None for result in row.whole for name in result.scores.get(split, {})}
                for metric in known:
                    mean = row.mean(split, metric)
                    writer.writerow([*lead, split, metric, mean.mean, mean.std, mean.count, failed])
            if not row.whole:
                writer.writerow([*lead, "", "", "", "", 0, failed])
        return stream.getvalue()

    def differences_csv(self) -> str:
        """Return the paired differences of all splits."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(
            ["pool", "baseline", "layer", "slices", "split", "metric", "difference", "standard_error", "seeds"]
        )
        for split in self.splits:
            for entry in self.differences(split):
                row, slices = entry.row, "" if entry.slices is None else entry.slices
                lead = [row.pool, self.baseline, row.layer, slices, split, self.metric]
                writer.writerow([*lead, entry.mean.mean, entry.mean.error, entry.mean.count])
        return stream.getvalue()

    def write(self, folder: Path) -> list[Path]:
        """Write ``table.md``, ``table.csv`` and ``differences.csv``."""
        texts = {"table.md": self.markdown(), "table.csv": self.csv(), "differences.csv": self.differences_csv()}
        for name, text in texts.items():
            replace_text(folder / name, text)
        return [folder / name for name in texts]


def grid(head: list[str], lines: list[list[str]]) -> str:
    """Lay cells out as a Markdown table that can be read as it is, numbers to the right."""
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]

    def row(cells: list[str]) -> str:
        padded = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |\n"

    rule = "|" + "|".join(("-" * (width + 2) if n == 0 else "-" * (width + 1) + ":") for n, width in enumerate(widths))
    return row(head) + rule + "|\n" + "".join(map(row, lines))
