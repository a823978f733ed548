"""Which choices of a recipe decide what a run computes: a pool does not look at all of them.

A mean has no slices and no bound. Its results are good for every recipe that differs in those alone, so that a
comparison that goes on with another bound need not train it again.
"""

from dataclasses import fields

from cswe.training.recipe import Bounding, PoolName, Recipe

_SLICES = (
    "slices", "points", "readout", "weightings", "order", "interpolation", "initial", "start", "train_slices",
    "train_reference",
)  # fmt: skip
_BOUND = tuple(entry.name for entry in fields(Bounding))
_PLAIN = (*_SLICES, "normalize_keys", "queries", "heads", *_BOUND)
# What a pool does not look at, as the tests check by changing it. What is in doubt is not in here.
_IGNORED: dict[PoolName, tuple[str, ...]] = {
    "mean": _PLAIN,
    "sum": _PLAIN,
    "max": _PLAIN,
    "cls": _PLAIN,
    "attention": (*_SLICES, "heads", *_BOUND),
    "pma": (*_SLICES, "normalize_keys", *_BOUND),
    "wasserstein": tuple(name for name in _PLAIN if name != "points"),
    "statistics": ("points", "train_reference", "queries", "heads", *_BOUND),
    "moments": ("points", "train_reference", "queries", "heads", *_BOUND),
    # Its dissimilarity is written down, with or without the tokens' weights.
    "swe": ("queries", "heads", *(name for name in _BOUND if name != "weighted_bound")),
    "cswe": ("queries", "heads"),
}


def ignored(pool: PoolName) -> tuple[str, ...]:
    """Name the choices that a pool does not look at.

    Examples
    --------
    >>> ignored("cswe")
    ('queries', 'heads')
    """
    return _IGNORED[pool]


def decisive(recipe: Recipe) -> Recipe:
    """Return a recipe with its name and all choices that its pool does not look at as they are by default.

    Two recipes with the same seed and store compute the same if this is the same for both.

    Examples
    --------
    >>> mean = Recipe("mine").with_(pool="mean")
    >>> decisive(mean.with_(slices=64, bound=0.5)) == decisive(mean), decisive(mean.with_(lr=1.0)) == decisive(mean)
    (True, False)
    """
    plain = Recipe()
    return recipe.with_(
        name=plain.name,
        **{
            name: getattr(part, name)
            for part in (plain.pooling, plain.bounding)
            for name in ignored(recipe.pooling.pool)
            if hasattr(part, name)
        },
    )


def difference(there: Recipe, now: Recipe) -> str:
    """Say in which decisive choices two recipes differ; nothing if they compute the same."""
    return decisive(there).difference(decisive(now))
