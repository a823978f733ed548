"""The same small search for every pooling, by validation alone, and the choice that it leads to."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cswe.training.cells import Result
from cswe.training.checkpoint import read_json, write_json
from cswe.training.errors import UserError
from experiments.pools import IMAGE_RIVALS, POOLS, with_choices

CHOICE = "images-tuning-choice.json"
LAYER, SEED = 12, 10  # a seed that no final run has
# Half of the cube {0.05, 0.2} × {0.2, 0.4} × {1e-3, 2e-3}: every level twice, every pair of levels once.
GRID = (
    ("weight_decay=0.05", "dropout=0.2", "lr=0.001"),
    ("weight_decay=0.05", "dropout=0.4", "lr=0.002"),
    ("weight_decay=0.2", "dropout=0.2", "lr=0.002"),
    ("weight_decay=0.2", "dropout=0.4", "lr=0.001"),
)


def choose(results: Iterable[Result]) -> dict[str, Any] | None:
    """Return the best point of every pooling by its validation score; None as long as points are missing."""
    scores = {
        result.cell.pool: -1.0 if result.error is not None else result.scores["validation"]["top1"]
        for result in results
    }
    chosen: dict[str, Any] = {}
    for key in IMAGE_RIVALS:
        tried = {point: scores.get(with_choices(POOLS[key].text, *point)) for point in GRID}
        known = {point: score for point, score in tried.items() if score is not None}
        if len(known) < len(GRID):
            return None
        best = max(known, key=lambda point: known[point])
        record = {" ".join(point): score for point, score in known.items()}
        chosen[key] = {"choices": list(best), "validation": known[best], "tried": record}
    return {"study": "images-tuning", "layer": LAYER, "seed": SEED, "by": "validation top1", "chosen": chosen}


def read_choice(folders: Iterable[Path]) -> dict[str, tuple[str, ...]] | None:
    """Return the choices of every pooling from the first folder that has them written down."""
    for folder in folders:
        if (folder / CHOICE).exists():
            chosen = read_json(folder / CHOICE)["chosen"]
            if missing := [key for key in IMAGE_RIVALS if key not in chosen]:
                raise UserError(f"{folder / CHOICE}: expected a choice for every pooling but {missing[0]} has none")
            return {key: tuple(entry["choices"]) for key, entry in chosen.items()}
    return None


def write_choice(folder: Path, choice: dict[str, Any]) -> None:
    """Write the choice down; what is there is kept, since final runs may have been made with it."""
    if not (folder / CHOICE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CHOICE, choice)
