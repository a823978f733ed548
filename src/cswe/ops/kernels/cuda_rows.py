# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""What the d-wide passes in Triton share: rows of tokens and of coupled targets in half precision."""

import contextlib
import os
from math import log

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
"""Whether Triton runs on the CPU, which knows no assembly."""

WEIGHT_UNIT = tl.constexpr(1024.0)
"""Keeps weights · 1/Z, at least 1/N at the nearest point, in the range of normal half-precision numbers."""


FAR = tl.constexpr(1e30)
"""Where points are that do not exist: no kernel reaches there, and gaps to it do not overflow."""


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Launch kernels on a tensor's device, on its current stream; interpreted ones run on the CPU."""
    return torch.cuda.device_of(tensor) if tensor.is_cuda else contextlib.nullcontext()


def rate_of(tau: float) -> float:
    """Give what distances are multiplied by before :func:`decayed`: decays are powers of two on the GPU."""
    return 1 / (tau * log(2))


@triton.jit
def decayed(distance):
    """Give 2^−|distance|, 0 where that is not a normal number: tl.exp2 spends three instructions on such numbers."""
    if INTERPRETED:
        return tl.exp2(-tl.abs(distance))
    # Sign and magnitude in here become modifiers of the instruction; outside they would be instructions of their own.
    return tl.inline_asm_elementwise(
        "{ .reg .f32 down; abs.f32 down, $1; neg.f32 down, down; ex2.approx.ftz.f32 $0, down; }",
        "=f,f", [distance], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def sign_of(gap):
    """Give −1, 0 or 1: two multiplications that saturate, instead of comparisons and selections."""
    if INTERPRETED:
        return tl.where(gap > 0, 1.0, 0.0) - tl.where(gap < 0, 1.0, 0.0)
    return tl.inline_asm_elementwise(
        "{ .reg .f32 up, down; mul.sat.f32 up, $1, 0f7F000000; mul.sat.f32 down, $1, 0fFF000000; "
        "sub.f32 $0, up, down; }",
        "=f,f", [gap], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def unit_for(largest, BITS: tl.constexpr):
    """Give the power of two that brings the largest of some numbers to 2^BITS at most."""
    return tl.exp2(tl.floor(-tl.log2(tl.maximum(largest, 1e-20)) + BITS))


@triton.jit
def split(values):
    """Give two half-precision numbers whose sum is the value, to 22 bits."""
    high = values.to(tl.float16)
    return high, (values - high.to(tl.float32)).to(tl.float16)


@triton.jit
def mixed_targets(targets, ranks, present, columns, inside, length, M, d):
    """Rows T_r · length / M for a sample of this length: the average of the targets that rank r overlaps.

    In units of 1/(length · M) of the mass all edges are integers, so overlaps are exact. ``inside`` masks columns.
    """
    low = ranks.to(tl.int64) * M
    first = low // length
    rows = tl.zeros((ranks.shape[0], columns.shape[0]), dtype=tl.float32)
    terms = 1 if length == M else (M - 1) // length + 2
    for term in range(terms):
        m = first + term
        overlap = tl.minimum(low + M, (m + 1) * length) - tl.maximum(low, m * length)
        share = tl.where(present & (overlap > 0), overlap.to(tl.float32), 0.0) / M
        read = (share > 0)[:, None] & inside[None, :]
        rows += share[:, None] * tl.load(targets + m[:, None] * d + columns[None, :], mask=read, other=0.0)
    return rows


@triton.jit
def target_rows(
    high,
    low,
    targets,
    ranks,
    present,
    columns,
    inside,
    length,
    M,
    d,
    MIXED: tl.constexpr,
    BOTH: tl.constexpr,
):
    """Give T for these ranks in two half-precision parts (the second is 0 unless both are wanted)."""
    if MIXED:
        first, second = split(mixed_targets(targets, ranks, present, columns, inside, length, M, d))
    else:
        at = ranks[:, None] * d + columns[None, :]
        read = present[:, None] & inside[None, :]
        first = tl.load(high + at, mask=read, other=0.0)
        second = first
        if BOTH:
            second = tl.load(low + at, mask=read, other=0.0)
    return first, second


@triton.jit
def sample_length(lengths, sample, B, N, RAGGED: tl.constexpr):
    """Give the number of ranks of a sample (or of a vector of them), 0 behind the last sample."""
    if RAGGED:
        return tl.load(lengths + sample, mask=sample < B, other=0).to(tl.int32)
    return tl.where(sample < B, N, 0)
