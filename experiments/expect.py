"""How long a cell should take alone on an H200: to decide whether it can still be begun, and nothing else."""

from cswe.tokens import Manifest
from cswe.training.recipe import Recipe

_STEP = 0.006  # what a step costs at least: the host prepares it
_BOUND = 0.0065 / 1e9  # a relaxed SWGG, for each of B·N·L·d numbers
_SORT = 0.2 / 1e9  # sorting and what comes after it, for each of B·N·L numbers and each weighting
_START = 5.0  # tokens to the device, last scores


def expected_seconds(recipe: Recipe, layer: int, manifest: Manifest) -> float:
    """Estimate the seconds of a run from the number of its steps and the size of each."""
    pooling, choice = recipe.pooling, recipe.optimization
    counts = manifest.counts
    items = counts.get("train", manifest.items)
    if choice.labels_per_class is not None:
        items = min(items, choice.labels_per_class * max(1, len(manifest.spec.labels.names)))
    length = manifest.tokens / max(1, manifest.items)
    sets = min(choice.batch_size, items)
    numbers = sets * length * recipe.regularization.keep_tokens * pooling.slices
    step = _STEP
    if pooling.pool in ("swe", "cswe", "moments"):
        step += _SORT * numbers * (1 + pooling.weightings)
    if pooling.pool == "cswe":
        step += _BOUND * numbers * manifest.spec.layers[layer]
    steps = choice.epochs * (1 + items // choice.batch_size)
    scoring = choice.epochs * (0.05 + 10e-6 * counts.get("validation", 0))
    return _START + steps * step + scoring
