"""Recipes by name: digits to try things on, one for large backbones, and the paper's three with their grids."""

from typing import Literal, get_args

from cswe.training.errors import UserError
from cswe.training.recipe import Recipe

RecipeName = Literal["digits", "images", "points", "proteins", "tuned"]
EsmSize = Literal["8M", "35M", "150M", "650M"]

# The paper's form: every displacement, listed by reference point; slices and reference both move.
_PAPER = {
    "pool": "cswe",
    "readout": "flatten",
    "order": "reference",
    "initial": "normal",
    "wrt": "both",
    "bound_scale": "absolute",
    "temperature_scale": "absolute",
    "slack_optimizer": "adam",
    "normalization": "none",
}

# Table "Selected hyperparameters for the DeiT-Tiny experiments"; the rates of primal and slack fall at epoch 60.
_IMAGES = {
    "slices": 32, "points": 196, "batch_size": 1024, "epochs": 80, "optimizer": "adam", "lr": 1e-3,
    "schedule": "step", "schedule_every": 60, "schedule_factor": 0.1, "slack_every": 60, "slack_factor": 0.1,
    "slack_lr": 1e-3, "dual_lr": 1e-3, "slack_weight": 0.1, "bound": 21.0, "temperature": 0.01,
    "validation_share": 0.1,
}  # fmt: skip

# Table "Selected hyperparameters for the point cloud classification experiments"; primal and slack fall every 50.
_POINTS = {
    "slices": 32, "points": 512, "batch_size": 128, "epochs": 200, "optimizer": "adam", "lr": 1e-3,
    "schedule": "step", "schedule_every": 50, "schedule_factor": 0.5, "slack_every": 50, "slack_factor": 0.5,
    "slack_lr": 1e-3, "dual_lr": 1e-3, "slack_weight": 1.0, "bound": 7.0, "temperature": 0.001,
    "validation_share": 0.2,
}  # fmt: skip

# "Subcellular localization". The paper gives no weight decay: 0.01 on everything is torch's own AdamW.
_PROTEINS = {
    "slices": 16, "points": 100, "batch_size": 32, "epochs": 50, "optimizer": "adamw", "lr": 1e-4,
    "weight_decay": 0.01, "decay": "all", "schedule": "restarts", "schedule_every": 10,
    "slack_lr": 1e-2, "slack_factor": 0.95, "dual_factor": 0.95,
}  # fmt: skip

# What serves on tokens of large backbones (docs/results.md): two L-moments on many slices under one learned weighting,
# and much to keep it from learning the training set by heart. Attentive statistics of the same cut are level with it by
# validation, and a few tenths ahead on test. The rate is one for batches of 1024.
_TUNED = {
    "pool": "moments", "slices": 512, "readout": "moments:2", "weightings": 1, "standardize": True,
    "batch_size": 1024, "epochs": 16, "optimizer": "adamw", "lr": 4e-3, "schedule": "cosine", "weight_decay": 0.2,
    "decay": "head", "normalization": "batch", "label_smoothing": 0.1, "dropout": 0.5, "keep_tokens": 0.5,
}  # fmt: skip

# (ε, η_λ, α, τ) by number of slices and size of ESM-2: table "Hyperparameters selected for the subcellular
# localization experiments".
PROTEIN_TABLE: dict[int, dict[EsmSize, tuple[float, float, float, float]]] = {
    1: {
        "8M": (5, 0.001, 1, 0.01),
        "35M": (10, 0.001, 1, 0.01),
        "150M": (10, 0.001, 1, 0.01),
        "650M": (5, 0.001, 0.1, 0.01),
    },
    4: {
        "8M": (5, 0.001, 1, 0.001),
        "35M": (5, 0.001, 0.1, 0.001),
        "150M": (10, 0.001, 1, 0.001),
        "650M": (10, 0.001, 0.1, 0.001),
    },
    16: {
        "8M": (5, 0.001, 0.1, 0.001),
        "35M": (10, 0.001, 1, 0.001),
        "150M": (10, 0.001, 1, 0.001),
        "650M": (10, 0.001, 0.1, 0.001),
    },
    64: {
        "8M": (10, 0.001, 0.1, 0.01),
        "35M": (10, 0.001, 0.1, 0.01),
        "150M": (10, 0.001, 0.1, 0.01),
        "650M": (10, 0.001, 0.1, 0.01),
    },
}

# Table "Grid of hyperparameters used for the numerical experiments", and the numbers of slices of its figures.
SPACES: dict[RecipeName, dict[str, tuple[float, ...]]] = {
    "images": {
        "bound": (11, 15, 17, 18, 19, 20, 21, 22, 24),
        "slack_weight": (0.1, 0.5, 1),
        "dual_lr": (0.001, 0.01),
        "slack_lr": (0.001, 0.01),
        "temperature": (0.001, 0.01),
    },
    "points": {
        "bound": (1, 3.5, 5, 7),
        "slack_weight": (0.1, 1),
        "dual_lr": (0.001, 0.01),
        "slack_lr": (0.001,),
        "temperature": (0.001, 0.01),
    },
    "proteins": {
        "bound": (5, 10),
        "slack_weight": (0.1, 1),
        "dual_lr": (0.001, 0.01),
        "slack_lr": (0.01,),
        "temperature": (0.001, 0.01),
    },
}


def recipe(name: RecipeName = "digits", slices: int | None = None, esm: EsmSize = "8M") -> Recipe:
    """Return a recipe by name.

    Parameters
    ----------
    name
        ``"digits"``: small and quick, in the form we recommend. ``"tuned"``: the same for tokens of large backbones,
        regularised. ``"images"``, ``"points"``, ``"proteins"``: the paper's settings.
    slices
        Number of slices; other settings of the paper depend on it. By default the recipe's own.
    esm
        Size of ESM-2, for proteins.

    Examples
    --------
    >>> recipe("points").optimization.batch_size, recipe("points", slices=64).optimization.batch_size
    (128, 64)
    >>> recipe("proteins", slices=4, esm="650M").bounding.bound
    10.0
    """
    if name not in get_args(RecipeName):
        raise UserError(f"recipe: expected one of {', '.join(get_args(RecipeName))} but got {name!r}")
    if name == "digits":
        return Recipe("digits").with_(**({} if slices is None else {"slices": slices}))
    if name == "tuned":
        return Recipe("tuned").with_(**_TUNED).with_(**({} if slices is None else {"slices": slices}))
    settings = {"images": _IMAGES, "points": _POINTS, "proteins": _PROTEINS}[name]
    chosen = Recipe(name).with_(**_PAPER).with_(**settings)
    chosen = chosen.with_(slices=chosen.pooling.slices if slices is None else slices)
    if name == "points" and chosen.pooling.slices == 64:
        chosen = chosen.with_(batch_size=64)
    if name == "proteins":
        if esm not in get_args(EsmSize):
            raise UserError(f"esm: expected one of {', '.join(get_args(EsmSize))} but got {esm!r}")
        bound, dual_lr, slack_weight, temperature = PROTEIN_TABLE[_nearest(chosen.pooling.slices)][esm]
        chosen = chosen.with_(
            bound=float(bound), dual_lr=dual_lr, slack_weight=float(slack_weight), temperature=temperature
        )
    return chosen


def _nearest(slices: int) -> int:
    """Return the number of slices in the paper's table that is nearest by ratio, the smaller of two."""
    return min(PROTEIN_TABLE, key=lambda known: max(known / slices, slices / known))
