"""What ``make demo`` runs: the landscape behind the constraint, then the whole way on handwritten digits.

The commands that it prints are the ones that it runs, and anybody can type them; the page it makes is that of
`cswe report`, with the landscape beside it.
"""

import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

from cswe.cli import main as cswe
from cswe.report.gather import gather
from cswe.report.landscape import draw_landscape, example_pair, landscape_figure, learn_in, measure_landscape
from cswe.report.page import Section, build_page
from cswe.tokens.sources.base import SPLITS
from cswe.tokens.sources.digits import Digits
from cswe.training.cells import read_results
from cswe.training.table import Table
from cswe.training.verdict import verdict

# Attention has 32 queries so that its vector, 64 numbers, is as long as that of 16 slices.
POOLS = ("mean", "attention:queries=32", "swe", "cswe:bound=0.9")
SLICES, SEEDS = (1, 4, 16), 3
# The bound moves slices and reference, as in the paper, and quickly, since there are few steps.
CHOICES = ("epochs=20", "wrt=both", "dual_lr=0.1")


@dataclass(frozen=True)
class Split:
    """Sets of inked pixels (column, row, ink), padded, with mask and label."""

    tokens: Tensor
    mask: Tensor
    labels: Tensor


def digit_splits() -> dict[str, Split]:
    """Load scikit-learn's digits as variable-size point sets, split into train, val and test."""
    source = Digits(ink="coordinate")
    sets = [torch.from_numpy(source.load(index).points) for index in range(len(source))]
    tokens = nn.utils.rnn.pad_sequence(sets, batch_first=True)
    mask = torch.arange(tokens.shape[1]) < torch.tensor([len(points) for points in sets]).unsqueeze(1)
    labels = torch.as_tensor(source.labels.values)
    rows = {name: torch.from_numpy(source.splits == number) for number, name in enumerate(SPLITS)}
    return {name: Split(tokens[here], mask[here], labels[here]) for name, here in rows.items()}


def run(*arguments: str | Path) -> None:
    """Print a command and run it; a demo that fails must say so."""
    words = list(map(str, arguments))
    print(f"\n$ cswe {shlex.join(words)}", flush=True)
    if status := cswe(words):
        raise SystemExit(status)


def main(folder: Path = Path("build/demo")) -> None:
    """Run the demo and print what came out."""
    start = perf_counter()
    store, study, report = folder / "digits", folder / "study", folder / "report"
    for old in (store, study, report):
        shutil.rmtree(old, ignore_errors=True)  # what an earlier version of the demo left behind

    landscape = measure_landscape(*example_pair())
    path = learn_in(landscape)
    pictures = draw_landscape(landscape, path, folder)
    print("SWGG of a pair of point sets in the plane, over the direction of the slice")
    print(f"  D(θ) from {landscape.distances.min():.2f} to {landscape.distances.max():.2f}; W₂ = {landscape.floor:.2f}")
    print(f"  the bound {landscape.bound:.2f} leaves {landscape.open_share:.0%} of the directions open")
    print(f"  a slice that wants to point at {path.wanted:.0f}° ends at {path.free[-1]:.0f}°, under the bound", end=" ")
    print(f"(with slack) at {path.bound[-1]:.0f}°")
    print(f"  {pictures[0]}  {pictures[1]}")

    print("\nHandwritten digits as sets of inked pixels, weighted by their ink")
    run("extract", "--out", store, "--quiet")
    plan = ["--pools", *POOLS, "--slices", *map(str, SLICES), "--seeds", str(SEEDS), "--set", *CHOICES]
    run("compare", store, "--out", study, *plan, "--baseline", "swe", "--jobs", str(min(2, os.cpu_count() or 1)))

    print(f"\n$ cswe report {shlex.quote(str(study))} --out {shlex.quote(str(report))}")
    page = build_page(gather([study], store), title="Handwritten digits, pooled")
    lead = "The paper's idea in a picture: along some directions the one-dimensional plan, lifted back, is a bad one."
    page.sections.append(Section("idea", "Why bound the slices", lead, [landscape_figure(landscape, path)]))
    index = page.write(report)[0]
    print(f"\n{perf_counter() - start:.0f} seconds in all. The page: {index}\n\n{conclusion(study)}")


def conclusion(study: Path) -> str:
    """Say in a sentence what the table of a comparison says, whichever method is ahead."""
    return verdict(Table.of(read_results(study)))


if __name__ == "__main__":
    main()
