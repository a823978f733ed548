"""The command `cswe compare`."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import tyro

from cswe.training.cells import Plan, read_results
from cswe.training.checkpoint import read_json
from cswe.training.compare import LOCK, PLAN
from cswe.training.compare import compare as run_comparison
from cswe.training.errors import UserError
from cswe.training.locking import locked
from cswe.training.recipes import EsmSize
from cswe.training.table import Table


def compare(
    store: Annotated[Path, tyro.conf.Positional],
    out: Path,
    pools: tuple[str, ...] = ("mean", "attention", "statistics", "swe", "cswe"),
    slices: tuple[int, ...] = (16,),
    seeds: int = 3,
    first_seed: int = 0,
    layers: tuple[int, ...] = (),
    recipe: str = "digits",
    set_: Annotated[tuple[str, ...], tyro.conf.arg(name="set")] = (),
    esm: EsmSize = "8M",
    baseline: str | None = None,
    metric: str | None = None,
    test: bool = True,
    keep_models: bool = True,
    retry: bool = False,
    jobs: int = 1,
    device: str | None = None,
    quiet: bool = False,
) -> None:
    """Compare poolings on a store: train each with every number of slices and every seed, and print tables.

    Example: cswe compare digits/ --out study/ --pools mean attention:queries=5 swe cswe --slices 4 16 --seeds 3

    Broken off, the same command goes on where it was; several processes may share one folder.

    Parameters
    ----------
    store
        The store's folder, as `cswe extract` makes it.
    out
        The comparison's folder: a JSON file for every run, tables as Markdown and CSV, logs and models.
    pools
        mean, max, cls, attention, statistics, moments, swe, cswe; each with choices of its own after a colon:
        cswe:bound=5, attention:queries=5, moments:readout=moments:2,weightings=2.
    slices
        Numbers of slices.
    seeds
        How many seeds.
    first_seed
        The first of them.
    layers
        Layers of the backbone; all that the store has.
    recipe
        digits, images, points or proteins; or a recipe.json.
    set_
        Changes to the recipe for all pools: --set epochs=30 lr=1e-3.
    esm
        Size of ESM-2, for proteins.
    baseline
        The pool that differences are taken against; the first one.
    metric
        The score to print: top1, top5, macro_f1; f_max; r2.
    test
        Score the test split.
    keep_models
        Keep every run's best model; `cswe report` draws its slices.
    retry
        Try runs again that failed.
    jobs
        Processes to share the work between.
    device
        cpu or cuda; a GPU if there is one.
    quiet
        Print the tables only.
    """
    if jobs < 1:
        raise UserError(f"jobs: expected at least 1 but got {jobs}")
    plan = Plan(pools, slices, seeds, first_seed, layers, recipe, set_, esm)

    def tell(line: str) -> None:
        if not quiet:
            print(line, flush=True)

    helpers = [_helper(plan, store, out, test, keep_models, device) for _ in range(jobs - 1)]
    try:
        run_comparison(
            store,
            out,
            plan,
            baseline=baseline,
            device=device,
            test=test,
            keep_models=keep_models,
            retry=retry,
            tell=tell,
        )
    finally:
        # With everything done they have nothing left to do; otherwise something went wrong, and they should not go on.
        for helper in helpers:
            helper.terminate()
            helper.wait()
    table = Table.of(read_results(out), metric, read_json(out / PLAN)["baseline"])
    with locked(out / LOCK):
        files = table.write(out)
    print(table.markdown())
    print(f"written: {', '.join(map(str, files))}")


def _helper(
    plan: Plan, store: Path, out: Path, test: bool, keep_models: bool, device: str | None
) -> "subprocess.Popen[bytes]":
    """Start another process on the same folder."""
    words = [sys.executable, "-m", "cswe", *shlex.split(plan.command(store, out))[1:], "--quiet"]
    words += [] if test else ["--no-test"]
    words += [] if keep_models else ["--no-keep-models"]
    words += ["--device", device] if device else []
    # Threads of several processes would fight for the same cores.
    return subprocess.Popen(
        words, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
