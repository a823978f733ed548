"""The fused pass in Triton, on a GPU: as accurate as float32 asks for, in time linear in N.

Scalars are scanned before and after (``cuda_scalars``). Everything d-wide runs on tensor cores, on half-precision
factors that ``cuda_prepare`` makes: what lies outside each chunk of ranks (``cuda_shared_states``, ``cuda_states``),
then the chunks, all at the same time (``cuda_fused``, ``cuda_targets``), and what ties across their borders
(``cuda_ties``). A single sample, as a reference is, takes a way of its own (``cuda_ranks``). float64 goes to ``scan``.
No result depends on the order in which programs run, so the deterministic mode needs no other code.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cswe.ops.kernels import cuda_ranks, scan
from cswe.ops.kernels.cuda_fused import chunk_pass
from cswe.ops.kernels.cuda_prepare import Halves, halves, needs_both_parts, terms_of
from cswe.ops.kernels.cuda_rows import on_device_of, rate_of
from cswe.ops.kernels.cuda_scalars import normaliser_pass, slope_pass
from cswe.ops.kernels.cuda_shared_states import shared_states_pass
from cswe.ops.kernels.cuda_sizes import cdiv, in_parts, power_of_two
from cswe.ops.kernels.cuda_sort import unsort_rows
from cswe.ops.kernels.cuda_states import states_pass
from cswe.ops.kernels.cuda_targets import collect_targets, ragged_targets_pass, targets_pass
from cswe.ops.kernels.cuda_ties import ties_pass
from cswe.ops.kernels.cuda_tokens import tokens_pass
from cswe.ops.kernels.problem import Problem

ENOUGH_PROGRAMS = 4096
"""Programs that keep a large GPU busy."""

PARTIAL_BYTES = 320 << 20
"""What partial sums of a gradient may take."""


class Tuning(NamedTuple):
    """How the work is cut; nothing of it changes a result beyond rounding."""

    chunk: int = 32
    chunk_warps: int = 1
    chunk_stages: int = 2
    chunk_width: int = 64
    state_ranks: int = 16
    state_warps: int = 2
    state_stages: int = 2
    state_bytes: int = 128 << 20
    target_warps: int = 4
    target_stages: int = 2
    target_width: int = 256
    target_samples: int = 4
    chunk_registers: int | None = 124
    state_registers: int | None = None
    target_registers: int | None = 168
    shared_most: int = 512
    shared_ranks: int = 32
    shared_width: int = 256
    shared_warps: int = 4
    shared_stages: int = 3
    shared_registers: int | None = None
    shared_lines: int = 64
    tie_chunks: int = 32
    scan_ranks: int = 16
    precise: bool | None = None
    scan_rows: int = 8192


tuning = Tuning()


def value_and_slope(problem: Problem, with_slope: bool) -> tuple[Tensor, Tensor]:
    """Give S ``(B, L)`` and its derivative with respect to the sorted projections ``(B, L, N)``."""
    if problem.points.dtype != torch.float32:
        return scan.value_and_slope(problem, with_slope)
    with on_device_of(problem.points):
        return _value_and_slope(_contiguous(problem), with_slope)


def targets_gradient(problem: Problem, grad: Tensor) -> Tensor:
    """Give the gradient of ``Σ grad · S`` with respect to the targets, ``(L, M, d)``."""
    if problem.points.dtype != torch.float32:
        return scan.targets_gradient(problem, grad)
    with on_device_of(problem.points):
        return _targets_gradient(_contiguous(problem), grad.contiguous())


def tokens_gradient(problem: Problem, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Give the gradient of ``Σ grad · S`` with respect to the tokens ``(B, N, d)`` and their squares ``(B, N)``."""
    if problem.points.dtype != torch.float32:
        return scan.tokens_gradient(problem, grad)
    with on_device_of(problem.points):
        return _tokens_gradient(_contiguous(problem), grad.contiguous())


def _contiguous(problem: Problem) -> Problem:
    lengths = problem.lengths
    return problem._replace(
        points=problem.points.contiguous(),
        order=problem.order.contiguous(),
        tokens=problem.tokens.contiguous(),
        squares=problem.squares.contiguous(),
        targets=problem.targets.contiguous(),
        centre=problem.centre.contiguous(),
        lengths=None if lengths is None else lengths.contiguous(),
    )


