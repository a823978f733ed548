"""The commands `cswe compare` and `cswe sweep`."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import tyro

from cswe.tokens import Manifest
from cswe.training.cells import CELLS, Plan, base_recipe, read_results
from cswe.training.checkpoint import read_json
from cswe.training.choices import parse_choices
from cswe.training.compare import LOCK, PLAN
from cswe.training.compare import compare as run_comparison
from cswe.training.errors import TrainingError, UserError
from cswe.training.locking import locked
from cswe.training.parallel import speaks
from cswe.training.recipes import EsmSize
from cswe.training.scoring import check_scores
from cswe.training.space import PAPER, Space
from cswe.training.sweep import BEST_RECIPE, best_line
from cswe.training.sweep import sweep as run_sweep
from cswe.training.table import Table
from cswe.training.task import NEAREST
from cswe.training.trials import Method, Prune


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
    neighbors: bool = False,
    keep_models: bool = True,
    retry: bool = False,
    jobs: int = 1,
    device: str | None = None,
    quiet: bool = False,
) -> None:
    """Compare poolings on a store: train each with every number of slices and every seed, and print tables.

    Example: cswe compare digits/ --out study/ --pools mean attention:queries=5 swe cswe --slices 4 16 --seeds 3

    Broken off, the same command goes on where it was; several processes may share one folder, those of torchrun, too.

    Parameters
    ----------
    store
        The store's folder, as `cswe extract` makes it.
    out
        The comparison's folder: a JSON file for every run, tables as Markdown and CSV, logs and models.
    pools
        mean, sum, max, cls, attention, pma, wasserstein, statistics, moments, swe, cswe; each with choices of its own
        after a colon: cswe:bound=5, attention:queries=5, moments:readout=moments:2,weightings=2.
    slices
        Numbers of slices.
    seeds
        How many seeds.
    first_seed
        The first of them.
    layers
        Layers of the backbone; all that the store has.
    recipe
        digits, tuned, images, points or proteins; or a recipe.json.
    set_
        Changes to the recipe for all pools: --set epochs=30 lr=1e-3.
    esm
        Size of ESM-2, for proteins.
    baseline
        The pool that differences are taken against; the first one.
    metric
        The score to print: top1, top5, macro_f1, balanced, nearest; f_max; r2.
    test
        Score the test split.
    neighbors
        Score vectors without the head, too: how often the nearest training set is of the same class (nearest).
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
    plan = Plan(pools, slices, seeds, first_seed, layers, recipe, set_, esm)
    known = any(NEAREST in scores for result in read_results(out) for scores in result.scores.values())
    check_scores(Manifest.read(store), metric, neighbors=neighbors or known)
    words = shlex.split(plan.command(store, out, baseline, test=test, neighbors=neighbors, keep_models=keep_models))
    with _helpers(words, jobs, device):
        results = run_comparison(
            store,
            out,
            plan,
            baseline=baseline,
            device=device,
            test=test,
            neighbors=neighbors,
            keep_models=keep_models,
            retry=retry,
            tell=_teller(quiet),
        )
    table = Table.of(read_results(out), metric, read_json(out / PLAN)["baseline"])
    with locked(out / LOCK):
        files = table.write(out)
    if speaks():
        print(table.markdown())
        print(f"written: {', '.join(map(str, files))}")
    if all(result.error is not None for result in results):
        raise TrainingError(f"no run of {out} came to an end with a score; the files in {out / CELLS} say why")


def sweep(
    store: Annotated[Path, tyro.conf.Positional],
    out: Path,
    space: str = PAPER,
    recipe: str = "digits",
    set_: Annotated[tuple[str, ...], tyro.conf.arg(name="set")] = (),
    esm: EsmSize = "8M",
    method: Method | None = None,
    trials: int = 50,
    prune: Prune | None = None,
    seeds: int = 1,
    first_seed: int = 0,
    layer: int | None = None,
    jobs: int = 1,
    device: str | None = None,
    quiet: bool = False,
) -> None:
    """Search the choices of a recipe by validation, and write the best as a recipe that `cswe train` takes.

    Example: cswe sweep tokens/ --recipe proteins --space paper --out sweep/

    Then: cswe train tokens/ --recipe sweep/best.json --out run/

    Broken off, the same command goes on where it was; several processes may share one folder.

    Parameters
    ----------
    store
        The store's folder, as `cswe extract` makes it.
    out
        The sweep's folder: Optuna's journal, trials.csv, best.json, logs.
    space
        paper, for the paper's grid; or a JSON file: {"bound": [5, 10], "lr": {"low": 1e-4, "high": 0.1, "log": true}}.
    recipe
        Where the search starts: digits, tuned, images, points or proteins; or a recipe.json.
    set_
        Changes to the recipe: --set slices=16 epochs=30.
    esm
        Size of ESM-2, for proteins.
    method
        grid: every combination; tpe: points that look promising. By default a grid if all values are listed.
    trials
        Points to try, for tpe; all processes together.
    prune
        Break off runs that do worse than others did at the same epoch. By default none for a grid, median for tpe.
    seeds
        Train every point with so many seeds; what counts is their mean.
    first_seed
        The first of them.
    layer
        The backbone's layer, if the store has several.
    jobs
        Processes to share the work between.
    device
        cpu or cuda; a GPU if there is one.
    quiet
        Print the result only.
    """
    choices = parse_choices(set_)
    base = base_recipe(recipe, choices.get("slices"), esm).with_(**choices).check()
    options = {"space": space, "recipe": recipe, "esm": esm, "method": method, "trials": trials, "prune": prune}
    options |= {"seeds": seeds, "first-seed": first_seed, "layer": layer}
    words = ["cswe", "sweep", str(store), "--out", str(out), *(["--set", *set_] if set_ else [])]
    words += [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    with _helpers(words, jobs, device):
        run_sweep(
            store,
            out,
            base,
            Space.open(space, base),
            method=method,
            trials=trials,
            prune=prune,
            seeds=seeds,
            first_seed=first_seed,
            layer=layer,
            device=device,
            tell=_teller(quiet),
        )
    if speaks():
        print(best_line(out))
        print(f"{out / BEST_RECIPE}: train with it by `cswe train {store} --recipe {out / BEST_RECIPE} --out RUN`")


@contextmanager
def _helpers(words: list[str], jobs: int, device: str | None) -> Iterator[None]:
    """Let more processes do the same command for the length of a block, so that there are so many with this one."""
    if jobs < 1:
        raise UserError(f"jobs: expected at least 1 but got {jobs}")
    command = [sys.executable, "-m", "cswe", *words[1:], "--quiet", *(["--device", device] if device else [])]
    # Threads of several processes would fight for the same cores.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    silent = subprocess.DEVNULL
    helpers = [subprocess.Popen(command, env=environment, stdout=silent, stderr=silent) for _ in range(jobs - 1)]
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command goes on from here") from None
    finally:
        # With everything done they have nothing left to do; otherwise something went wrong, and they should not go on.
        for helper in helpers:
            helper.terminate()
            helper.wait()


def _teller(quiet: bool) -> Callable[[str], None]:
    """Say lines as they come, or nothing."""

    def tell(line: str) -> None:
        if not quiet and speaks():
            print(line, flush=True)

    return tell
