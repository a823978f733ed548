"""Find out whether Triton kernels may work on tensors, and import them only then."""

import importlib
import importlib.util
from functools import cache
from types import ModuleType

import torch
from torch import Tensor


def gpu_kernels(name: str, *tensors: Tensor) -> ModuleType | None:
    """Give a module of :mod:`cswe.ops.kernels` if the tensors are plain float32 numbers on a GPU, and Triton is there.

    Not while torch traces (compile, export, fake tensors) or transforms (vmap, forward-mode derivatives).
    """
    if torch.compiler.is_compiling() or not all(_is_plain(tensor) for tensor in tensors):
        return None
    return _module(name)


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cuda"
        and tensor.dtype == torch.float32
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


@cache
def _module(name: str) -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"cswe.ops.kernels.{name}")
