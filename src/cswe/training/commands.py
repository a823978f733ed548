"""The commands `cswe train` and `cswe evaluate`."""

import argparse
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from cswe.tokens import TokenStore
from cswe.training.cells import base_recipe, finite
from cswe.training.checkpoint import BEST, LAST, load, read_json, write_json
from cswe.training.data import TrainingData, open_store
from cswe.training.errors import UserError
from cswe.training.evaluate import evaluate as score
from cswe.training.fit import fit
from cswe.training.folder import saved_epoch
from cswe.training.logging import Logger, Record, TensorBoard
from cswe.training.parallel import Ranks, default_device
from cswe.training.recipe import Bounding, Head, Optimization, Pooling, Recipe, Regularization
from cswe.training.recipes import EsmSize
from cswe.training.task import CHOSEN_BY

# Options are written without the name of the group they belong to: --slices, not --pooling.slices.
_Flat: Any = tyro.conf.OmitArgPrefixes
RESULT = "result.json"


def train(
    store: Annotated[Path, tyro.conf.Positional],
    out: Path,
    recipe: str = "digits",
    esm: EsmSize = "8M",
    seed: int = 0,
    seeds: int = 1,
    resume: bool = False,
    layer: int | None = None,
    device: str | None = None,
    save_steps: int | None = None,
    profile: bool = False,
    tensorboard: bool = False,
    quiet: bool = False,
    *,
    pooling: Annotated[Pooling, _Flat],
    bounding: Annotated[Bounding, _Flat],
    head: Annotated[Head, _Flat],
    optimization: Annotated[Optimization, _Flat],
    regularization: Annotated[Regularization, _Flat],
) -> None:
    """Train a pool and a head on a store of tokens.

    Example: cswe train digits/ --out run/

    The paper's: cswe train tokens/ --recipe images --slices 64 --seeds 3 --out run/

    On several devices: torchrun --nproc-per-node 4 -m cswe train tokens/ --out run/

    Parameters
    ----------
    store
        The store's folder, as `cswe extract` makes it.
    out
        The run's folder: recipe, log, and the checkpoints best and last.
    recipe
        digits, tuned, images, points or proteins; or a recipe.json. Every choice in it can be changed by an option
        below.
    esm
        Size of ESM-2, for proteins: the paper has a choice of constants for each.
    seed
        Decides everything random.
    seeds
        Train with so many seeds, from seed on, taking turns; each run is what it would be alone.
    resume
        Go on with a run that was broken off, or start it if there is none yet.
    layer
        The backbone's layer, if the store has several.
    device
        cpu or cuda; a GPU if there is one.
    save_steps
        Write a checkpoint every so many steps, too, and not only after each epoch.
    profile
        Say where the time of an epoch goes.
    tensorboard
        Write event files for TensorBoard, too.
    quiet
        Say nothing but the result.
    """
    settings = Recipe(base_recipe(recipe, None).name, pooling, bounding, head, optimization, regularization)
    if seeds < 1:
        raise UserError(f"seeds: expected at least 1 but got {seeds}")
    if save_steps is not None and save_steps < 1:
        raise UserError(f"save_steps: expected at least 1 but got {save_steps}")
    where = default_device(device)
    data = TrainingData.open(TokenStore(store, layer), settings, where)
    ranks = Ranks.join(where)
    folders = {seed + i: out if seeds == 1 else out / f"seed-{seed + i}" for i in range(seeds)}

    def loggers(folder: Path) -> list[Logger]:
        return [TensorBoard(folder / "tensorboard")] if tensorboard and ranks.first else []

    runs = {
        number: fit(
            data,
            folder,
            seed=number,
            resume=resume,
            save_steps=save_steps,
            profile=profile,
            loggers=loggers(folder),
        )
        for number, folder in folders.items()
    }
    totals: dict[str, float] = {}
    try:
        for record in _in_turn(runs.values()):
            for phase, seconds in record["seconds"].items():
                totals[phase] = totals.get(phase, 0.0) + seconds
            if ranks.first and not quiet:
                print(_line(record, settings.optimization.epochs, several=seeds > 1), flush=True)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_stopped(folders.values())) from None
    if ranks.first:
        for folder in folders.values():
            print(_finish(folder, data))
        if profile and totals:  # there are none of a run that was finished already
            print(_profile(totals))