def _rate(problem: Problem) -> float:
    return rate_of(problem.tau)


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """Give a kernel something to point to where it reads nothing."""
    return stand_in if tensor is None else tensor


def _scalar_tile(rows: int, count: int) -> dict[str, int]:
    """Cut the passes over scalars: a thread a row where there are many rows, a warp and more a row otherwise."""
    if rows >= tuning.scan_rows:
        return {"R": 128 // tuning.scan_ranks, "NB": tuning.scan_ranks, "num_warps": 1}
    ranks = min(1024, power_of_two(count))
    return {"R": max(1, 1024 // ranks), "NB": ranks, "num_warps": 4}


def normaliser(problem: Problem) -> Tensor:
    """Give 1/Z, ``(B, L, N)``."""
    batch, slices, count, _, _ = problem.sizes
    scale = torch.empty_like(problem.points)
    rows, tile = batch * slices, _scalar_tile(batch * slices, count)
    normaliser_pass[(cdiv(rows, tile["R"]),)](
        problem.points, _or(problem.lengths, problem.order), scale, rows, slices, count, _rate(problem),
        RAGGED=problem.lengths is not None, **tile,
    )  # fmt: skip
    return scale


def _width_of_pieces(dimensions: int, most: int) -> int:
    """Choose a power of two to cut d dimensions into: the largest that leaves at most a quarter empty."""
    width = min(most, max(16, power_of_two(dimensions)))
    while width > 64 and cdiv(dimensions, width) * width * 3 > dimensions * 4:
        width //= 2
    return width


def _two_widths(dimensions: int, most: int) -> tuple[int, int]:
    """Choose the widths of two products, powers of two, that cut d dimensions into few pieces; the second may be 0.

    Little should be left empty: 192 is 128 + 64, and 320 twice 128 + 32.
    """
    needed = cdiv(dimensions, cdiv(dimensions, most))
    firsts = [width for width in (16, 32, 64, 128, 256) if width <= most]
    pairs = [
        (first, second) for first in firsts for second in (0, first // 2, first // 4) if second in (0, 32, 64, 128)
    ]
    return min((pair for pair in pairs if needed <= sum(pair) <= most), key=lambda pair: (sum(pair), pair[1] > 0))


def _ends_in_half(count: int) -> bool:
    """Whether the last of the chunks of so many ranks is at most half full: half a tile is enough for it."""
    return 0 < count % tuning.chunk <= tuning.chunk // 2


class States(NamedTuple):
    """What lies left and right of every chunk: ``(B, L, chunks, 2, d)`` in two parts, its mass, and a scalar's sum."""

    high: Tensor
    low: Tensor
    mass: Tensor
    scalar: Tensor

    def samples(self, start: int, stop: int) -> "States":
        """Restrict to some of the samples."""
        if start == 0 and stop >= self.high.shape[0]:
            return self
        return States(*(tensor[start:stop] for tensor in self))


def empty_states(problem: Problem, precise: bool) -> States:
    """Make room for the states of a problem."""
    batch, slices, count, _, width = problem.sizes
    shape, device = (batch, slices, cdiv(count, tuning.chunk), 2, width), problem.points.device
    high = torch.empty(shape, dtype=torch.float16, device=device)
    low = torch.empty_like(high) if precise else high
    mass = torch.empty(shape[:-1], dtype=torch.float32, device=device)
    return States(high, low, mass, torch.empty_like(mass))


def shares_states(problem: Problem, precise: bool) -> bool:
    """Whether states are found for many samples or slices at a time: samples short and alike, tokens in one part."""
    return problem.lengths is None and not precise and problem.points.shape[2] <= tuning.shared_most


def _shared_states(problem: Problem, scale: Tensor, parts: Halves, natural: Tensor | None, into: States) -> States:
    """Find the states of the tokens, given the projections in the order of the tokens, or else those of ``c T``."""
    batch, slices, count, _, width = problem.sizes
    of_tokens = natural is not None
    owners, partners, strides = (batch, slices, (slices, 1)) if of_tokens else (slices, batch, (1, slices))
    lines = max(16, power_of_two(2 * cdiv(count, tuning.chunk)))
    together, (piece, more) = max(1, tuning.shared_lines // lines), _two_widths(width, tuning.shared_width)
    shared_states_pass[(owners * cdiv(partners, together), cdiv(width, piece + more))](
        _or(natural, problem.points), problem.points, problem.order, problem.squares if of_tokens else scale,
        parts.tokens if of_tokens else parts.high, into.high, into.mass, into.scalar,
        partners, *strides, count, width, _rate(problem),
        C=tuning.chunk, P=together, LINES=lines, KB=tuning.shared_ranks, DB=piece, MORE=more,
        EVEN=width % (piece + more) == 0, TOKENS=of_tokens, STAGES=tuning.shared_stages,
        num_warps=tuning.shared_warps, maxnreg=tuning.shared_registers,
    )  # fmt: skip
    return into


def _states(
    problem: Problem,
    scale: Tensor,
    parts: Halves,
    of_tokens: bool,
    precise: bool,
    into: States | None = None,
    natural: Tensor | None = None,
) -> States:
    batch, slices, count, targets, width = problem.sizes
    ragged = problem.lengths is not None
    high, low, mass, scalar = into = empty_states(problem, precise) if into is None else into
    if shares_states(problem, precise):
        if of_tokens and natural is None:
            natural = unsort_rows(problem.points, problem.order)
        return _shared_states(problem, scale, parts, natural if of_tokens else None, into)
    piece = _width_of_pieces(width, 256)
    pieces = cdiv(width, piece)
    rows, rows_low = (parts.tokens, parts.tokens_low) if of_tokens else (parts.high, parts.low if precise else None)
    states_pass[(batch * slices * pieces,)](
        problem.points, problem.order, scale, problem.squares, rows, _or(rows_low, rows), parts.targets,
        _or(problem.lengths, problem.order), high, low, mass, scalar,
        batch, slices, count, targets, width, _rate(problem),
        C=tuning.chunk, KB=tuning.state_ranks, DB=piece, PIECES=pieces, TOKENS=of_tokens,
        HAS_LOW=rows_low is not None, PRECISE=precise, MIXED=ragged, RAGGED=ragged,
        ONE_LOOK=count <= 8 * tuning.chunk, STAGES=tuning.state_stages, num_warps=tuning.state_warps,
        maxnreg=tuning.state_registers,
    )  # fmt: skip
    return into


def state_bytes(problem: Problem, precise: bool) -> int:
    """How much memory the states of the tokens take."""
    batch, slices, count, _, width = problem.sizes
    return batch * slices * cdiv(count, tuning.chunk) * 2 * (width * (4 if precise else 2) + 8)


def _blocks(problem: Problem, kinds: int) -> Iterator[tuple[int, int]]:
    """Take samples in blocks whose states fit the memory set aside for them."""
    batch, slices, count, _, width = problem.sizes
    size = kinds * slices * cdiv(count, tuning.chunk) * 2 * width * 2
    together = max(8, tuning.state_bytes // size // 8 * 8)
    for start in range(0, batch, together):
        yield start, min(start + together, batch)


def _value_and_slope(problem: Problem, with_slope: bool) -> tuple[Tensor, Tensor]:
    scale = normaliser(problem)
    if cuda_ranks.fits(problem):
        return cuda_ranks.value_and_slope(problem, scale, with_slope)
    precise = precise_forward(problem)
    return forward_passes(problem, scale, halves(problem, precise), precise, with_slope)


def forward_passes(
    problem: Problem,
    scale: Tensor,
    parts: Halves,
    precise: bool,
    with_slope: bool,
    keep: States | None = None,
    natural: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Give S and its slope, with 1/Z and the halves at hand.

    The states of the tokens go to ``keep``, if given; ``natural`` are the projections in the order of the tokens.
    """
    batch, slices, count, targets, width = problem.sizes
    points, ragged = problem.points, problem.lengths is not None
    height = torch.empty_like(points)
    base, received = (torch.empty_like(points) if with_slope else height for _ in range(2))
    for start, stop in _blocks(problem, 4 if precise else 2):
        block, own = problem.samples(start, stop), parts.samples(start, stop)
        own_scale = scale[start:stop]
        kept = None if keep is None else keep.samples(start, stop)
        unsorted = None if natural is None else natural[start:stop]
        of_tokens = _states(block, own_scale, own, True, precise, kept, unsorted)
        of_targets = _states(block, own_scale, own, False, precise) if with_slope else of_tokens
        chunk_pass[((stop - start) * slices * cdiv(count, tuning.chunk),)](
            block.points, block.order, own_scale, block.squares, own.tokens, _or(own.tokens_low, own.tokens),
            own.high, own.low, own.targets, _or(block.lengths, block.order),
            of_tokens.high, of_tokens.low, of_tokens.mass, of_tokens.scalar,
            of_targets.high, of_targets.low, of_targets.scalar,
            height[start:stop], base[start:stop], received[start:stop], own.units,
            stop - start, slices, count, targets, width, _rate(problem),
            C=tuning.chunk, DB=tuning.chunk_width, EVEN=width % tuning.chunk_width == 0,
            HAS_LOW=own.tokens_low is not None, PRECISE=precise, MIXED=ragged, SLOPE=with_slope,
            HALVES=ragged or _ends_in_half(count), STAGES=tuning.chunk_stages,
            num_warps=tuning.chunk_warps, maxnreg=tuning.chunk_registers,
        )  # fmt: skip
    lengths = _or(problem.lengths, problem.order)
    if with_slope:
        ties_pass[(batch * slices, cdiv(count, tuning.chunk * tuning.tie_chunks))](
            points, problem.order, scale, problem.squares, parts.tokens, _or(parts.tokens_low, parts.tokens),
            parts.high, parts.low, parts.targets, lengths, height, base, parts.units,
            batch, slices, count, targets, width,
            C=tuning.chunk, G=tuning.tie_chunks, DB=64, HAS_LOW=parts.tokens_low is not None, MIXED=ragged,
            num_warps=1,
        )  # fmt: skip
    value = points.new_empty((batch, slices))
    slope = torch.empty_like(points) if with_slope else points.new_empty((batch, 0, 0))
    rows, tile = batch * slices, _scalar_tile(batch * slices, count)
    slope_pass[(cdiv(rows, tile["R"]),)](
        points, lengths, scale, height, base, received, value, slope if with_slope else value,
        rows, slices, count, _rate(problem), 1 / problem.tau, RAGGED=ragged, SLOPE=with_slope, **tile,
    )  # fmt: skip
    return value, slope


def precise_forward(problem: Problem) -> bool:
    """Whether value and slope need tokens in two parts."""
    # A single sample may be a reference being sorted softly, with its squared norms as a column: far from centred.
    return problem.lengths is not None or bool(tuning.precise) or precise_backward(problem)


def precise_backward(problem: Problem) -> bool:
    """Whether the gradient of the targets needs tokens in two parts."""
    # A single sample is how a reference is sorted softly: a value then, not only a gradient.
    batch, _, count, _, width = problem.sizes
    return batch == 1 or needs_both_parts(count, width)


def _targets_gradient(problem: Problem, grad: Tensor) -> Tensor:
    scale = normaliser(problem)
    if cuda_ranks.fits(problem):
        return cuda_ranks.targets_gradient(problem, grad, scale)
    precise = precise_backward(problem)
    return targets_passes(problem, scale, halves(problem, precise, with_targets=False), precise, grad)


def targets_passes(
    problem: Problem, scale: Tensor, parts: Halves, precise: bool, grad: Tensor, kept: States | None = None
) -> Tensor:
    """Give the gradient of the targets, with 1/Z, the halves and perhaps the states of the tokens at hand."""
    batch, slices, count, targets, width = problem.sizes
    ragged = problem.lengths is not None
    largest = torch.linalg.vector_norm(grad, torch.inf, dim=0)
    piece, more = (
        (_width_of_pieces(width, tuning.target_width), 0) if ragged else _two_widths(width, tuning.target_width)
    )
    pieces, chunks = cdiv(width, piece + more), cdiv(count, tuning.chunk)
    rows = targets if ragged else count
    programs = slices * pieces * (1 if ragged else chunks)
    blocks = list(_blocks(problem, 2 if precise else 1)) if kept is None else [(0, batch)]
    each, buffers = _partial_sums(blocks[0][1], programs, slices * rows * width * len(blocks))
    make = torch.zeros if ragged else torch.empty
    partial = make((buffers * len(blocks), slices, rows, width), dtype=torch.float32, device=grad.device)
    # Two parts take twice the shared memory, of which smaller GPUs have 99 KiB: fewer samples at once.
    together = tuning.target_samples // 2 if precise else tuning.target_samples
    used = 0
    for start, stop in blocks:
        block, own, own_scale = problem.samples(start, stop), parts.samples(start, stop), scale[start:stop]
        states = _states(block, own_scale, own, True, precise) if kept is None else kept.samples(start, stop)
        buffers = cdiv(stop - start, each)
        here = partial[used : used + buffers]
        used += buffers
        shared = {"C": tuning.chunk, "DB": piece, "PIECES": pieces, "PRECISE": precise}
        has_low, low = own.tokens_low is not None, _or(own.tokens_low, own.tokens)
        if ragged:
            ragged_targets_pass[(buffers * programs,)](
                block.points, block.order, own_scale, own.tokens, low, block.lengths, grad[start:stop], largest,
                states.high, states.low, states.mass, here,
                stop - start, slices, count, targets, width, _rate(problem), each,
                HAS_LOW=has_low, num_warps=tuning.target_warps, **shared,
            )  # fmt: skip
        else:
            targets_pass[(buffers * programs,)](
                block.points, block.order, own_scale, own.tokens, low, grad[start:stop], largest,
                states.high, states.low, states.mass, here,
                stop - start, slices, count, width, _rate(problem), each,
                MORE=more, EVEN=width % (piece + more) == 0, TOGETHER=together, HAS_LOW=has_low,
                HALVES=_ends_in_half(count), STAGES=tuning.target_stages, num_warps=tuning.target_warps,
                maxnreg=None if precise else tuning.target_registers, **shared,
            )  # fmt: skip
    return _collect(problem, grad, parts, partial[:used])


def _collect(problem: Problem, grad: Tensor, parts: Halves, partial: Tensor) -> Tensor:
    """Put partial sums over ranks (or, where lengths differ, over targets) together."""
    _, slices, count, targets, width = problem.sizes
    result = torch.empty_like(problem.targets, memory_format=torch.contiguous_format)
    collect_targets[(cdiv(targets, 4), slices)](
        partial, parts.units, result, slices, count, targets, width,
        partial.shape[0], terms_of(targets, count), ROWS=4, DB=128, RAGGED=problem.lengths is not None,
        num_warps=1,
    )  # fmt: skip
    return result


def _partial_sums(items: int, programs: int, numbers: int) -> tuple[int, int]:
    """How many items one program takes in turn, and how many buffers of so many numbers that makes."""
    buffers = min(items, max(1, PARTIAL_BYTES // (4 * numbers)), cdiv(ENOUGH_PROGRAMS, programs))
    return in_parts(items, buffers)


def _tokens_gradient(problem: Problem, grad: Tensor) -> tuple[Tensor, Tensor]:
    scale = normaliser(problem)
    if cuda_ranks.fits(problem):
        return cuda_ranks.tokens_gradient(problem, grad, scale)
    return tokens_passes(problem, scale, halves(problem, precise=False, with_tokens=False), grad)


def tokens_passes(problem: Problem, scale: Tensor, parts: Halves, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Give the gradients of the tokens and their squares, with 1/Z and the halves of the targets at hand."""
    batch, slices, count, targets, width = problem.sizes
    ragged = problem.lengths is not None
    piece = _width_of_pieces(width, 64)
    pieces = cdiv(width, piece)
    each, buffers = _partial_sums(slices, batch * pieces, batch * count * width)
    tokens = torch.zeros((buffers, batch, count, width), dtype=torch.float32, device=grad.device)
    squares = torch.zeros((buffers, batch, count), dtype=torch.float32, device=grad.device)
    tokens_pass[(buffers * batch * pieces,)](
        problem.points, problem.order, scale, parts.high, parts.low, parts.targets, _or(problem.lengths, problem.order),
        grad, tokens, squares, parts.units, batch, slices, count, targets, width, _rate(problem), each,
        C=16, DB=piece, GROUPS=pieces, MIXED=ragged, RAGGED=ragged, num_warps=1,
    )  # fmt: skip
    return tokens.sum(0), squares.sum(0)
