"""Modules with parameters: the pooling layer, its parts, and the poolings to compare with."""

from cswe.nn.baselines import AttentionPool, CLSPool, MaxPool, MeanPool, SumPool
from cswe.nn.bounds import MinSlicedWasserstein, Orthogonality, SWGGBound
from cswe.nn.expensive import PMAPool, WassersteinPool
from cswe.nn.explain import explain_slices, explain_tokens
from cswe.nn.learn import LearnedSlices, learn_slices
from cswe.nn.pool import SWEPool
from cswe.nn.readouts import (
    Concat,
    DualWeighted,
    Flatten,
    MapPoints,
    MapSlices,
    MeanPoints,
    MeanSlices,
    Moments,
    Readout,
    Statistics,
)
from cswe.nn.slicer import Slicer
from cswe.nn.token_weights import TokenWeights

__all__ = [
    "AttentionPool",
    "CLSPool",
    "Concat",
    "DualWeighted",
    "Flatten",
    "LearnedSlices",
    "MapPoints",
    "MapSlices",
    "MaxPool",
    "MeanPoints",
    "MeanPool",
    "MeanSlices",
    "MinSlicedWasserstein",
    "Moments",
    "Orthogonality",
    "PMAPool",
    "Readout",
    "SWEPool",
    "SWGGBound",
    "Slicer",
    "Statistics",
    "SumPool",
    "TokenWeights",
    "WassersteinPool",
    "explain_slices",
    "explain_tokens",
    "learn_slices",
]
