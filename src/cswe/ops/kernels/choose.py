"""Which of the several ways computes the hot operation: the best one there is, or the one asked for."""

import contextlib
import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from cswe.ops.kernels.problem import Problem

BACKENDS = ("dense", "scan", "cpu", "cuda")
"""The definition; plain torch on any device; compiled by numba; compiled by Triton."""

_log = logging.getLogger("cswe")
_chosen: ContextVar[str | None] = ContextVar("cswe_backend", default=None)


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
    """Compute the relaxed SWGG in the way named, inside this block.

    Parameters
    ----------
    name
        ``"dense"`` (the definition, quadratic), ``"scan"`` (plain torch), ``"cpu"`` (numba, the extra ``fast``),
        ``"cuda"`` (Triton, on a GPU) or ``"auto"``. The environment variable ``CSWE_BACKEND`` does the same for a
        whole process; a block wins over it. What ``torch.compile`` has compiled keeps the way it was traced with.

    Examples
    --------
    >>> import cswe.ops
    >>> x, y, slices = torch.randn(2, 9, 3), torch.randn(7, 3), torch.randn(4, 3)
    >>> with backend("dense"):
    ...     exact = cswe.ops.swgg(x, y, slices, cswe.ops.SoftSort(0.1))
    >>> bool(torch.allclose(exact, cswe.ops.swgg(x, y, slices, cswe.ops.SoftSort(0.1)), atol=1e-5))
    True
    """
    token = _chosen.set(_checked(name, "backend"))
    try:
        yield
    finally:
        _chosen.reset(token)


def choose(problem: Problem) -> str:
    """Name the way to compute this problem."""
    # Weighted measures are rare in a bound: the plain torch way serves them.
    is_uniform = problem.positions is None and problem.mass is None
    return choose_way(problem.points.device.type, is_uniform)


def choose_way(device: str, is_uniform: bool) -> str:
    """Name the way to compute a problem on a device, with equal masses or not."""
    asked = _chosen.get() or _checked(os.environ.get("CSWE_BACKEND", "auto"), "CSWE_BACKEND")
    if asked == "auto":
        return device if device in ("cpu", "cuda") and is_uniform and not _say_if_missing(device) else "scan"
    if asked in ("cpu", "cuda"):
        if device != asked:
            raise ValueError(f"the backend {asked!r} was asked for, but the tensors are on {device}")
        missing = _missing(asked)
        if missing:
            raise ValueError(f"the backend {asked!r} was asked for, but {missing}")
        if not is_uniform:
            return "scan"
    return asked


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


def _checked(name: str, source: str) -> str:
    if name not in (*BACKENDS, "auto"):
        expected = ", ".join(map(repr, (*BACKENDS, "auto")))
        raise ValueError(f"expected {source} to be one of {expected} but got {name!r}")
    return name
