"""Forget what a step stored, and compute it once more for the gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from cswe.ops._asked import chosen
from cswe.ops._transforms import is_transforming


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call a function such that it is called again in the backward pass, in the way that was asked for here.

    The backward pass may run after the block that asked, and on a thread that knows of none.
    """
    if is_transforming():  # torch.func knows no recomputation
        return function(*inputs)
    if torch.compiler.is_compiling():
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    asked_for = chosen.get()

    def in_the_same_way(*again: Any) -> Any:
        token = chosen.set(asked_for)
        try:
            return function(*again)
        finally:
            chosen.reset(token)

    return checkpoint(in_the_same_way, *inputs, use_reentrant=False, preserve_rng_state=False)
