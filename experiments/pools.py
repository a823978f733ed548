"""The poolings that are compared: how a plan names them, how a table does, and the size that each comes in."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Named:
    """A pooling.

    Parameters
    ----------
    text
        As a plan asks for it, ``"attention:queries=5"``.
    label
        As tables print it; its numbers, multiplied (and with the dimension, for attention) or added, are the size.
    slices
        Its number of slices in the tuned comparisons; None for poolings that have none, or where it is varied.
    """

    text: str
    label: str
    slices: int | None = None


# A text says all that its recipe could say otherwise: the tuned one has learned weightings of its own.
POOLS = {
    "gap": Named("mean", "mean (GAP)"),
    "cls": Named("cls", "CLS"),
    "swe": Named("swe", "SWE"),
    "swe-argsort": Named("swe:order=argsort", "SWE, matched as in public code"),
    "swe-fixed": Named("swe:train_slices=no", "SWE, slices as drawn"),
    "cswe": Named("cswe", "C-SWE"),
    "cswe-5": Named("cswe:bound=5", "C-SWE, ε = 5"),
    "cswe-10": Named("cswe:bound=10", "C-SWE, ε = 10"),
    "attention-1": Named("attention:queries=1", "attention, 1 query"),
    "attention-3": Named("attention:queries=3", "attention, 3 queries"),
    "attention-5": Named("attention:queries=5", "attention, 5 queries"),
    "statistics": Named("statistics:weightings=2", "attentive statistics, 2 × 256 × 2", 256),
    "statistics-1": Named("statistics:weightings=1", "attentive statistics, 1 × 512 × 2", 512),
    "moments": Named("moments:readout=moments:4,weightings=0", "L-moments, 192 × 4", 192),
    "weighted": Named("moments:readout=moments:2,weightings=2", "weighted L-moments, 2 × 256 × 2", 256),
    "weighted-1": Named("moments:readout=moments:2,weightings=1", "weighted L-moments, 1 × 512 × 2", 512),
    "statistics-4": Named("statistics:weightings=4", "attentive statistics, 4 × 128 × 2", 128),
    "moments-128": Named("moments:readout=moments:4,weightings=0", "L-moments, 128 × 4", 128),
    "weighted-4": Named("moments:readout=moments:2,weightings=4", "weighted L-moments, 4 × 128 × 2", 128),
}
# All of one size, or smaller, and all under the same regularisation.
IMAGE_RIVALS = (
    "gap", "attention-1", "attention-5", "statistics-1", "statistics", "moments", "weighted-1", "weighted"
)  # fmt: skip
FEW_RIVALS = ("gap", "attention-1", "attention-5", "statistics-1", "moments", "weighted-1")
PROTEIN_RIVALS = (
    "gap", "attention-1", "attention-3", "statistics-1", "statistics-4", "moments-128", "weighted-1", "weighted-4"
)  # fmt: skip

# Vectors of one size, cut in different ways. The first four are in the search by themselves; the others are tried at
# one point of it, so that every pooling in it has the same number of tries. Means along more slices than a token has
# dimensions are sums of each other: the last two have one for each dimension, and spreads along more slices.
SEARCHED_SHAPES = tuple(POOLS[key] for key in ("weighted-1", "weighted", "statistics-1", "statistics"))
SHAPES = (
    POOLS["weighted-4"],
    Named("moments:readout=moments:4,weightings=1", "weighted L-moments, 1 × 256 × 4", 256),
    Named("moments:readout=moments:4,weightings=2", "weighted L-moments, 2 × 128 × 4", 128),
    Named("moments:readout=moments:2:192,weightings=1", "weighted L-moments, 192 + 832", 832),
    Named("statistics:readout=statistics:192,weightings=1", "attentive statistics, 192 + 832", 832),
)

# On points every number of slices is tried; labels say the rest.
POINT_POOLS = {
    "gap": Named("mean", "mean (GAP)"),
    "attention-1": Named("attention:queries=1", "attention, 1 query"),
    "statistics": Named("statistics:weightings=2", "attentive statistics, 2 weightings"),
    "swe": Named("swe", "SWE"),
    "cswe": Named("cswe", "C-SWE"),
    "moments": Named("moments:readout=moments:8,weightings=0", "L-moments, K = 8"),
    "weighted": Named("moments:readout=moments:2,weightings=2", "weighted L-moments, 2 weightings, K = 2"),
}
# ε = 7 is far above any transport between points of the unit ball: there the bound is relative, as is the temperature.
# Half of the level at the start binds; nine tenths did not, since the level falls by itself. In 400 steps instead of
# the paper's 12,000 multiplier and slack would hardly move at its rates: they have thirty times those.
RAW_POOLS = {
    **POINT_POOLS,
    "statistics-1": Named("statistics:weightings=1", "attentive statistics, 1 weighting"),
    "weighted-1": Named("moments:readout=moments:2,weightings=1", "weighted L-moments, 1 weighting, K = 2"),
    "weighted-8": Named("moments:readout=moments:8,weightings=1", "weighted L-moments, 1 weighting, K = 8"),
    "cswe": Named(
        "cswe:bound=0.5,bound_scale=fraction,temperature=1,temperature_scale=relative,dual_lr=0.03,slack_lr=0.03",
        "C-SWE",
    ),
}
# A few tokens of the Point Cloud Transformer are very long, and take the mass of weightings that see lengths.
TOKEN_POOLS = {
    **POINT_POOLS,
    "attention-directions": Named("attention:queries=1,normalize_keys=yes", "attention, 1 query, by direction"),
    "statistics-directions": Named(
        "statistics:weightings=2,normalize_keys=yes", "attentive statistics, 2 weightings by direction"
    ),
    "weighted-directions": Named(
        "moments:readout=moments:2,weightings=2,normalize_keys=yes",
        "weighted L-moments, 2 weightings by direction, K = 2",
    ),
}
RAW, TOKENS, NORMED = 0, 5, 6  # layers: the points, tokens of the Point Cloud Transformer, the same normalised
POINT_FRACTIONS = 0.2, 0.3  # for validation and test, in every split
POINT_LAYERS = {RAW: RAW_POOLS, TOKENS: TOKEN_POOLS, NORMED: POINT_POOLS}


def with_choices(pool: str, *choices: str) -> str:
    """Add choices to the text of a pooling.

    Examples
    --------
    >>> with_choices("mean", "lr=0.1"), with_choices("attention:queries=5", "lr=0.1")
    ('mean:lr=0.1', 'attention:queries=5,lr=0.1')
    """
    return ",".join([pool if ":" in pool else f"{pool}:{choices[0]}", *choices[0 if ":" in pool else 1 :]])


# What a bound makes of the slices when the reference is held; on tokens at the paper's temperature, whose slope is
# mostly noise, and at a soft one.
HELD = {
    RAW: {"cswe-held": Named(with_choices(RAW_POOLS["cswe"].text, "wrt=slices"), "C-SWE, reference held")},
    TOKENS: {
        "cswe-held": Named("cswe:wrt=slices", "C-SWE, reference held"),
        "cswe-held-soft": Named(
            "cswe:wrt=slices,temperature=1,temperature_scale=relative", "C-SWE, reference held, τ = 1"
        ),
    },
}

# The paper's own epochs for tokens of points, with its steps of rate and slack: four times as many as the others have.
# At its temperature, and at a soft one.
_WHOLE = ("epochs=200", "schedule_every=50", "slack_every=50")
_SOFT = ("temperature=1", "temperature_scale=relative")
LONGER = {
    TOKENS: {
        "swe-long": Named(with_choices("swe", *_WHOLE), "SWE"),
        "cswe-long": Named(with_choices("cswe", *_WHOLE), "C-SWE"),
        "cswe-long-soft": Named(with_choices("cswe", *_WHOLE, *_SOFT), "C-SWE, τ = 1"),
    }
}


def point_pools(layer: int) -> dict[str, Named]:
    """Return all poolings of points of a layer by name, those of studies of their own too."""
    return {**POINT_LAYERS[layer], **HELD.get(layer, {}), **LONGER.get(layer, {})}
