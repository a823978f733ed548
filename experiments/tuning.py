"""The same small search for every pooling, by validation alone, and the choices that it leads to."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cswe.training.cells import Result
from experiments.pools import (
    IMAGE_RIVALS,
    NORMED,
    POINT_LAYERS,
    POOLS,
    PROTEIN_RIVALS,
    RAW,
    TOKENS,
    with_choices,
)
from experiments.records import read_lines, write_lines

Point = tuple[str, ...]
Key = tuple[int, str, int | None]  # layer, pooling, and the seed that a choice is for; None: for all of them
Chosen = dict[Key, Point]


@dataclass(frozen=True)
class Sought:
    """A choice that is to be made.

    Parameters
    ----------
    layer, pooling
        For what.
    text, slices
        The pooling as a plan asks for it, and its number of slices in the search.
    seed
        Of the runs of the search; no final run has it.
    final
        The seed of the final runs that the choice is for; None: for all of them.
    """

    layer: int
    pooling: str
    text: str
    slices: int | None
    seed: int
    final: int | None = None

    @property
    def key(self) -> Key:
        """What the choice is found by."""
        return self.layer, self.pooling, self.final


@dataclass(frozen=True)
class Search:
    """A search: the same points for everything that is sought.

    Parameters
    ----------
    name
        Of the study that runs it.
    grid
        The points, each some choices of a recipe.
    sought
        What is to be chosen.
    """

    name: str
    grid: tuple[Point, ...]
    sought: tuple[Sought, ...]

    @property
    def file(self) -> str:
        """Where its choices are written down."""
        return f"{self.name}-choice.json"


LAYERS = (6, 9, 12)
IMAGES = Search(
    "images-tuning",
    (
        ("weight_decay=0.1", "dropout=0.4", "lr=0.002"),
        ("weight_decay=0.2", "dropout=0.0", "lr=0.004"),
        ("weight_decay=0.2", "dropout=0.1", "lr=0.004"),
        ("weight_decay=0.2", "dropout=0.3", "lr=0.004"),
        ("weight_decay=0.2", "dropout=0.5", "lr=0.004"),
    ),
    tuple(
        Sought(layer, key, POOLS[key].text, POOLS[key].slices, 10)
        for layer in reversed(LAYERS)
        for key in reversed(IMAGE_RIVALS)  # the slowest first, so that none is waited for at the end
    ),
)


PROTEIN_LAYER = 6
PROTEINS = Search(
    "proteins-tuning",
    (
        ("weight_decay=0.1", "dropout=0.3", "lr=0.001"),
        ("weight_decay=0.1", "dropout=0.3", "lr=0.002"),
        ("weight_decay=0.1", "dropout=0.5", "lr=0.002"),
        ("weight_decay=0.2", "dropout=0.3", "lr=0.004"),
        ("weight_decay=0.2", "dropout=0.5", "lr=0.004"),
    ),
    tuple(Sought(PROTEIN_LAYER, key, POOLS[key].text, POOLS[key].slices, 10) for key in reversed(PROTEIN_RIVALS)),
)


# Every seed has a split of its own: with so few shapes the split decides more than the weights. There are many
# where runs take seconds.
SPLITS = {RAW: 10, TOKENS: 6, NORMED: 10}
POINTS = Search(
    "points-tuning",
    (("lr=0.0003",), ("lr=0.003",), ("lr=0.03",), ("lr=0.1",)),
    tuple(
        # By the validation set of its own split: that of another one has shapes of this one's test set.
        Sought(layer, key, named.text, 16, 10 + split, split)
        for split in range(max(SPLITS.values()))
        for layer, pools in POINT_LAYERS.items()
        if split < SPLITS[layer]
        for key, named in reversed(pools.items())
        if layer != NORMED or key not in ("swe", "cswe")
    ),
)


def choose(search: Search, results: Iterable[Result]) -> list[dict[str, Any]]:
    """Return the best point by its validation score for everything that all points are known of."""
    scores = {
        (result.cell.pool, result.cell.layer, result.cell.seed): (-1.0, 0.0)
        if result.error is not None
        else (result.scores["validation"]["top1"], result.scores["validation"].get("balanced", 0.0))
        for result in results
    }
    entries = []
    for sought in search.sought:
        tried = {
            point: scores.get((with_choices(sought.text, *point), sought.layer, sought.seed)) for point in search.grid
        }
        known = {point: score for point, score in tried.items() if score is not None}
        if len(known) < len(search.grid):
            continue
        best = max(known, key=lambda point: known[point])  # the first of equals
        entry = {
            "layer": sought.layer,
            "pooling": sought.pooling,
            "seed": sought.final,
            "choices": list(best),
            "validation": known[best][0],
            "tried": {" ".join(point): score[0] for point, score in known.items()},
        }
        entries.append(entry)
    return entries


def read_choices(search: Search, folders: Iterable[Path]) -> dict[Key, dict[str, Any]]:
    """Return what was chosen; what an earlier folder has counts, and nothing that was chosen among fewer points."""
    found: dict[Key, dict[str, Any]] = {}
    points = {" ".join(point) for point in search.grid}
    for folder in folders:
        for entry in read_lines(folder / search.file, "chosen"):
            if points <= entry["tried"].keys():
                found.setdefault((entry["layer"], entry["pooling"], entry["seed"]), entry)
    return found


def chosen_by(search: Search, folders: Iterable[Path]) -> Chosen:
    """Return the chosen points."""
    return {key: tuple(entry["choices"]) for key, entry in read_choices(search, folders).items()}


def _made_by(entry: dict[str, Any], tried: dict[str, float]) -> bool:
    """Say whether these scores are among those that a choice was made by: it may have had more points."""
    return all(entry["tried"].get(point) == score for point, score in tried.items())


def note_choices(search: Search, results: Iterable[Result], folders: list[Path]) -> None:
    """Write new choices down in the first folder; old ones are kept as long as the scores that they were made by are.

    Final runs were made with them: where points of a search are made again and speak for another choice, so are those.
    """
    known = read_choices(search, folders)
    made = {(entry["layer"], entry["pooling"], entry["seed"]): entry for entry in choose(search, results)}
    new = {key: entry for key, entry in made.items() if key not in known or not _made_by(known[key], entry["tried"])}
    if not new:
        return
    every = {**known, **new}
    order = sorted(every, key=lambda key: (key[0], key[1], -1 if key[2] is None else key[2]))
    write_lines(
        folders[0] / search.file,
        {"study": search.name, "by": "validation top1, then balanced accuracy"},
        "chosen",
        [every[key] for key in order],
    )
