"""LapSum's compiled loops over samples and slices, made of the steps in :mod:`cswe.ops.kernels.cpu_lapsum_steps`.

With Δ_k = T_k − T_{k+1}, and l_k and r_k the decayed sums of the points below and above threshold k, the operation is

    S = 1/n [ Σ_i ⟨v_i, T of the rank that v_i lies in⟩ + ½ Σ_k ⟨Δ_k, r_k − l_k⟩ ]

Nothing in it is a difference of running totals, which would lose digits.
"""

from typing import Any

import numpy as np

from cswe.ops.kernels.cpu_lapsum_steps import (
    POINT,
    THRESHOLD,
    Events,
    own_products,
    place_events,
    read_downwards,
    read_upwards,
    room_for_events,
    spread,
)
from cswe.ops.kernels.cpu_steps import Array, compiled, internal


@compiled
def fused(
    room: Array,
    tokens: Array,
    centre: Array,
    points: Array,
    order: Array,
    targets: Array,
    lengths: Array,
    samples: Array,
    slices: Array,
    value: Array,
    slope: Array,
) -> None:
    """Fill value ``(B, L)`` and slope ``(B, L, N)`` (if it is not empty) for some samples and slices.

    ``room`` ``(at least as many as samples + 1, max(N, K), W)`` is where the rows are made that the walks need.
    """
    ranks = targets.shape[1]
    with_slope = slope.shape[1] > 0
    differences = room[-1]
    events = room_for_events(tokens.shape[1], ranks, room)
    sums = np.empty((2, room.shape[2]), room.dtype)
    read = np.empty(len(events.kind), room.dtype)
    seen = np.empty(len(events.kind), np.float64)
    for i, b in enumerate(samples):
        _centre(tokens[b], centre, order[b, 0], lengths[b], room[i])
    for which in slices:
        _differences(targets[which], differences)
        for i, b in enumerate(samples):
            n = lengths[b]
            total = place_events(points[b, which], order[b, which], n, ranks, events)
            read_upwards(room[i], differences, total, events, sums, read)
            half = 0.0
            for m in range(total):
                seen[m] = events.below[m] * read[m]
                # ⟨Δ_k, r_k⟩, summed over the thresholds, is what the points see below themselves.
                half += seen[m] if events.kind[m] == POINT else -seen[m]
            value[b, which] = (own_products(room[i], targets[which], total, events) + half / 2) / n
            if with_slope:
                read_downwards(room[i], differences, total, events, sums, read)
                for m in range(total):
                    seen[m] += events.above[m] * read[m]
                _finish(n, total, events, seen, slope[b, which])


@internal
def _centre(tokens: Array, centre: Array, order: Array, n: int, rows: Array) -> None:
    """Fill the rows of the n tokens that exist, and zeros to the end of the row."""
    width = tokens.shape[1]
    for r in range(n):
        i = order[r]
        for c in range(width):
            rows[i, c] = tokens[i, c] - centre[c]
        for c in range(width, rows.shape[1]):
            rows[i, c] = 0


@internal
def _differences(targets: Array, rows: Array) -> None:
    """Fill Δ, one row less than there are targets, and zeros to the end of the row."""
    width = targets.shape[1]
    for k in range(targets.shape[0] - 1):
        for c in range(width):
            rows[k, c] = targets[k, c] - targets[k + 1, c]
        for c in range(width, rows.shape[1]):
            rows[k, c] = 0


@internal
def _finish(n: int, total: int, events: Events, seen: Array, slope: Array) -> None:
    """Fill the slope, with the thresholds' own movement in it: they follow the points so that their levels stay.

    ``seen`` is ⟨row, sum of the rows of the other kind⟩ over both sides; of it the thresholds' part is overwritten.
    """
    state = 0.0
    for m in range(total):
        if events.kind[m] == THRESHOLD:
            # ρ_k = ⟨Δ_k, Σ_i φ v_i⟩ / Σ_i φ; where the density underflows, nothing feels the threshold.
            seen[m] = seen[m] / 2 / events.density[m] if events.density[m] > 0 else 0.0
            state = events.behind[m] * state + seen[m]
        else:
            seen[m] = events.below[m] * state - seen[m]
    state = 0.0
    i = n
    for m in range(total - 1, -1, -1):
        if events.kind[m] == THRESHOLD:
            state = events.ahead[m] * state + seen[m]
        else:
            i -= 1
            slope[i] = (seen[m] + events.above[m] * state) / (2 * n)
    for r in range(n, slope.shape[0]):
        slope[r] = 0


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
    gradient: Array,
) -> None:
    """Add the targets' gradient ``(L, K, d)``: the ranks' shares of the tokens, times a weight per sample and slice.

    ``room`` ``(K, d)`` takes the gradient of Δ.
    """
    ranks = gradient.shape[1]
    events = room_for_events(tokens.shape[1], ranks, tokens)
    state = np.empty(tokens.shape[2], tokens.dtype)
    for which in slices:
        room[:] = 0
        for b in samples:
            n = lengths[b]
            total = place_events(points[b, which], order[b, which], n, ranks, events)
            weight = weights[b, which] / n
            k = 0
            for m in range(total):
                if events.kind[m] == THRESHOLD:
                    k += 1
                else:
                    _add_row(tokens[b], events.place[m], centre, weight, gradient[which], k)
            spread(tokens[b], centre, room, POINT, total, events, -weight / 2, state)
        for k in range(ranks - 1):
            for c in range(gradient.shape[2]):
                gradient[which, k, c] += room[k, c]
                gradient[which, k + 1, c] -= room[k, c]


@compiled
def sums_at_tokens(
    room: Array,
    points: Array,
    order: Array,
    targets: Array,
    weights: Array,
    lengths: Array,
    samples: Array,
    tokens: Array,
) -> None:
    """Fill gradients of some tokens ``(B, N, d)``: their shares of the weighted targets.

    ``room`` ``(K, d)`` takes Δ.
    """
    ranks = targets.shape[1]
    events = room_for_events(tokens.shape[1], ranks, tokens)
    state = np.empty(tokens.shape[2], tokens.dtype)
    origin = np.zeros(tokens.shape[2], tokens.dtype)
    for b in samples:
        tokens[b] = 0
    for which in range(points.shape[1]):
        _differences(targets[which], room)
        for b in samples:
            n = lengths[b]
            total = place_events(points[b, which], order[b, which], n, ranks, events)
            weight = weights[b, which] / n
            k = 0
            for m in range(total):
                if events.kind[m] == THRESHOLD:
                    k += 1
                else:
                    _add_row(targets[which], k, origin, weight, tokens[b], events.place[m])
            spread(room, origin, tokens[b], THRESHOLD, total, events, weight / 2, state)


@internal
def _add_row(source: Array, i: int, origin: Array, weight: Any, into: Array, j: int) -> None:
    scale = into.dtype.type(weight)
    for c in range(into.shape[1]):
        into[j, c] += scale * (source[i, c] - origin[c])
