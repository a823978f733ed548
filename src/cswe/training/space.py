"""What a sweep searches: for some choices of a recipe the values to try, listed or as a range."""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cswe.training.checkpoint import read_json
from cswe.training.choices import choice_types
from cswe.training.errors import UserError
from cswe.training.recipe import Recipe, fits
from cswe.training.recipes import SPACES

PAPER = "paper"


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, evenly or by ratio; whole numbers where the choice is one."""

    low: float
    high: float
    log: bool = False
    step: float | None = None
    whole: bool = False


@dataclass(frozen=True)
class Space:
    """Choices by name, each with the values to try.

    Parameters
    ----------
    choices
        For every choice a tuple of values, or a `Range`.

    Examples
    --------
    >>> space = Space.of({"bound": [5, 10], "temperature": [0.01]})
    >>> list(space.grid())
    [{'bound': 5, 'temperature': 0.01}, {'bound': 10, 'temperature': 0.01}]
    """

    choices: dict[str, tuple[Any, ...] | Range]

    @classmethod
    def of(cls, content: dict[str, Any]) -> "Space":
        """Read the form that files have: a list of values, or ``{"low": …, "high": …, "log": true}``."""
        known = choice_types()
        choices: dict[str, tuple[Any, ...] | Range] = {}
        if not content:
            raise UserError("space: expected at least one choice but got none")
        for name, values in content.items():
            if name not in known:
                raise UserError(f"space: expected choices that `cswe train --help` lists but got {name!r}")
            if isinstance(values, dict):
                choices[name] = _range(name, values, known[name])
            elif isinstance(values, list | tuple) and values:
                for value in values:
                    if not fits(known[name], value):
                        raise UserError(f"space: {name}: expected values that the recipe can have but got {value!r}")
                if len(set(map(json.dumps, values))) < len(values):
                    raise UserError(f"space: {name} lists a value twice")
                choices[name] = tuple(values)
            else:
                raise UserError(f"space: {name}: expected a list of values or a range with low and high")
        return cls(choices)

    @classmethod
    def open(cls, text: str, recipe: Recipe) -> "Space":
        """Read a file, or take the paper's grid for a recipe."""
        if text != PAPER:
            return cls.of(read_json(Path(text)))
        grid = {str(name): choices for name, choices in SPACES.items()}.get(recipe.name)
        if grid is None:
            raise UserError(
                f"space: the paper has a grid for {', '.join(SPACES)} but not for recipe {recipe.name!r}; give a file"
            )
        return cls.of(dict(grid))

    @property
    def listed(self) -> bool:
        """Whether all values are listed, so that there is a grid."""
        return not any(isinstance(values, Range) for values in self.choices.values())

    @property
    def size(self) -> int:
        """Number of points of the grid."""
        return math.prod(len(values) for values in self.choices.values() if not isinstance(values, Range))

    def grid(self) -> Iterator[dict[str, Any]]:
        """List every point of the grid."""
        ranges = [name for name, values in self.choices.items() if isinstance(values, Range)]
        if ranges:
            raise UserError(f"space: a grid needs listed values, but {', '.join(ranges)} is a range; use --method tpe")
        lists = [values for values in self.choices.values() if not isinstance(values, Range)]
        for point in itertools.product(*lists):
            yield dict(zip(self.choices, point, strict=True))

    def first(self) -> dict[str, Any]:
        """Return some point."""
        return {
            name: (int(values.low) if values.whole else values.low) if isinstance(values, Range) else values[0]
            for name, values in self.choices.items()
        }

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Let an Optuna trial choose."""
        return {name: _suggest(trial, name, values) for name, values in self.choices.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the form that goes into files."""
        return {
            name: vars(values) if isinstance(values, Range) else list(values) for name, values in self.choices.items()
        }


def _suggest(trial: Any, name: str, values: tuple[Any, ...] | Range) -> Any:
    if not isinstance(values, Range):
        return trial.suggest_categorical(name, values)
    if values.whole:
        step = 1 if values.step is None else int(values.step)
        return trial.suggest_int(name, int(values.low), int(values.high), log=values.log, step=step)
    return trial.suggest_float(name, values.low, values.high, log=values.log, step=values.step)


def _range(name: str, values: dict[str, Any], kind: Any) -> Range:
    if not fits(kind, 1):
        raise UserError(f"space: {name}: expected a list of values, since it is no number, but got the range {values}")
    try:
        wanted = Range(**{key: value for key, value in values.items() if key != "whole"}, whole=not fits(kind, 0.5))
        numbers = [wanted.low, wanted.high, *([] if wanted.step is None else [wanted.step])]
        usable = all(isinstance(number, int | float) and fits(kind, number) for number in numbers)
        usable = usable and wanted.low < wanted.high and math.isfinite(wanted.high - wanted.low)
        usable = usable and (wanted.step is None or wanted.step > 0)
        usable = usable and isinstance(wanted.log, bool)
        usable = usable and not (wanted.log and (wanted.low <= 0 or wanted.step is not None))
    except TypeError:
        usable = False
    if not usable:
        raise UserError(
            f'space: {name}: expected a range like {{"low": 0.001, "high": 0.1, "log": true}} but got {values}'
        )
    return wanted
