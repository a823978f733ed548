"""A store as a run sees it: what to train on, what to choose by, and whether it can be used at all."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cswe.tokens import Batch, Batches, Manifest, TokenStore
from cswe.tokens.manifest import as_read
from cswe.tokens.randomness import permutation, stratified_split
from cswe.training.errors import UserError
from cswe.training.model import Facts
from cswe.training.recipe import Recipe
from cswe.training.task import task_of

Indices = npt.NDArray[np.int64]
_SAMPLE = 1024  # sets from which slices, reference and statistics start
_SCORED = 256  # sets that an accelerator scores at a time, however few a training step takes


class MissingClassWarning(UserWarning):
    """Some class does not occur in validation: scores say nothing about it."""


def scoring_size(recipe: Recipe, device: torch.device) -> int:
    """Return how many sets are scored at a time: those of a training step are few where labels are.

    A small batch costs an accelerator as much as one that keeps it busy.
    """
    size = recipe.optimization.batch_size
    return size if device.type == "cpu" else max(size, _SCORED)


@dataclass
class TrainingData:
    """Batches of the training and the validation set; several runs with different seeds can share them."""

    store: TokenStore
    train: Batches
    validation: Batches
    facts: Facts

    @classmethod
    def open(cls, store: TokenStore, recipe: Recipe, device: str | torch.device = "cpu") -> "TrainingData":
        """Check that a store can be used with a recipe, and open its splits on a device."""
        recipe.check()
        device = torch.device(device)
        if recipe.pooling.pool == "cls" and not store.spec.cls:
            raise UserError(f"pool cls: expected CLS vectors but {store.path} has none; choose another pool")
        facts = Facts(recipe, store.spec, store.layer, _outputs(store))
        train, validation = _splits(store, recipe)
        if facts.task == "classification":
            _check_classes(store, train, validation)
        choice = recipe.optimization
        return cls(
            store,
            Batches(store, choice.batch_size, indices=train, max_tokens=choice.max_tokens, device=device),
            Batches(store, scoring_size(recipe, device), indices=validation, shuffle=False, device=device),
            facts,
        )

    def drawn(self, seed: int) -> "TrainingData":
        """Return what a run with this seed trains on: everything, or a few sets of every class if so chosen."""
        count = self.facts.recipe.optimization.labels_per_class
        if count is None:
            return self
        if self.facts.task != "classification":
            raise UserError(f"labels_per_class: expected one class a set but {self.store.path} has other labels")
        return replace(self, train=self.train.narrowed(_few(self.train.items, self.labels().numpy(), count, seed)))

    def sample(self, device: torch.device) -> Batch:
        """Return some training sets, evenly spaced over the store."""
        items = self.train.items
        if len(items) > _SAMPLE:
            items = items[np.linspace(0, len(items) - 1, _SAMPLE).round().astype(np.int64)]
        batches = Batches(self.store, len(items), indices=items, shuffle=False, device=device, resident=False)
        return next(iter(batches))

    def labels(self) -> Tensor:
        """Return the labels of the training set."""
        assert self.store.labels is not None
        return self.store.labels[torch.from_numpy(self.train.items)]


def check_backbone(facts: Facts, notes: dict[str, Any], preprocessing: dict[str, Any], what: str) -> None:
    """Raise an error if tokens are told to come from another backbone, or from items prepared in another way.

    Its name may be that of a folder, which says nothing, and its precision is a matter of rounding.
    """
    there = facts.tokens.backbone
    if not there or not notes:
        return  # of tokens that somebody put into a store, nothing is known
    for name in ("architecture", "revision", "norm"):
        if there.get(name) != notes.get(name):
            raise UserError(
                f"{what}: expected tokens of the backbone that the model was trained on ({there.get('name')}, {name} "
                f"{there.get(name)}) but got {name} {notes.get(name)}; use the same one"
            )
    mine, theirs = as_read(dict(facts.tokens.preprocessing)), as_read(preprocessing)
    if other := [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]:
        known, got = (", ".join(f"{name} {given.get(name)}" for name in other) for given in (mine, theirs))
        raise UserError(
            f"{what}: expected items prepared like those that the model was trained on ({known}) but got {got}; "
            "extract them alike"
        )


def check_store(facts: Facts, store: TokenStore) -> None:
    """Raise an error unless a model can read a store, and was trained on tokens of this kind."""
    if store.dim != facts.dim:
        raise UserError(
            f"{store.path}: expected tokens of dimension {facts.dim}, as the model was trained on, but got "
            f"{store.dim}; use tokens of the same backbone ({facts.tokens.backbone.get('name', 'unknown')}, layer "
            f"{facts.layer})"
        )
    if store.spec.weights != facts.tokens.weights:
        has, had = ("has", "had none") if store.spec.weights else ("has no", "had them")
        raise UserError(f"{store.path}: {has} token weights, but the tokens that the model was trained on {had}")
    if store.layer != facts.layer:
        raise UserError(
            f"{store.path}: expected tokens of layer {facts.layer}, which the model was trained on, but got layer "
            f"{store.layer}; extract that layer, or name it where you make the store (Item({{{facts.layer}: tokens}}))"
        )
    check_backbone(facts, dict(store.spec.backbone), dict(store.spec.preprocessing), str(store.path))


def open_store(path: str | Path, facts: Facts) -> TokenStore:
    """Open the layer of a store that a model was trained on, and check that the model can read it."""
    layers = Manifest.read(Path(path)).spec.layers
    store = TokenStore(path, facts.layer if len(layers) > 1 else None)
    check_store(facts, store)
    return store


def items_of(store: TokenStore, split: str | None) -> Indices:
    """Return the positions of the items of a split, or of all; that there are none is an error."""
    items = store.split(split)
    if not len(items):
        held = ", ".join(store.splits)
        raise UserError(
            f"split: expected one that has items, which in {store.path} are {held}, but got {split!r}"
            if held
            else f"{store.path}: expected items but it holds none"
        )
    return items


def check_labels(facts: Facts, store: TokenStore) -> None:
    """Raise an error unless a store's labels are what a model answers with."""
    mine, theirs = facts.labels, store.spec.labels
    if mine.kind != theirs.kind:
        raise UserError(f"{store.path}: expected labels of kind {mine.kind!r}, as in training, but got {theirs.kind!r}")
    if mine.width != theirs.width:
        raise UserError(f"{store.path}: expected {mine.width} numbers a label, as in training, but got {theirs.width}")
    if mine.names and theirs.names and mine.names != theirs.names:
        new = sorted(set(theirs.names) - set(mine.names))
        detail = f"it has {new[0]!r}, for one, which the model does not know" if new else "they come in another order"
        raise UserError(f"{store.path}: expected the classes that the model was trained on, but {detail}")
    if store.labels is not None and mine.kind == "class" and len(store.labels):
        _check_range(store, store.labels, facts.outputs)


