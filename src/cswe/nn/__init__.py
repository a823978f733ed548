"""Modules with parameters: the pooling layer, its parts, and the poolings to compare with."""

from cswe.nn.baselines import AttentionPool, CLSPool, MaxPool, MeanPool
from cswe.nn.bounds import SWGGBound
from cswe.nn.pool import SWEPool
from cswe.nn.readouts import Flatten, MapPoints, Moments, Readout, Statistics
from cswe.nn.slicer import Slicer
from cswe.nn.token_weights import TokenWeights

__all__ = [
    "AttentionPool",
    "CLSPool",
    "Flatten",
    "MapPoints",
    "MaxPool",
    "MeanPool",
    "Moments",
    "Readout",
    "SWEPool",
    "SWGGBound",
    "Slicer",
    "Statistics",
    "TokenWeights",
]
