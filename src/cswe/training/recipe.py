"""A recipe: every choice that decides what a training run computes, as data."""

import math
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from cswe.nn.slicer import Initialisation
from cswe.ops.embedding import Interpolation, Order
from cswe.training.errors import UserError

PoolName = Literal[
    "mean", "sum", "max", "cls", "attention", "pma", "wasserstein", "statistics", "moments", "swe", "cswe"
]  # fmt: skip
Start = Literal["random", "data"]
Scale = Literal["absolute", "fraction"]
ScheduleName = Literal["constant", "step", "restarts", "cosine"]
Precision = Literal["float32", "bfloat16", "float16"]
Normalization = Literal["none", "batch", "layer"]


@dataclass(frozen=True)
class Pooling:
    """How a set becomes a vector."""

    pool: PoolName = "cswe"
    """mean, sum, max, cls, attention, pma (Set Transformer), wasserstein (plans in the whole space); moments or
    statistics along learned slices; swe: slices and a reference; cswe: swe with its transport bounded."""
    slices: int = 16
    """Number L of slices."""
    points: int = 32
    """Number M of reference points (swe, cswe, wasserstein)."""
    readout: str = "moments:4"
    """What is kept of a slice: moments:K, statistics (with :MEANS behind, means along the first so many slices only);
    swe and cswe also map-points, or flatten (the paper's)."""
    weightings: int = 0
    """Learned weightings of the tokens (moments, statistics, swe, cswe)."""
    normalize_keys: bool = False
    """Let weightings and queries see the tokens' directions alone: where a few tokens are far longer than the rest."""
    order: Order = "rank"
    """How displacements are listed: by rank, by reference point (the paper's), or by argsort (public code's, wrong)."""
    interpolation: Interpolation = "barycentric"
    """Quantile functions on M ranks."""
    initial: Initialisation = "orthogonal"
    """Random slices to start from."""
    start: Start = "random"
    """Start from random slices and reference, or from principal directions and quantiles of the training tokens."""
    standardize: bool = False
    """Subtract the training tokens' mean and divide by their common spread."""
    queries: int = 1
    """Queries of attention pooling, seeds of pma."""
    heads: int = 1
    """Heads of pma."""
    train_slices: bool = True
    """Learn the slices."""
    train_reference: bool = True
    """Learn the reference."""


@dataclass(frozen=True)
class Bounding:
    """What cswe holds its slices to: D ≤ bound + slack (Algorithm 1)."""

    bound: float = 0.95
    """ε: the most that the SWGG dissimilarity of a slice may be."""
    bound_scale: Scale = "fraction"
    """Whether the bound is a number, or a fraction of the level measured on the first batches."""
    bound_batches: int = 10
    """Batches on which that level is measured."""
    slack_weight: float | None = 1.0
    """α: the price of slack. None: no slack."""
    dual_lr: float = 1e-2
    """η_λ: the rate of the multipliers."""
    slack_lr: float = 1e-2
    """η_s: the rate of the slacks."""
    slack_optimizer: Literal["adam", "projected"] = "adam"
    """How slacks move."""
    dual_factor: float = 1.0
    """Multiplies the multipliers' rate every dual_every epochs."""
    dual_every: int = 1
    """See dual_factor."""
    slack_factor: float = 1.0
    """Multiplies the slacks' rate every slack_every epochs."""
    slack_every: int = 1
    """See slack_factor."""
    relaxation: Literal["softsort", "lapsum"] = "softsort"
    """The relaxed sort (softsort is the paper's)."""
    temperature: float = 1.0
    """τ of the relaxed sort (α of lapsum)."""
    temperature_scale: Literal["absolute", "relative"] = "relative"
    """Whether τ is a number, or in standard deviations of the projections."""
    wrt: Literal["both", "slices"] = "slices"
    """What the bound moves: slices and reference (the paper), or slices alone."""
    dual_on: Literal["soft", "hard"] = "soft"
    """Whether multipliers see the relaxed or the exact dissimilarity."""
    weighted_bound: bool = False
    """Whether the bound sees the tokens' weights, if there are any; otherwise all tokens count alike."""
    dual_limit: float = 1e4
    """A multiplier beyond this has run away: the run stops and says so."""
    patience: int = 1000
    """Steps after which a bound without slack that seems out of reach is reported."""