def _outputs(store: TokenStore) -> int:
    spec, labels = store.spec.labels, store.labels
    if task_of(spec) != "classification":
        return spec.width
    assert labels is not None
    outputs = len(spec.names) or int(labels.max()) + 1
    _check_range(store, labels, outputs)
    return outputs


def _check_range(store: TokenStore, labels: Tensor, classes: int) -> None:
    wrong = ((labels < 0) | (labels >= classes)).nonzero().flatten().tolist()
    if wrong:
        raise UserError(
            f"{store.path}: expected class numbers from 0 to {classes - 1} but got {int(labels[wrong[0]])} for item "
            f"{store.ids[wrong[0]]!r} ({len(wrong)} of {len(labels)} items); correct the labels and extract again"
        )


def _splits(store: TokenStore, recipe: Recipe) -> tuple[Indices, Indices]:
    present = store.splits
    if "train" not in present:
        raise UserError(f"{store.path}: expected a split 'train' but it has {', '.join(present) or 'none'}")
    train = store.split("train")
    if "validation" in present:
        return train, store.split("validation")
    share = recipe.optimization.validation_share
    if store.label_kind == "class" and store.labels is not None:
        parts = stratified_split(store.labels.numpy()[train], (1 - share, share), seed=0)
    else:
        parts = np.zeros(len(train), dtype=np.uint8)
        parts[permutation(len(train), "validation", 0)[: round(share * len(train))]] = 1
    if not bool((parts == 1).any()) or not bool((parts == 0).any()):
        each = ", class by class," if store.label_kind == "class" else ""
        raise UserError(
            f"{store.path}: expected a split 'validation' but there is none, and a share of {share:g} of {len(train)} "
            f"training items{each} is none or all of them; give some the split 'validation', or choose another "
            "validation_share"
        )
    return train[parts == 0], train[parts == 1]


def _few(items: Indices, labels: Indices, count: int, seed: int) -> Indices:
    """Draw `count` items of every class, fewer of a class that has fewer; a larger draw contains the smaller."""
    chosen = []
    for label in np.unique(labels):
        members = items[labels == label]
        chosen.append(members[permutation(len(members), "few", seed, int(label))[:count]])
    return np.sort(np.concatenate(chosen))


def _check_classes(store: TokenStore, train: Indices, validation: Indices) -> None:
    assert store.labels is not None
    labels = store.labels.numpy()
    missing = sorted(set(labels[train].tolist()) - set(labels[validation].tolist()))
    if missing:
        named = store.label_names
        names = ", ".join(repr(named[label]) if named else str(label) for label in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        warnings.warn(
            f"no item of class {names}{more} is in validation: its scores say nothing about them, and the best epoch "
            "is chosen without them; make another split if they matter",
            MissingClassWarning,
            stacklevel=3,
        )
