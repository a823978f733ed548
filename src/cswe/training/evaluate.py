"""How good a model is on a store."""

import torch
from torch import Tensor

from cswe.nn import SWEPool, SWGGBound
from cswe.tokens import Batches, TokenStore
from cswe.training.data import check_labels, check_store
from cswe.training.errors import UserError
from cswe.training.model import Model
from cswe.training.task import scores_of


@torch.no_grad()
def predict(model: Model, batches: Batches) -> tuple[Tensor, Tensor]:
    """Return the model's outputs and the labels of all batches, on the CPU."""
    model.eval()
    outputs, labels = [], []
    for batch in batches:
        outputs.append(model(batch.tokens, batch.mask, batch.weights, batch.cls).cpu())
        assert batch.labels is not None
        labels.append(batch.labels.cpu())
    return torch.cat(outputs), torch.cat(labels)


def evaluate(
    model: Model, store: TokenStore, split: str | None = "test", *, batch_size: int = 256, device: str = "cpu"
) -> dict[str, float]:
    """Return the scores of a model on a split of a store.

    Parameters
    ----------
    model
        As `cswe.load` gives it.
    store
        Tokens of the backbone that the model was trained on, with labels.
    split
        Which items; None for all.
    batch_size, device
        How, and where.

    Returns
    -------
    dict
        ``items``, ``loss`` and the scores of the model's task: ``top1``, ``top5`` and ``macro_f1``; ``f_max``; or
        ``r2``.
    """
    check_store(model.facts, store)
    check_labels(model.facts, store)
    items = store.split(split)
    if not len(items):
        raise UserError(f"{store.path}: expected items in split {split!r} but there are none; it has {store.splits}")
    batches = Batches(store, batch_size, indices=items, shuffle=False, device=device)
    outputs, labels = predict(model.to(device), batches)
    return {"items": len(items), **scores_of(model.facts.task, outputs, labels)}


_SWGG_ITEMS = 256


@torch.no_grad()
def exact_swgg(model: Model, batches: Batches) -> list[float] | None:
    """Return the exact SWGG dissimilarity of every slice on the first items; None for pools without a reference."""
    pool = model.pool
    if not isinstance(pool, SWEPool) or pool.reference is None:
        return None
    items = batches.items[:_SWGG_ITEMS]
    batch = next(iter(batches.store.batches(len(items), indices=items, shuffle=False))).to(batches.device)
    masses = batch.weights if model.facts.recipe.bounding.weighted_bound else None
    values: list[float] = SWGGBound(pool, bound=1.0).hard(batch.tokens, batch.mask, masses).tolist()
    return values
