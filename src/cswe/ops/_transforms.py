"""Whether torch transforms what runs: vmap, grad and the like of ``torch.func``, and forward-mode derivatives."""

import torch
from torch.autograd import forward_ad


def is_transforming() -> bool:
    """Say whether a transform is at work, which only plain torch lets through.

    A tensor is then more than its numbers: compiled loops would lose tangents silently, and derivatives written by hand
    have no rules for vmap.
    """
    return forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


# A constant to torch.compile, as in choose.py: it enters the transforms that it traces, and guards against others.
is_transforming.__dict__["_dynamo_marked_constant"] = True