@dataclass(frozen=True)
class Head:
    """From the vector to the answer."""

    head: Literal["linear", "mlp"] = "linear"
    """A linear map, or one hidden layer."""
    hidden: int = 256
    """Width of the hidden layer."""


@dataclass(frozen=True)
class Optimization:
    """How weights are learned."""

    epochs: int = 40
    """Passes over the training set."""
    batch_size: int = 128
    """Sets in a batch, over all devices."""
    optimizer: Literal["adam", "adamw"] = "adam"
    """For pool and head."""
    lr: float = 1e-2
    """η_p: the rate of pool and head."""
    schedule: ScheduleName = "cosine"
    """How that rate changes from epoch to epoch: constant; step: times schedule_factor every schedule_every epochs;
    restarts: a cosine that starts anew every schedule_every epochs; cosine: one over the whole run."""
    schedule_every: int = 10
    """See schedule."""
    schedule_factor: float = 0.1
    """See schedule."""
    weight_decay: float = 0.0
    """Weight decay."""
    decay: Literal["head", "all"] = "head"
    """Whether the head alone decays, or everything that is learned."""
    clip: float | None = None
    """Largest norm of the gradient."""
    precision: Precision = "float32"
    """bfloat16 or float16: mixed precision. Sorting and transport are computed in float32 in any case."""
    early_stop: int | None = None
    """Stop after this many epochs without a better validation score."""
    validation_share: float = 0.1
    """Part of the training set to hold out where the store has no validation split."""
    labels_per_class: int | None = None
    """Train on so many sets of every class, which the seed decides, and not on all. Validation stays whole."""
    max_tokens: int | None = None
    """Most tokens in a padded batch; larger ones are cut."""


@dataclass(frozen=True)
class Regularization:
    """What keeps a run from learning the training set by heart."""

    keep_tokens: float = 1.0
    """Part of every set's tokens that a training step sees, drawn anew each time. Evaluation sees all."""
    dropout: float = 0.0
    """Part of the pooled vector, normalised, that a training step does not see."""
    normalization: Normalization = "batch"
    """Of the pooled vector, without learned scale, before the head."""
    label_smoothing: float = 0.0
    """Part of every label's weight that is spread over all classes."""


