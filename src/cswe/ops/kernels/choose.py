"""Which of the several ways computes the hot operation: the best one there is, or the one asked for."""

import contextlib
import importlib
import importlib.util
import logging
from collections.abc import Iterator
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from cswe.ops._asked import BACKENDS, asked, checked, chosen
from cswe.ops._transforms import is_transforming
from cswe.ops.kernels.problem import Problem

__all__ = ["BACKENDS", "Way", "backend", "choose", "choose_way", "way"]

_log = logging.getLogger("cswe")


class Way(Protocol):
    """What a module must offer to compute the operation."""

    def value_and_slope(self, problem: Problem, with_slope: bool) -> tuple[Tensor, Tensor]:
        """Give S ``(B, L)`` and its derivative with respect to the sorted projections ``(B, L, N)``."""

    def targets_gradient(self, problem: Problem, grad: Tensor) -> Tensor:
        """Give the gradient of ``Σ grad · S`` with respect to the targets, ``(L, M, d)``."""

    def tokens_gradient(self, problem: Problem, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Give the gradient with respect to the tokens ``(B, N, d)`` and their squares ``(B, N)``."""


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Compute the relaxed SWGG in the way named, inside this block and in the backward passes of what it computed.

    Parameters
    ----------
    name
        ``"dense"`` (the definition, quadratic; the one that has second derivatives), ``"scan"`` (plain torch),
        ``"cpu"`` (numba, the extra ``fast``), ``"cuda"`` (Triton, on a GPU; LapSum in plain torch) or ``"auto"``. The
        environment variable ``CSWE_BACKEND`` does the same for a whole process; a block wins over it. What
        ``torch.compile`` has compiled keeps the way it was traced with. The first two keep pools on a GPU in plain
        torch, too.

    Notes
    -----
    ``torch.func`` (vmap, grad, jvp, …) and forward-mode derivatives see through the definition alone: under them it is
    the way that is taken, and nothing is recomputed to save memory.

    Examples
    --------
    >>> import cswe.ops
    >>> x, y, slices = torch.randn(2, 9, 3), torch.randn(7, 3), torch.randn(4, 3)
    >>> with backend("dense"):
    ...     exact = cswe.ops.swgg(x, y, slices, cswe.ops.SoftSort(0.1))
    >>> bool(torch.allclose(exact, cswe.ops.swgg(x, y, slices, cswe.ops.SoftSort(0.1)), atol=1e-5))
    True
    """
    token = chosen.set(checked(name, "backend"))
    try:
        yield
    finally:
        chosen.reset(token)


def choose(problem: Problem) -> str:
    """Name the way to compute this problem."""
    if is_transforming():
        return "dense"  # plain torch; the others would lose tangents silently
    # Weighted measures are rare in a bound: the plain torch way serves them.
    is_uniform = problem.positions is None and problem.mass is None
    return choose_way(problem.points.device.type, is_uniform)


def choose_way(device: str, is_uniform: bool) -> str:
    """Name the way to compute a problem on a device, with equal masses or not."""
    wanted = asked()
    if wanted == "auto":
        return device if device in ("cpu", "cuda") and is_uniform and not _say_if_missing(device) else "scan"
    if wanted in ("cpu", "cuda"):
        if device != wanted:
            raise ValueError(f"the backend {wanted!r} was asked for, but the tensors are on {device}")
        missing = _missing(wanted)
        if missing:
            raise ValueError(f"the backend {wanted!r} was asked for, but {missing}")
        if not is_uniform:
            return "scan"
    return wanted


# torch.compile can read neither context variables nor the environment: the choice is a constant to it. This is what
# torch.compiler.assume_constant_result does, which would import the whole compiler, two seconds of it, here.
choose_way.__dict__["_dynamo_marked_constant"] = True


def way(name: str) -> Way:
    """Import the module of a way."""
    module: Way = importlib.import_module(f"cswe.ops.kernels.{name}")
    return module


@cache
def _say_if_missing(compiled: str) -> bool:
    missing = _missing(compiled)
    if missing:
        _log.info("relaxed SWGG runs in plain torch (the backend 'scan'): %s", missing)
    return bool(missing)


@cache
def _missing(compiled: str) -> str:
    """Say what keeps a compiled way from running, or nothing."""
    if compiled == "cpu":
        return "" if importlib.util.find_spec("numba") else "numba is not installed (pip install 'cswe[fast]')"
    # Triton may be importable where there is no GPU.
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return "" if importlib.util.find_spec("triton") else "triton is not installed"
