"""Choices of a recipe as text, ``lr=1e-3``: for commands that take many of them at once."""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from cswe.training.errors import UserError
from cswe.training.recipe import PoolName, Recipe

# Other pools have one row each, whatever numbers of slices are compared.
WITH_SLICES = ("statistics", "moments", "swe", "cswe")


def has_slices(pool: str) -> bool:
    """Say whether a pool, as a plan asks for it, has slices.

    Examples
    --------
    >>> has_slices("cswe:bound=5"), has_slices("attention:queries=3")
    (True, False)
    """
    return pool.partition(":")[0] in WITH_SLICES


def parse_choices(texts: Iterable[str]) -> dict[str, Any]:
    """Read choices of a recipe, each of the type that the recipe has for it.

    Parameters
    ----------
    texts
        ``"name=value"`` each; the names are those of the options of ``cswe train``, ``none`` is no value.

    Examples
    --------
    >>> parse_choices(["lr=1e-3", "epochs=30", "clip=none", "train-slices=no", "pool=swe"])
    {'lr': 0.001, 'epochs': 30, 'clip': None, 'train_slices': False, 'pool': 'swe'}
    """
    known = choice_types()
    choices: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals:
            raise UserError(f"expected a choice like lr=1e-3 but got {text!r}")
        if name not in known:
            raise UserError(f"expected a choice that `cswe train --help` lists but got {name!r}")
        choices[name] = _value(name, value.strip(), known[name])
    return choices


def parse_pool(text: str) -> tuple[PoolName, dict[str, Any]]:
    """Read the name of a pool with choices of its own after a colon.

    Examples
    --------
    >>> parse_pool("attention:queries=5")
    ('attention', {'queries': 5})
    >>> parse_pool("moments:readout=moments:2,weightings=2")
    ('moments', {'readout': 'moments:2', 'weightings': 2})
    """
    name, _, rest = text.partition(":")
    if name not in get_args(PoolName):
        raise UserError(f"pools: expected one of {', '.join(get_args(PoolName))} but got {name!r}")
    choices = parse_choices(part for part in rest.split(",") if part)
    for fixed in ("pool", "slices", "name"):
        if fixed in choices:
            raise UserError(f"pools: {fixed} cannot be chosen for one pool alone, in {text!r}")
    return cast(PoolName, name), choices


def choice_types() -> dict[str, Any]:
    """Return the type of every choice of a recipe by name.

    Examples
    --------
    >>> choice_types()["epochs"]
    <class 'int'>
    """
    types: dict[str, Any] = {}
    recipe = Recipe()
    for part in fields(recipe):
        value = getattr(recipe, part.name)
        if is_dataclass(value) and not isinstance(value, type):
            types |= get_type_hints(type(value))
    return types


def flat_choices(recipe: Recipe) -> dict[str, Any]:
    """Return every choice of a recipe by name, whatever part it is in.

    Examples
    --------
    >>> flat_choices(Recipe())["epochs"]
    40
    """
    parts = (value for value in recipe.to_json().values() if isinstance(value, dict))
    return {name: value for part in parts for name, value in part.items()}


def _value(name: str, text: str, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        return text  # `Recipe.check` knows which are allowed
    allowed = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if type(None) in allowed and text.lower() == "none":
        return None
    if bool in allowed:
        truth = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() in truth:
            return truth[text.lower()]
    elif str in allowed:
        return text
    for number in (int, float):
        if number in allowed:
            try:
                return number(text)
            except ValueError:
                continue
    raise UserError(f"{name}: expected {getattr(kind, '__name__', kind)} but got {text!r}")
