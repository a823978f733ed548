"""The folder of a run: whose it is, and whether it may be gone on with."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cswe.training.checkpoint import BEST, LAST, check_folder, existing, read_json, reading, write_json
from cswe.training.decisive import difference
from cswe.training.errors import UserError
from cswe.training.locking import Lock
from cswe.training.model import Facts
from cswe.training.origin import noted_origin, same_origin
from cswe.training.recipe import Recipe

RECIPE = "recipe.json"


def begin(run: Path, facts: Facts, origin: dict[str, Any], *, resume: bool) -> None:
    """Claim a folder for a run: write its recipe, or check that the run there is the same one, on the same tokens."""
    file = run / RECIPE
    check_folder(run)
    if file.exists():
        if not resume:
            raise UserError(f"{run}: holds a run already; go on with it by --resume, or choose another folder")
        _check_same(run, facts, origin)
        return
    half_written = {file.name + ".partial"}  # by a process that was killed
    if run.exists() and {path.name for path in run.iterdir()} - half_written:
        raise UserError(f"{run}: expected an empty folder but there are files in it; choose another")
    run.mkdir(parents=True, exist_ok=True)
    write_json(file, {"recipe": facts.recipe.to_json(), "seed": facts.seed, "store": origin, "layer": facts.layer})


@contextmanager
def claimed(run: Path) -> Iterator[None]:
    """Keep other processes from training in the same folder meanwhile."""
    lock = Lock(run / "lock")
    if not lock.take():
        if lock.is_held_here():  # by a loop in a notebook, say, that was broken off
            raise UserError(f"{run}: this process is training there in an earlier loop over `fit`; close() that first")
        raise UserError(f"{run}: another process is training there; wait for it, or choose another folder")
    try:
        yield
    finally:
        lock.release(remove=True)


def saved_epoch(run: Path) -> int | None:
    """Return how many epochs the last checkpoint of a run has; None if there is none."""
    folder = existing(run / LAST) or existing(run / BEST)
    return None if folder is None else int(read_json(folder / "model.json")["epoch"])


def _check_same(run: Path, facts: Facts, origin: dict[str, Any]) -> None:
    saved = read_json(run / RECIPE)
    with reading(run / RECIPE):
        recipe, seed = Recipe.from_json(saved["recipe"]), saved["seed"]
    again = "use the same options, or another folder"
    if other := difference(recipe, facts.recipe):
        raise UserError(f"{run}: was begun with another recipe ({other}); {again}")
    if seed != facts.seed:
        raise UserError(f"{run}: was begun with seed {seed} but got {facts.seed}; {again}")
    if not same_origin(noted_origin(saved), origin):
        raise UserError(f"{run}: was begun on another store; use that one, or another folder")
    if saved.get("layer", facts.layer) != facts.layer:  # earlier versions did not note it
        raise UserError(f"{run}: was begun on layer {saved['layer']} but got {facts.layer}; {again}")
