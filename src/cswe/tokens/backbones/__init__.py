"""Frozen backbones. `open_backbone` finds out which one a name is."""

from cswe.tokens.backbones.base import Backbone, Encoded
from cswe.tokens.backbones.opening import BackboneOptions, open_backbone

__all__ = ["Backbone", "BackboneOptions", "Encoded", "open_backbone"]
