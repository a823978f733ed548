"""A pool and a head: what a run learns, and what `cswe.load` gives back."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cswe.nn import AttentionPool, CLSPool, MaxPool, MeanPool, PMAPool, SumPool, SWEPool, WassersteinPool
from cswe.nn.statistics import TokenStatistics
from cswe.tokens import Batch, LabelSpec, StoreSpec
from cswe.training.errors import UserError
from cswe.training.recipe import Head, Pooling, Recipe
from cswe.training.task import Task, task_of


@dataclass(frozen=True)
class Facts:
    """What a model is and where its tokens came from; with the recipe, enough to build it again.

    Parameters
    ----------
    recipe
        How it is built and trained.
    tokens
        The store's spec: backbone, preprocessing, labels.
    layer
        The backbone's layer.
    outputs
        Numbers that the head gives.
    seed
        Of the run.
    """

    recipe: Recipe
    tokens: StoreSpec
    layer: int
    outputs: int
    seed: int = 0

    @property
    def dim(self) -> int:
        """Dimension of a token."""
        return self.tokens.layers[self.layer]

    @property
    def labels(self) -> LabelSpec:
        """What the labels are, with their names."""
        return self.tokens.labels

    @property
    def task(self) -> Task:
        """What is learned."""
        return task_of(self.labels)

    def to_json(self) -> dict[str, Any]:
        """Return the form that goes into files."""
        return {
            "recipe": self.recipe.to_json(),
            "tokens": self.tokens.to_json(),
            "layer": self.layer,
            "outputs": self.outputs,
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Facts":
        """Read the form that comes from files."""
        recipe, tokens = Recipe.from_json(data["recipe"]), StoreSpec.from_json(data["tokens"])
        return cls(recipe, tokens, int(data["layer"]), int(data["outputs"]), int(data["seed"]))


class Model(nn.Module):
    """A pool, a normalisation and a head.

    Parameters
    ----------
    facts
        What to build, and for what.

    Examples
    --------
    >>> from cswe.training.recipes import recipe
    >>> spec = StoreSpec(layers={0: 2}, labels=LabelSpec("class", ("a", "b", "c")))
    >>> model = Model(Facts(recipe("digits"), spec, layer=0, outputs=3))
    >>> model.embed(torch.randn(5, 7, 2)).shape, model(torch.randn(5, 7, 2)).shape
    (torch.Size([5, 64]), torch.Size([5, 3]))
    """

    output_mean: Tensor
    output_spread: Tensor

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self.facts = facts
        recipe = facts.recipe
        self.pool = make_pool(recipe.pooling, facts.dim)
        # The pools that are no SWEPool do not standardise by themselves.
        alone = recipe.pooling.standardize and not isinstance(self.pool, SWEPool)
        self.statistics = TokenStatistics(facts.dim) if alone else None
        size = int(self.pool.out_dim)  # type: ignore[arg-type]
        self.normalization = _normalization(recipe.regularization.normalization, size)
        self.head = make_head(recipe.head, size, facts.outputs)
        # Numbers to predict may be of any size: the head works in their standard deviations.
        self.register_buffer("output_mean", torch.zeros(facts.outputs))
        self.register_buffer("output_spread", torch.ones(facts.outputs))

    def embed(
        self, tokens: Tensor, mask: Tensor | None = None, weights: Tensor | None = None, cls: Tensor | None = None
    ) -> Tensor:
        """Pool sets ``(B, N, d)`` to vectors ``(B, size)``; CLS pooling takes ``cls``, ``(B, d)``."""
        if tokens.shape[-1] != self.facts.dim:
            raise UserError(
                f"expected tokens of dimension {self.facts.dim}, as the model was trained on, but got "
                f"{tokens.shape[-1]}"
            )
        if isinstance(self.pool, CLSPool):
            if cls is None:
                raise UserError("pool cls: expected CLS vectors but there are none; choose another pool")
            tokens, mask, weights = cls.unsqueeze(1), None, None
        if self.statistics is not None:
            tokens = self.statistics(tokens)
        vectors: Tensor = self.pool(tokens, mask, weights)
        return vectors

    def embed_batch(self, batch: Batch) -> Tensor:
        """Pool the sets of a batch."""
        return self.embed(batch.tokens, batch.mask, batch.weights, batch.cls)

    def answer(self, vectors: Tensor) -> Tensor:
        """Give the head's outputs ``(B, outputs)`` for vectors, in the units of the loss."""
        return self.decide(self.normalization(vectors))

    def decide(self, normalized: Tensor) -> Tensor:
        """Give the same for vectors that are normalised already."""
        outputs: Tensor = self.head(normalized)
        return outputs.float()

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, weights: Tensor | None = None, cls: Tensor | None = None
    ) -> Tensor:
        """Give logits, or predicted numbers in the units of the labels, ``(B, outputs)``."""
        return self.answer(self.embed(tokens, mask, weights, cls)) * self.output_spread + self.output_mean

    @property
    def size(self) -> int:
        """Length of the embedding."""
        return int(self.pool.out_dim)  # type: ignore[arg-type]


def make_pool(choice: Pooling, dim: int) -> nn.Module:
    """Make the pool that a recipe names.

    Examples
    --------
    >>> make_pool(Pooling("attention", queries=3), 8).out_dim
    24
    """
    plain = {"mean": MeanPool, "sum": SumPool, "max": MaxPool, "cls": CLSPool}
    if choice.pool in plain:
        return plain[choice.pool](dim)
    if choice.pool == "attention":
        return AttentionPool(dim, choice.queries, normalize_keys=choice.normalize_keys)
    if choice.pool == "pma":
        return PMAPool(dim, choice.queries, choice.heads)
    if choice.pool == "wasserstein":
        return WassersteinPool(dim, choice.points)
    readout, points = choice.readout, None
    if choice.pool in ("swe", "cswe"):
        points = choice.points
    elif choice.pool == "statistics":
        readout = readout if readout.startswith("statistics") else "statistics"
    elif not readout.startswith("moments"):
        readout = "moments:4"
    return SWEPool(
        dim,
        choice.slices,
        points,
        readout,
        choice.weightings,
        choice.order,
        choice.standardize,
        interpolation=choice.interpolation,
        init=choice.initial,
        train_slices=choice.train_slices,
        train_reference=choice.train_reference,
        normalize_keys=choice.normalize_keys,
    )


def make_head(choice: Head, size: int, outputs: int) -> nn.Module:
    """Make the head that a recipe names."""
    if choice.head == "linear":
        return nn.Linear(size, outputs)
    return nn.Sequential(nn.Linear(size, choice.hidden), nn.GELU(), nn.Linear(choice.hidden, outputs))


class _BatchNorm(nn.BatchNorm1d):
    """Batch normalisation that takes a batch of one, which has no spread, by the running statistics."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and len(input) == 1:
            return nn.functional.batch_norm(input, self.running_mean, self.running_var, eps=self.eps)
        return super().forward(input)


def _normalization(name: str, size: int) -> nn.Module:
    if name == "batch":
        return _BatchNorm(size, affine=False)
    return nn.LayerNorm(size, elementwise_affine=False) if name == "layer" else nn.Identity()
