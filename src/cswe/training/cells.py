"""The cells of a comparison: one pool, one number of slices, one layer, one seed each; on disk a JSON file each."""

import math
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from cswe.training.checkpoint import read_json, reading, write_json
from cswe.training.choices import has_slices, parse_choices, parse_pool
from cswe.training.errors import UnreadableError, UserError
from cswe.training.recipe import Recipe
from cswe.training.recipes import EsmSize, RecipeName
from cswe.training.recipes import recipe as named_recipe

FORMAT, VERSION = "cswe-cell", 1
CELLS, RUNS = "cells", "runs"
# As the paper prints them.
_NAMES = {"mean": "GAP", "cls": "CLS", "moments": "L-moments", "swe": "SWE", "cswe": "C-SWE"}
_CHOICES = {"bound": "ε = {}", "queries": "{} queries", "weightings": "{} weightings", "readout": "{}"}


@dataclass(frozen=True)
class Cell:
    """One training run of a comparison.

    Parameters
    ----------
    pool
        The pool as it was asked for, ``"attention:queries=5"`` say.
    layer
        The backbone's layer.
    slices
        Number of slices; None for pools that have none.
    seed
        Of the run.
    recipe
        Everything else.
    """

    pool: str
    layer: int
    slices: int | None
    seed: int
    recipe: Recipe

    @property
    def name(self) -> str:
        """A name for files.

        Examples
        --------
        >>> Cell("cswe:bound=0.9", 12, 16, 0, Recipe()).name
        'cswe-bound-0.9.layer-12.slices-16.seed-0'
        """
        pool = re.sub(r"[^A-Za-z0-9._]+", "-", self.pool)
        slices = "" if self.slices is None else f".slices-{self.slices}"
        return f"{pool}.layer-{self.layer}{slices}.seed-{self.seed}"

    @property
    def label(self) -> str:
        """A name for people, without layer and seed."""
        return label_of(self.pool) + ("" if self.slices is None else f", L = {self.slices}")


def label_of(pool: str) -> str:
    """Return the name of a pool as tables print it.

    Examples
    --------
    >>> label_of("cswe:bound=5"), label_of("mean"), label_of("attention:queries=5,dropout=0.1")
    ('C-SWE, ε = 5', 'GAP', 'attention, 5 queries, dropout 0.1')
    """
    name, _, rest = pool.partition(":")
    parts = [_NAMES.get(name, name)]
    for text in rest.split(",") if rest else ():
        choice, _, value = text.partition("=")
        parts.append(_CHOICES.get(choice, choice.replace("_", " ").replace("-", " ") + " {}").format(value))
    return ", ".join(parts)


def base_recipe(recipe: str, slices: int | None, esm: EsmSize = "8M") -> Recipe:
    """Return a recipe by name, with the paper's settings for a number of slices, or from a file: its own, or a run's.

    Examples
    --------
    >>> base_recipe("points", 64).optimization.batch_size
    64
    """
    if recipe.endswith(".json"):
        content = read_json(Path(recipe))
        with reading(Path(recipe)):
            base = Recipe.from_json(content.get("recipe", content))
    elif recipe not in get_args(RecipeName):
        known = ", ".join(get_args(RecipeName))
        raise UserError(f"recipe: expected one of {known}, or a file that ends in .json, but got {recipe!r}")
    else:
        base = named_recipe(recipe, slices, esm)  # type: ignore[arg-type]
    return base if slices is None else base.with_(slices=slices)


