"""A small comparison, and what several tests look at in one."""

from cswe.training.cells import Cell, Plan, Result
from cswe.training.recipe import Recipe

TINY = ["epochs=2", "batch_size=64", "points=8", "bound_batches=2"]
PLAN = Plan(("mean", "swe", "cswe"), (2, 4), seeds=2, choices=tuple(TINY))
COMMAND = ["--pools", *PLAN.pools, "--slices", "2", "4", "--seeds", "2", "--set", *TINY, "--device", "cpu"]


def made(accuracies, *, layer=0, error=None):
    """Results with these accuracies: {(pool, slices): [one a seed]}."""
    results = []
    for (pool, slices), values in accuracies.items():
        for seed, value in enumerate(values):
            scores = {split: {"top1": value, "top5": 1.0} for split in ("train", "validation", "test")}
            cell = Cell(pool, layer, slices, seed, Recipe())
            results.append(Result(cell, 8, {} if error else scores, {"task": "classification"}, error))
    return results


def stamps(folder):
    """What changes when a cell is trained or written again."""
    return {
        file: (file.stat().st_mtime_ns, file.stat().st_ino)
        for name in (path.stem for path in (folder / "cells").glob("*.json"))
        for file in (folder / "cells" / f"{name}.json", folder / "runs" / name / "log.jsonl")
    }


def numbers(results):
    return {result.cell.name: (result.scores, result.size) for result in results}
