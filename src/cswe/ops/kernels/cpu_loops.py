"""The compiled loops over samples and slices, made of the steps in :mod:`cswe.ops.kernels.cpu_steps`."""

from typing import Any

import numpy as np

from cswe.ops.kernels.cpu_steps import (
    Array,
    compiled,
    decays,
    four_ranks,
    inner_product,
    internal,
    kernel_sums,
    normaliser,
    one_rank,
    signed_sums,
)


@compiled
def fused(
    room: Array,
    tokens: Array,
    squares: Array,
    centre: Array,
    points: Array,
    order: Array,
    targets: Array,
    lengths: Array,
    samples: Array,
    slices: Array,
    tau: float,
    value: Array,
    slope: Array,
) -> None:
    """Fill value ``(B, L)`` and slope ``(B, L, N)`` (if it is not empty) for some samples and slices.

    ``room`` ``(at least as many as samples + 1, N, W)`` is where the rows are made that the walks need. Samples of one
    length should follow one another: they share the coupled rows.
    """
    count = tokens.shape[1]
    with_slope = slope.shape[1] > 0
    coupled = room[-1]
    sums = np.empty((4, room.shape[2]), room.dtype)  # of tokens and of targets; the same without ties
    decay = np.empty(count + 1, room.dtype)
    tied = np.empty(count, np.bool_)
    scale = np.empty(count, room.dtype)
    ones_signed = np.empty(count, room.dtype)
    total = np.empty(count, room.dtype)
    here = np.empty(count, room.dtype)
    there = np.empty(count, room.dtype)
    for i, b in enumerate(samples):
        _augment(tokens[b], squares[b], centre, order[b, 0], lengths[b], room[i])
    for which in slices:
        last = -1
        for i, b in enumerate(samples):
            n = lengths[b]
            if n != last:
                _couple(targets[which], n, coupled)
                last = n
            s, rank, v = points[b, which], order[b, which], room[i]
            decays(s, n, tau, decay, tied)
            normaliser(n, decay, s, scale, ones_signed)
            if with_slope:
                _walk_both_ways(s, rank, v, coupled, n, decay, tied, scale, sums, total, here, there)
                value[b, which] = _finish(s, n, tau, decay, scale, ones_signed, total, here, there, slope[b, which])
            else:
                value[b, which] = _walk_once(s, rank, v, coupled, n, decay, tied, scale, sums)


@internal
def _augment(tokens: Array, squares: Array, centre: Array, order: Array, n: int, rows: Array) -> None:
    """Fill the rows of the n tokens that exist: centred, then the square, then zeros to the end of the row."""
    width = tokens.shape[1]
    for r in range(n):
        i = order[r]
        for k in range(width):
            rows[i, k] = tokens[i, k] - centre[k]
        for k in range(width, rows.shape[1]):
            rows[i, k] = 0
        rows[i, width] = squares[i]


@internal
def _couple(targets: Array, n: int, coupled: Array) -> None:
    """Fill the rows that n equal ranks are coupled with: −2 T_r, and the rank's mass in the column of the squares.

    In units of 1/(n M) of the mass all edges are integers: no overlap is a rounding artefact.
    """
    count, width = targets.shape
    j = 0
    for r in range(n):
        low, high = r * count, (r + 1) * count
        for k in range(width, coupled.shape[1]):
            coupled[r, k] = 0
        coupled[r, width] = 1 / n
        part = coupled.dtype.type(-2 * (min(high, (j + 1) * n) - low) / n)
        for k in range(width):
            coupled[r, k] = part * targets[j, k]
        while (j + 1) * n < high:
            j += 1
            part = coupled.dtype.type(-2 * (min(high, (j + 1) * n) - j * n) / n)
            for k in range(width):
                coupled[r, k] += part * targets[j, k]
        if (j + 1) * n == high:
            j += 1