def prepare_train(arguments: Sequence[str]) -> Callable[..., None]:
    """Return the command with the options' defaults taken from the recipe that is asked for."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # What is missing or no number here is told by the command itself, which reads all of them again.
    for name, default in (("--recipe", "digits"), ("--slices", ""), ("--esm", "8M")):
        parser.add_argument(name, nargs="?", default=default, const=default)
    known, _ = parser.parse_known_args(list(arguments))
    slices = int(known.slices) if known.slices.isdecimal() and int(known.slices) else None
    chosen = base_recipe(known.recipe, slices, known.esm)
    return functools.partial(
        train,
        pooling=chosen.pooling,
        bounding=chosen.bounding,
        head=chosen.head,
        optimization=chosen.optimization,
        regularization=chosen.regularization,
    )


def evaluate(
    model: Annotated[Path, tyro.conf.Positional],
    store: Annotated[Path, tyro.conf.Positional],
    split: str = "test",
    batch_size: int = 256,
    device: str | None = None,
    json_: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Say how good a model is on a store.

    Example: cswe evaluate run/ digits/

    Parameters
    ----------
    model
        A run's folder, for its best model, or a model's, run/last say.
    store
        Tokens of the backbone that the model was trained on, with labels.
    split
        train, validation, test; or all.
    batch_size
        Sets at a time.
    device
        cpu or cuda; a GPU if there is one.
    json_
        Print JSON.
    """
    trained = load(model)
    scores = score(
        trained,
        open_store(store, trained.facts),
        None if split == "all" else split,
        batch_size=batch_size,
        device=str(default_device(device)),
    )
    told = "  ".join(f"{name} {_number(value)}" for name, value in scores.items())
    print(json.dumps(finite(scores)) if json_ else told)


def _in_turn(runs: Any) -> Iterator[Record]:
    """Let runs take turns, an epoch each."""
    waiting = list(runs)
    while waiting:
        for run in list(waiting):
            record = next(run, None)
            if record is None:
                waiting.remove(run)
            else:
                yield record


def _line(record: Record, epochs: int, *, several: bool) -> str:
    parts = [f"seed {record['seed']}"] if several else []
    parts += [f"epoch {record['epoch']:>{len(str(epochs))}}/{epochs}", f"loss {record['loss']:.4f}"]
    parts += [f"{name} {_number(value)}" for name, value in record["validation"].items() if name != "loss"]
    if "swgg" in record:
        entry = {name: sum(values) / len(values) for name, values in record["swgg"].items()}
        allowed = f" (bound {entry['bound']:.3f}, slack {entry['slack']:.3f})" if "bound" in entry else ""
        parts.append(f"D {entry['values']:.3f}{allowed}")
    return "  ".join([*parts, f"{record['seconds']['all']:.1f} s"])


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _finish(folder: Path, data: TrainingData) -> str:
    """Evaluate a run's best model on the test split, write the result, and tell it."""
    best = load(folder / BEST, data.train.device)
    notes = read_json(folder / BEST / "model.json")
    result: dict[str, Any] = {"epoch": notes["epoch"], "validation": notes["validation"]}
    name = CHOSEN_BY[best.facts.task]
    told = f"{folder}: best epoch {notes['epoch']}, validation {name} {notes['validation'][name]:.4f}"
    if "test" in data.store.splits:
        result["test"] = score(best, data.store, "test", device=str(data.train.device))
        told += f", test {name} {result['test'][name]:.4f}"
    write_json(folder / RESULT, result)
    return told


def _stopped(folders: Any) -> str:
    saved = {folder: saved_epoch(folder) for folder in folders}
    kept = [f"{folder / LAST} has epoch {epoch}" for folder, epoch in saved.items() if epoch is not None]
    return f"stopped; {'; '.join(kept) or 'no epoch was finished'}. Go on with --resume"


def _profile(totals: dict[str, float]) -> str:
    whole = totals.pop("all")
    totals["rest"] = whole - sum(totals.values())
    rows = [f"  {phase:<12}{seconds:9.2f} s  {seconds / whole:6.1%}" for phase, seconds in totals.items()]
    return "\n".join(["where the time went:", *rows])
