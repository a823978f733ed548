"""Find out whether Triton kernels may work on tensors, and import them only then."""

import importlib
import importlib.util
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from cswe.ops._asked import wants_compiled
from cswe.ops._transforms import is_transforming


def gpu_kernels(name: str, *tensors: Tensor, half: tuple[Tensor, ...] = ()) -> ModuleType | None:
    """Give a module of :mod:`cswe.ops.kernels` if the tensors are plain float32 numbers on a GPU, and Triton is there.

    Those under ``half`` may be in half precision. Not while torch traces (compile, export, fake tensors) or transforms
    (vmap, forward-mode derivatives), nor where a plain way was asked for.
    """
    if (
        torch.compiler.is_compiling()
        or is_transforming()
        or not wants_compiled()
        or not all(_is_plain(tensor, _SINGLE) for tensor in tensors)
    ):
        return None
    return _module(name) if all(_is_plain(tensor, _ANY) for tensor in half) else None


_SINGLE = (torch.float32,)
_ANY = (torch.float32, torch.float16, torch.bfloat16)


def _is_plain(tensor: Tensor, types: tuple[torch.dtype, ...]) -> bool:
    return tensor.device.type == "cuda" and tensor.dtype in types and type(tensor) in (Tensor, torch.nn.Parameter)


@cache
def _module(name: str) -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"cswe.ops.kernels.{name}")
