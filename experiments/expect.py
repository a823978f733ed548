"""How long a cell should take alone on an H200: to decide whether it can still be begun, and nothing else."""

from dataclasses import dataclass
from pathlib import Path

from cswe.tokens import Manifest, TokenStore
from cswe.training.recipe import Recipe

_STEP = 0.006  # what a step along slices costs the host
_PLAIN_STEP = 0.002  # and one without any
_BOUND_STEP = 0.003  # and what a bound adds to that
_BOUND = 0.0027 / 1e9  # a relaxed SWGG, for each of B·N·L·d numbers
_SORT = 0.2 / 1e9  # sorting and what comes after it, for each of B·N·L numbers and each weighting
_START = 5.0  # tokens to the device, last scores


@dataclass(frozen=True)
class Sizes:
    """How much there is in a store."""

    train: int
    validation: int
    length: float
    classes: int
    dims: dict[int, int]

    @classmethod
    def of(cls, path: Path) -> "Sizes | None":
        """Measure a store; None if it is not finished."""
        manifest = Manifest.read(path)
        if not manifest.complete:
            return None
        store = TokenStore(path, min(manifest.spec.layers))
        return cls(
            len(store.split("train")),
            len(store.split("validation")),
            float(store.lengths.mean()),
            len(store.label_names),
            dict(manifest.spec.layers),
        )


def expected_seconds(recipe: Recipe, layer: int, sizes: Sizes) -> float:
    """Estimate the seconds of a run from the number of its steps and the size of each."""
    pooling, choice = recipe.pooling, recipe.optimization
    items = sizes.train
    if choice.labels_per_class is not None:
        items = min(items, choice.labels_per_class * max(1, sizes.classes))
    kept = recipe.regularization.keep_tokens
    numbers = min(choice.batch_size, items) * sizes.length * kept * pooling.slices
    host = _PLAIN_STEP if pooling.pool in ("mean", "max", "cls", "attention") else _STEP
    device = 0.0
    if pooling.pool in ("swe", "cswe", "moments"):
        device += _SORT * numbers * (1 + pooling.weightings)
    if pooling.pool == "cswe":
        host += _BOUND_STEP
        device += _BOUND * numbers * sizes.dims[layer]
    steps = choice.epochs * (1 + items // choice.batch_size)
    scoring = choice.epochs * (0.05 + 10e-6 * sizes.validation)
    # The host prepares a step while the device is at the one before.
    return _START + steps * max(host, device) + scoring