@dataclass(frozen=True)
class Recipe:
    """Every choice that decides what a run computes, besides its seed and its store.

    Examples
    --------
    >>> recipe = Recipe(name="mine").with_(pool="mean", lr=1e-3)
    >>> recipe.pooling.pool, recipe.optimization.lr
    ('mean', 0.001)
    >>> Recipe.from_json(recipe.to_json()) == recipe
    True
    """

    name: str = "digits"
    pooling: Pooling = field(default_factory=Pooling)
    bounding: Bounding = field(default_factory=Bounding)
    head: Head = field(default_factory=Head)
    optimization: Optimization = field(default_factory=Optimization)
    regularization: Regularization = field(default_factory=Regularization)

    def with_(self, **choices: Any) -> "Recipe":
        """Return a recipe with some choices changed, wherever they are: ``with_(slices=64, lr=1e-3)``."""
        parts: dict[str, Any] = {}
        for part in fields(self):
            value = getattr(self, part.name)
            if is_dataclass(value) and not isinstance(value, type):
                own = {entry.name: choices.pop(entry.name) for entry in fields(value) if entry.name in choices}
                parts[part.name] = replace(value, **own)
        if "name" in choices:
            parts["name"] = choices.pop("name")
        if choices:
            raise UserError(f"expected choices of a recipe but got {', '.join(sorted(choices))}")
        return replace(self, **parts)

    def to_json(self) -> dict[str, Any]:
        """Return the form that goes into files."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Recipe":
        """Read the form that comes from files."""
        return _from_json(cls, data, "recipe")

    def difference(self, other: "Recipe") -> str:
        """Say what differs between two recipes, for an error message."""
        mine, theirs = _flat(self.to_json()), _flat(other.to_json())
        return "; ".join(f"{key}: {mine[key]!r} there, {theirs[key]!r} now" for key in mine if mine[key] != theirs[key])

    def check(self) -> "Recipe":
        """Raise an error that names the first choice that makes no sense; otherwise return the recipe."""
        self._check_kinds()
        for part, ranges in _RANGES.items():
            values = getattr(self, part)
            for name, (low, high, open_low) in ranges.items():
                value = getattr(values, name)
                fits = value is None or ((low < value if open_low else low <= value) and value <= high)
                if not fits:
                    beyond = "more than" if open_low else "at least"
                    upto = "" if high == _ANY else f" and at most {high:g}"
                    raise UserError(f"{name}: expected {beyond} {low:g}{upto} but got {value:g}")
        return self

    def _check_kinds(self) -> None:
        for choices in (self.pooling, self.bounding, self.head, self.optimization, self.regularization):
            for name, hint in get_type_hints(type(choices)).items():
                value = getattr(choices, name)
                if get_origin(hint) is Literal:
                    if value not in get_args(hint):
                        raise UserError(f"{name}: expected one of {', '.join(get_args(hint))} but got {value!r}")
                    continue
                _check_kind(name, hint, value)
                if isinstance(value, float) and math.isinf(value) and name not in _ENDLESS:
                    raise UserError(f"{name}: expected a finite number but got {value}")


_ANY = float("inf")
_ENDLESS = ("clip", "dual_limit")  # choices for which infinity is no limit
_RANGES: dict[str, dict[str, tuple[float, float, bool]]] = {
    "pooling": {
        "slices": (1, _ANY, False),
        "points": (1, _ANY, False),
        "weightings": (0, _ANY, False),
        "queries": (1, _ANY, False),
        "heads": (1, _ANY, False),
    },
    "bounding": {
        # D is a distance: no slice is ever below zero, so such a bound cannot be met.
        "bound": (0, _ANY, True),
        "bound_batches": (1, _ANY, False),
        "slack_weight": (0, _ANY, True),
        "dual_lr": (0, _ANY, False),
        "slack_lr": (0, _ANY, False),
        "temperature": (0, _ANY, True),
        "dual_limit": (0, _ANY, True),
        "dual_every": (1, _ANY, False),
        "slack_every": (1, _ANY, False),
        "patience": (2, _ANY, False),
    },
    "head": {"hidden": (1, _ANY, False)},
    "optimization": {
        "epochs": (1, _ANY, False),
        "batch_size": (1, _ANY, False),
        "lr": (0, _ANY, True),
        "schedule_every": (1, _ANY, False),
        "schedule_factor": (0, _ANY, False),
        "weight_decay": (0, _ANY, False),
        "clip": (0, _ANY, True),
        "early_stop": (1, _ANY, False),
        "validation_share": (0, 0.9, True),
        "labels_per_class": (1, _ANY, False),
        "max_tokens": (1, _ANY, False),
    },
    "regularization": {
        "keep_tokens": (0, 1, True),
        "dropout": (0, 0.99, False),
        "label_smoothing": (0, 0.99, False),
    },
}

_Made = TypeVar("_Made")


def fits(kind: Any, value: Any) -> bool:
    """Say whether a value is of the type of a choice; `Recipe.check` knows which words are allowed.

    Examples
    --------
    >>> fits(float | None, 5), fits(float | None, None), fits(int, 0.5), fits(bool, 1)
    (True, True, False, False)
    """
    if get_origin(kind) is Literal:
        return isinstance(value, str)
    allowed = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if isinstance(value, bool):
        return bool in allowed
    return isinstance(value, allowed) or (isinstance(value, int) and float in allowed)


def _check_kind(name: str, hint: Any, value: Any) -> None:
    if not fits(hint, value):
        expected = "text" if get_origin(hint) is Literal else getattr(hint, "__name__", hint)
        raise UserError(f"{name}: expected {expected} but got {value!r}")


def _from_json(kind: type[_Made], data: Any, where: str) -> _Made:
    if not isinstance(data, dict):
        raise UserError(f"{where}: expected choices by name but got {data!r}")
    hints = get_type_hints(kind)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise UserError(f"{where}: expected the choices that this version knows but got {', '.join(unknown)}")
    for name, value in data.items():
        if not is_dataclass(hints[name]):
            _check_kind(name, hints[name], value)
    values = {
        name: _from_json(hints[name], value, name) if is_dataclass(hints[name]) else value
        for name, value in data.items()
    }
    return kind(**values)


def _flat(data: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in data.items():
        flat |= _flat(value) if isinstance(value, dict) else {name: value}
    return flat
