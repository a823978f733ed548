"""What every pooling does with its input before it pools: one door, one set of rules."""

import torch
from torch import Tensor

from cswe.ops._inputs import as_mask, check_finite, check_points, check_weights, looks_at_values


def enter(
    tokens: Tensor, mask: Tensor | None, weights: Tensor | None, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Check a batch of sets and make what is masked harmless.

    Parameters
    ----------
    tokens
        ``(B, N, width)``, any floating dtype.
    mask
        ``(B, N)``, bool or 0/1, True = valid; what is masked is never read, in forward or gradient.
    weights
        Masses ``(B, N)``, not necessarily normalised.
    width
        The number of dimensions expected.
    dtype
        The precision to compute in.

    Returns
    -------
    tuple
        Tokens in ``dtype`` with zeros under the mask, the boolean mask, and the weights in ``dtype``, zero under the
        mask.
    """
    mask, weights = check_sets(tokens, mask, weights, width, dtype)
    tokens = tokens.to(dtype)
    if mask is not None:
        tokens = torch.where(mask.unsqueeze(-1), tokens, 0.0)
    if looks_at_values(None, tokens):
        check_finite(tokens, "tokens", " among the valid ones")
    return tokens, mask, weights


def check_sets(
    tokens: Tensor, mask: Tensor | None, weights: Tensor | None, width: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Check a batch of sets, but for the numbers in it: the boolean mask, and the weights as :func:`enter` has them."""
    check_points(tokens, "tokens", (3,), width=width)
    shape = tuple(tokens.shape[:2])
    look = looks_at_values(None, tokens)
    mask = as_mask(mask, shape, "mask", look)
    check_weights(weights, shape, "weights", look, mask)
    if weights is not None:
        weights = (weights if mask is None else torch.where(mask, weights, 0.0)).to(dtype)
        if look:
            total = weights.sum(-1)
            if not bool((torch.isfinite(total) & (total > 0)).all()):
                raise ValueError(
                    f"the weights are too small or too large for sums in {dtype}, in which this is computed: scale them"
                )
    return mask, weights


def result_dtype(tokens: Tensor, parameter: Tensor) -> torch.dtype:
    """Give the dtype of a pooled vector: that of tokens and parameters together; float32 under autocast.

    Tokens kept in half precision and a float32 layer give float32; a layer in half precision gives half precision.
    """
    kind = tokens.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.float32
    return torch.promote_types(tokens.dtype, parameter.dtype)