@internal
def _walk_both_ways(
    s: Array,
    rank: Array,
    v: Array,
    t: Array,
    n: int,
    decay: Array,
    tied: Array,
    scale: Array,
    sums: Array,
    total: Array,
    here: Array,
    there: Array,
) -> None:
    """Fill t_r, A_r − B_r and E_r − F_r of the fused pass."""
    sums[:] = 0
    r = 0
    while r < n:
        if r + 3 < n and not (tied[r] or tied[r + 1] or tied[r + 2] or tied[r + 3]):
            seen, sent, own = four_ranks(
                v, rank[r], rank[r + 1], rank[r + 2], rank[r + 3], t, r, 1, sums,
                decay[r], decay[r + 1], decay[r + 2], decay[r + 3],
                scale[r], scale[r + 1], scale[r + 2], scale[r + 3], True,
            )  # fmt: skip
            for i in range(4):
                here[r + i] = seen[i]
                there[r + i] = sent[i]
                total[r + i] = seen[i] + own[i]
            r += 4
        else:
            first = r == 0 or s[r] != s[r - 1]
            here[r], near, there[r], _ = one_rank(v, rank[r], t, r, sums, decay[r], scale[r], first)
            total[r] = near + inner_product(v, rank[r], t, r)
            r += 1
    sums[:] = 0
    r = n - 1
    while r >= 0:
        if r >= 3 and not (tied[r] or tied[r - 1] or tied[r - 2] or tied[r - 3]):
            seen, sent, _ = four_ranks(
                v, rank[r], rank[r - 1], rank[r - 2], rank[r - 3], t, r, -1, sums,
                decay[r + 1], decay[r], decay[r - 1], decay[r - 2],
                scale[r], scale[r - 1], scale[r - 2], scale[r - 3], False,
            )  # fmt: skip
            for i in range(4):
                here[r - i] -= seen[i]
                there[r - i] -= sent[i]
                total[r - i] += seen[i]
            r -= 4
        else:
            first = r == n - 1 or s[r] != s[r + 1]
            apart, near, sent_apart, _ = one_rank(v, rank[r], t, r, sums, decay[r + 1], scale[r], first)
            here[r] -= apart
            there[r] -= sent_apart
            total[r] += near
            r -= 1


@internal
def _walk_once(
    s: Array, rank: Array, v: Array, t: Array, n: int, decay: Array, tied: Array, scale: Array, sums: Array
) -> Any:
    """Give S alone. What rank r sees on its right is what those ranks are sent from their left: one walk is enough."""
    sums[:] = 0
    value = v.dtype.type(0)
    r = 0
    while r < n:
        if r + 3 < n and not (tied[r] or tied[r + 1] or tied[r + 2] or tied[r + 3]):
            seen, sent, own = four_ranks(
                v, rank[r], rank[r + 1], rank[r + 2], rank[r + 3], t, r, 1, sums,
                decay[r], decay[r + 1], decay[r + 2], decay[r + 3],
                scale[r], scale[r + 1], scale[r + 2], scale[r + 3], True,
            )  # fmt: skip
            for i in range(4):
                value += scale[r + i] * (seen[i] + own[i]) + sent[i]
            r += 4
        else:
            first = r == 0 or s[r] != s[r - 1]
            _, near, _, sent_near = one_rank(v, rank[r], t, r, sums, decay[r], scale[r], first)
            value += scale[r] * (near + inner_product(v, rank[r], t, r)) + sent_near
            r += 1
    return value


@internal
def _finish(
    s: Array,
    n: int,
    tau: float,
    decay: Array,
    scale: Array,
    ones_signed: Array,
    total: Array,
    here: Array,
    there: Array,
    slope: Array,
) -> Any:
    """Give S, and its slope with the normaliser's own derivative in it: without that it is wrong by a factor."""
    value = total.dtype.type(0)
    for r in range(n):
        seen = scale[r] * total[r]
        value += seen
        total[r] = -scale[r] * seen  # h_r
    signed_sums(s, n, decay, total, slope)
    factor = slope.dtype.type(-1 / tau)
    for r in range(n):
        slope[r] = factor * (scale[r] * here[r] + there[r] + total[r] * ones_signed[r] + slope[r])
    for r in range(n, slope.shape[0]):
        slope[r] = 0
    return value


