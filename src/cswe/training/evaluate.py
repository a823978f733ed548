"""How good a model is on a store."""

import torch
from torch import Tensor

from cswe.nn import SWEPool, SWGGBound
from cswe.tokens import Batches, TokenStore
from cswe.training.data import check_labels, check_store, items_of
from cswe.training.errors import UserError
from cswe.training.model import Model
from cswe.training.neighbors import nearest
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


@torch.no_grad()
def nearest_accuracy(model: Model, train: Batches, held_out: dict[str, Batches]) -> dict[str, float]:
    """Return how often the nearest training set is of a set's own class, for several splits: no head is asked.

    Nearest by the cosine of vectors as the head sees them: normalised, so that numbers of different size count alike.
    """
    if model.facts.task != "classification":
        raise UserError("neighbors: expected one class a set to compare but the labels are of another kind")
    model.eval()

    def vectors(batches: Batches) -> tuple[Tensor, Tensor]:
        parts = [(model.normalization(model.embed_batch(batch)), batch.labels) for batch in batches]
        return torch.cat([part for part, _ in parts]), torch.cat([own for _, own in parts if own is not None])

    known, classes = vectors(train)
    found = {}
    for split, batches in held_out.items():
        asked, truth = vectors(batches)
        places = torch.cat([nearest(part, known.split(_BLOCK), k=1)[1] for part in asked.split(_BLOCK)])
        found[split] = float((classes[places[:, 0]] == truth).double().mean())
    return found


_BLOCK = 8192  # sets compared with as many others at a time


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
        ``items``, ``loss`` and the scores of the model's task: ``top1``, ``top5``, ``macro_f1`` and ``balanced``
        (accuracy); ``f_max``; or ``r2``.
    """
    check_store(model.facts, store)
    check_labels(model.facts, store)
    items = items_of(store, split)
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
    # Among the tokens that are held already: read anew, they would take longer than what is computed of them.
    batch = next(iter(batches.narrowed(items, len(items))))
    masses = batch.weights if model.facts.recipe.bounding.weighted_bound else None
    values: list[float] = SWGGBound(pool, bound=1.0).hard(batch.tokens, batch.mask, masses).tolist()
    return values
