"""Sort the rows of a matrix: what every slice begins with.

On the CPU ``torch.sort`` spends most of its time on not being vectorised. numpy's sort of plain numbers is, so rows of
float32 are packed into integers, value above index, and sorted as those: stable, because indices break ties.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cswe.ops._gpu import gpu_kernels
from cswe.ops._memory import has_memory, share_out
from cswe.ops._transforms import is_transforming

BLOCK_ELEMENTS = 1 << 15
"""Numbers that are packed, sorted and unpacked at a time: they stay in a core's own cache."""

SMALLEST = 1 << 10
"""Up to so many numbers the way to numpy and back costs more than it gains."""


def sort_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sort ascending and stably along the last axis: values and order, as ``torch.sort(stable=True)`` gives them.

    Examples
    --------
    >>> sort_rows(torch.tensor([3.0, 1.0, 1.0, 2.0]))
    (tensor([1., 1., 2., 3.]), tensor([1, 2, 3, 0]))
    """
    compiled = gpu_kernels("cuda_sort", values)
    if compiled is not None and values.numel():
        pair: tuple[Tensor, Tensor] = compiled.sort_rows(values)
        return pair
    if not _is_faster(values):
        ranked, order = torch.sort(values, dim=-1, stable=True)
        return ranked, order
    order = _order(values.detach())
    return values.gather(-1, order), order


def sorted_rows(values: Tensor) -> Tensor:
    """Sort ascending along the last axis, values alone: faster still, where no gradient needs the order."""
    needs_order = torch.is_grad_enabled() and values.requires_grad
    if needs_order or not _is_faster(values):
        return sort_rows(values)[0]
    # A copy, in rows: numpy sorts in place.
    result = values.detach().clone(memory_format=torch.contiguous_format)
    share_out(np.ndarray.sort, [(rows, -1) for rows in _row_blocks(result)])
    return result


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return values.gather(-1, order.expand(values.shape))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return permuted(grad, inverse, order), None, None


def permuted(values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Gather values ``(…, N)`` by a permutation that broadcasts; its inverse is given.

    torch's gather adds up gradients one by one, since an index might occur twice: slow, and in deterministic mode
    slower still. Here the gradient is gathered by the inverse.
    """
    if torch.compiler.is_compiling() or is_transforming():
        return values.gather(-1, order.expand(values.shape))
    result: Tensor = _Permuted.apply(values, order, inverse)  # type: ignore[no-untyped-call]
    return result


def _is_faster(values: Tensor) -> bool:
    # While torch traces, the number of elements is a symbol: asking for it would tie the graph to this size.
    return has_memory(values) and values.dtype == torch.float32 and values.numel() > SMALLEST


def _row_blocks(values: Tensor) -> list[np.ndarray]:
    rows = values.numpy().reshape(-1, values.shape[-1])
    return np.array_split(rows, -(-rows.size // max(BLOCK_ELEMENTS, rows.shape[1])))


def _order(values: Tensor) -> Tensor:
    order = torch.empty(values.shape, dtype=torch.int64, device=values.device)
    blocks = zip(_row_blocks(values.contiguous()), _row_blocks(order), strict=True)
    share_out(_order_block, list(blocks))
    return order


def _order_block(values: np.ndarray, order: np.ndarray) -> None:
    # Adding 0 makes −0 into 0, with which it ties.
    bits = (values + np.float32(0)).view(np.int32)
    # As an integer a float is sign and magnitude; this makes it ascending (two's complement).
    keys = np.bitwise_xor(bits, np.bitwise_and(bits >> 31, np.int32(0x7FFFFFFF)))
    if np.isnan(values).any():
        keys[np.isnan(values)] = np.iinfo(np.int32).max
    np.left_shift(keys, 32, out=order, dtype=np.int64)
    np.bitwise_or(order, np.arange(values.shape[1], dtype=np.int64), out=order)
    order.sort(axis=-1)
    np.bitwise_and(order, 0xFFFFFFFF, out=order)