@compiled
def sums_at_ranks(
    room: Array,
    tokens: Array,
    centre: Array,
    points: Array,
    order: Array,
    weights: Array,
    lengths: Array,
    samples: Array,
    slices: Array,
    tau: float,
    gradient: Array,
) -> None:
    """Add the targets' gradient ``(L, M, d)``: kernel sums of the tokens, over Z, times a weight per sample and slice.

    Where there are as many ranks as targets they are added in place. Else samples of one length should follow one
    another: they are added up in ``room``, ``(at least as many as slices, N, d)``, before they spread over the targets.
    """
    count, width = tokens.shape[1], tokens.shape[2]
    state = np.empty(width, tokens.dtype)
    decay = np.empty(count + 1, tokens.dtype)
    tied = np.empty(count, np.bool_)
    scale = np.empty(count, tokens.dtype)
    unused = np.empty(count, tokens.dtype)
    ones = np.ones(count, tokens.dtype)
    ranks = np.arange(count)
    last = gradient.shape[1]
    for b in samples:
        n = lengths[b]
        in_place = n == gradient.shape[1]
        if n != last:
            if last != gradient.shape[1]:
                _uncouple(room, last, slices, gradient)
            room[: len(slices)] = 0
            last = n
        for i, which in enumerate(slices):
            decays(points[b, which], n, tau, decay, tied)
            normaliser(n, decay, points[b, which], scale, unused)
            for r in range(n):
                scale[r] *= weights[b, which]
            into = gradient[which] if in_place else room[i]
            kernel_sums(tokens[b], centre, order[b, which], ones, into, ranks, scale, n, decay, state)
    if last != gradient.shape[1]:
        _uncouple(room, last, slices, gradient)


@internal
def _uncouple(received: Array, n: int, slices: Array, gradient: Array) -> None:
    """Add the gradient of n ranks' rows T_r to that of the targets: the way back of the coupling."""
    count = gradient.shape[1]
    for i, which in enumerate(slices):
        j = 0
        for r in range(n):
            low, high = r * count, (r + 1) * count
            while True:
                part = gradient.dtype.type((min(high, (j + 1) * n) - max(low, j * n)) / n)
                for k in range(gradient.shape[2]):
                    gradient[which, j, k] += part * received[i, r, k]
                if (j + 1) * n >= high:
                    break
                j += 1
            if (j + 1) * n == high:
                j += 1


@compiled
def sums_at_tokens(
    room: Array,
    points: Array,
    order: Array,
    targets: Array,
    weights: Array,
    lengths: Array,
    samples: Array,
    tau: float,
    tokens: Array,
    squares: Array,
) -> None:
    """Fill gradients of some tokens ``(B, N, d)`` and squares ``(B, N)``: kernel sums of the weighted rows T over Z.

    ``room`` is ``(at least as many as samples + 1, N, W)``.
    """
    count, width = tokens.shape[1], tokens.shape[2]
    coupled = room[-1]
    state = np.empty(room.shape[2], room.dtype)
    origin = np.zeros(room.shape[2], room.dtype)
    decay = np.empty(count + 1, room.dtype)
    tied = np.empty(count, np.bool_)
    scale = np.empty(count, room.dtype)
    unused = np.empty(count, room.dtype)
    ones = np.ones(count, room.dtype)
    ranks = np.arange(count)
    room[: len(samples)] = 0
    for which in range(points.shape[1]):
        last = -1
        for i, b in enumerate(samples):
            n = lengths[b]
            if n != last:
                _couple(targets[which], n, coupled)
                last = n
            decays(points[b, which], n, tau, decay, tied)
            normaliser(n, decay, points[b, which], scale, unused)
            for r in range(n):
                scale[r] *= weights[b, which]
            kernel_sums(coupled, origin, ranks, scale, room[i], order[b, which], ones, n, decay, state)
    for i, b in enumerate(samples):
        for r in range(count):
            for k in range(width):
                tokens[b, r, k] = room[i, r, k]
            squares[b, r] = room[i, r, width]
