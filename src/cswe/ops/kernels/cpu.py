"""The fused pass compiled for the CPU; for now the plain torch way under another name."""

from cswe.ops.kernels.scan import targets_gradient, tokens_gradient, value_and_slope

__all__ = ["targets_gradient", "tokens_gradient", "value_and_slope"]