@dataclass(frozen=True)
class Plan:
    """What is to be compared.

    Parameters
    ----------
    pools
        Pools, each with choices of its own after a colon: ``"cswe:bound=5"``.
    slices
        Numbers of slices.
    seeds, first_seed
        How many seeds, and the first of them.
    layers
        Layers of the store; none named: all of them.
    recipe
        A recipe by name, or a recipe's file.
    choices
        Changes to it for all cells, ``"epochs=30"``.
    esm
        Size of ESM-2, for the recipe ``"proteins"``.

    Examples
    --------
    >>> [cell.name for cell in Plan(("mean", "swe"), (4,), seeds=1).cells([0])]
    ['mean.layer-0.seed-0', 'swe.layer-0.slices-4.seed-0']
    """

    pools: tuple[str, ...]
    slices: tuple[int, ...] = (16,)
    seeds: int = 3
    first_seed: int = 0
    layers: tuple[int, ...] = ()
    recipe: str = "digits"
    choices: tuple[str, ...] = ()
    esm: EsmSize = "8M"

    def cells(self, layers: list[int]) -> list[Cell]:
        """List the cells on a store with these layers; all seeds of a row follow each other."""
        if self.seeds < 1:
            raise UserError(f"seeds: expected at least 1 but got {self.seeds}")
        if not self.pools or not self.slices:
            raise UserError("expected at least one pool and one number of slices")
        for layer in self.layers:
            if layer not in layers:
                raise UserError(f"layers: expected some of {layers}, which the store holds, but got {layer}")
        cells: dict[str, Cell] = {}
        for layer in self.layers or layers:
            for pool in self.pools:
                for slices in self.slices if has_slices(pool) else [None]:
                    recipe = self.recipe_of(pool, slices)
                    for seed in range(self.first_seed, self.first_seed + self.seeds):
                        cell = Cell(pool, layer, slices, seed, recipe)
                        there = cells.setdefault(cell.name, cell)  # the same one asked for twice is one
                        if there.pool != pool:
                            raise UserError(
                                f"pools: {there.pool!r} and {pool!r} would both be kept as {cell.name}; write a number "
                                "of one of them in another way (0.001 for 1e-3), or choose another folder for it"
                            )
        return list(cells.values())

    def recipe_of(self, pool: str, slices: int | None) -> Recipe:
        """Return the recipe of a cell: the paper's settings depend on the number of slices."""
        name, own = parse_pool(pool)
        choices = parse_choices(self.choices)
        for fixed, option in (("pool", "--pools"), ("slices", "--slices")):
            if fixed in choices:  # a row is named by these: it would be told as something else than was trained
                raise UserError(f"set: expected choices for all pools but got {fixed}, which is asked for by {option}")
        base = base_recipe(self.recipe, slices, self.esm)
        return base.with_(**(choices | own), pool=name).check()

    def command(
        self,
        store: Path,
        out: Path,
        baseline: str | None = None,
        *,
        test: bool = True,
        neighbors: bool = False,
        keep_models: bool = True,
    ) -> str:
        """Return the command that does all this."""
        words = ["cswe", "compare", str(store), "--out", str(out), "--pools", *self.pools]
        words += ["--slices", *map(str, self.slices), "--seeds", str(self.seeds)]
        words += ["--first-seed", str(self.first_seed)] if self.first_seed else []
        words += ["--layers", *map(str, self.layers)] if self.layers else []
        words += ["--recipe", self.recipe] if self.recipe != "digits" else []
        words += ["--esm", self.esm] if self.recipe == "proteins" else []
        words += ["--set", *self.choices] if self.choices else []
        words += ["--baseline", baseline] if baseline else []
        words += [] if test else ["--no-test"]
        words += ["--neighbors"] if neighbors else []
        words += [] if keep_models else ["--no-keep-models"]
        return shlex.join(words)


@dataclass(frozen=True)
class Result:
    """What came out of a cell.

    Parameters
    ----------
    cell
        Which.
    size
        Length of the embedding.
    scores
        Scores by split, train, validation and test, each by name.
    facts
        What else is in its file: epochs, seconds, memory, machine, versions, commit.
    error
        Why the run failed, if it did; then there are no scores.
    """

    cell: Cell
    size: int
    scores: dict[str, dict[str, float]]
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the form that goes into files; what is not a number becomes null."""
        cell = self.cell
        content = {
            "format": FORMAT,
            "version": VERSION,
            "pool": cell.pool,
            "layer": cell.layer,
            "slices": cell.slices,
            "seed": cell.seed,
            "size": self.size,
            "scores": self.scores,
            "error": self.error,
            **self.facts,
            "recipe": cell.recipe.to_json(),
        }
        told: dict[str, Any] = finite(content)
        return told

    def write(self, file: Path) -> None:
        """Write the file aside and put it in place."""
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, self.to_json())

    @classmethod
    def read(cls, file: Path) -> "Result":
        """Read the file of a cell; a damaged one is an `UnreadableError`, one of another version a `UserError`."""
        return cls.from_json(read_json(file), file)

    @classmethod
    def from_json(cls, data: dict[str, Any], file: Path) -> "Result":
        """Read the form that comes from a file; what is not such a form is an error that names the file."""
        content = dict(data)
        try:
            if (written := (content.pop("format"), content.pop("version"))) != (FORMAT, VERSION):
                raise UserError(f"{written[0]!r}, version {written[1]}")
            recipe = Recipe.from_json(content.pop("recipe"))
            pool, layer, slices, seed = (content.pop(name) for name in ("pool", "layer", "slices", "seed"))
            scores = {
                split: {name: math.nan if value is None else value for name, value in values.items()}
                for split, values in content.pop("scores").items()
            }
            cell = Cell(pool, layer, slices, seed, recipe)
            return cls(cell, content.pop("size"), scores, error=content.pop("error"), facts=content)
        except UserError as error:
            raise UserError(
                f"{file}: expected a cell of this version of cswe but got another ({error}); update cswe, or choose "
                "another folder"
            ) from None
        except (KeyError, TypeError, AttributeError) as error:
            raise UnreadableError(f"{file}: is damaged ({type(error).__name__}: {error})") from None


def read_results(folder: Path) -> list[Result]:
    """Read all finished cells of a comparison, in the order of its plan; damaged ones are left out."""
    results = []
    for file in sorted((folder / CELLS).glob("*.json")):
        try:
            results.append(Result.read(file))
        except UserError:
            continue
    pools = read_json(folder / "compare.json")["pools"] if (folder / "compare.json").exists() else []

    def place(result: Result) -> tuple[int, int, int, int]:
        cell = result.cell
        known = pools.index(cell.pool) if cell.pool in pools else len(pools)
        return cell.layer, known, cell.slices or 0, cell.seed

    return sorted(results, key=place)


def finite(value: Any) -> Any:
    """Replace what JSON cannot say, not-a-number and infinities, by null."""
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
