r"""The loops that numba compiles. numba is imported here and nowhere else.

All of them walk along sorted points with one decayed sum of rows per walk, left to right and back:

    e_r = a_r (e_{r−1} + w_{r−1}),      a_r = exp(−(s_r − s_{r−1})/τ)

e_r is what rank r sees of the ranks behind it, itself left out. Rows are contiguous, and four ranks are taken at a time
so that the sums stay in registers in between: that is where the speed comes from. Where points tie, two sums are
needed, with and without the tied ranks (the slope of |s_r − s_k| at 0 is 0); those ranks are taken one at a time.

Reassociation and contraction are all of "fast math" that is allowed: they vectorise the inner products and leave
comparisons, and with them the tie rules, as they are.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])
Array = np.ndarray[Any, Any]


def compiled(function: Function) -> Function:
    """Compile at the first call and keep the result on disk, where there is a place for it."""
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "reassoc", "nsz"}}
    try:
        return cast(Function, njit(function, cache=True, **options))
    except RuntimeError:  # nowhere to write: a read-only installation without a home
        return cast(Function, njit(function, **options))


@compiled
def fused(
    points: Array,
    order: Array,
    rows: Array,
    targets: Array,
    lengths: Array,
    samples: Array,
    slices: Array,
    tau: float,
    value: Array,
    slope: Array,
) -> None:
    """Fill value ``(B, L)`` and slope ``(B, L, N)`` (if it is not empty) for some samples and slices.

    ``rows`` are the augmented tokens ``(B, N, W)``: centred, then their square, then zeros. Samples of one length
    should follow one another: they share the coupled rows.
    """
    count, width = rows.shape[1], rows.shape[2]
    with_slope = slope.shape[1] > 0
    coupled = np.empty((count, width), rows.dtype)
    sums = np.empty((4, width), rows.dtype)  # of tokens and of targets; the same without ties
    decay = np.empty(count + 1, rows.dtype)
    tied = np.empty(count, np.bool_)
    scale = np.empty(count, rows.dtype)
    ones_signed = np.empty(count, rows.dtype)
    total = np.empty(count, rows.dtype)
    here = np.empty(count, rows.dtype)
    there = np.empty(count, rows.dtype)
    for l in slices:
        last = -1
        for b in samples:
            n = lengths[b]
            if n != last:
                _couple(targets[l], n, coupled)
                last = n
            s, rank, v = points[b, l], order[b, l], rows[b]
            _decays(s, n, tau, decay, tied)
            _ones(n, decay, s, scale, ones_signed)
            if with_slope:
                _walk_both_ways(s, rank, v, coupled, n, decay, tied, scale, sums, total, here, there)
                value[b, l] = _finish(s, n, tau, decay, scale, ones_signed, total, here, there, slope[b, l])
            else:
                value[b, l] = _walk_once(s, rank, v, coupled, n, decay, tied, scale, sums)


@compiled
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


@compiled
def uncouple(gradient: Array, n: int, into: Array) -> None:
    """Add the gradient of n ranks' rows T_r ``(n, d)`` to that of the targets ``(M, d)``: the way back."""
    count = into.shape[0]
    j = 0
    for r in range(n):
        low, high = r * count, (r + 1) * count
        while True:
            part = into.dtype.type((min(high, (j + 1) * n) - max(low, j * n)) / n)
            for k in range(into.shape[1]):
                into[j, k] += part * gradient[r, k]
            if (j + 1) * n >= high:
                break
            j += 1
        if (j + 1) * n == high:
            j += 1


@compiled
def _decays(s: Array, n: int, tau: float, decay: Array, tied: Array) -> None:
    """Fill a_0 = 0, a_1 … a_{n−1}, a_n = 0, and which ranks share their point with a neighbour."""
    # Below the working precision a decay is 0: it changes no sum, but would breed denormal numbers.
    smallest = 1e-300 if s.itemsize == 8 else 1e-13
    decay[0] = 0
    decay[n] = 0
    for r in range(n):
        tied[r] = False
    for r in range(1, n):
        far = np.exp((s[r] - s[r - 1]) * s.dtype.type(-1 / tau))
        decay[r] = far if far >= smallest else 0
        if s[r] == s[r - 1]:
            tied[r - 1] = True
            tied[r] = True


@compiled
def _signed(s: Array, n: int, decay: Array, w: Array, signed: Array) -> None:
    """Fill Σ_k sign(s_r − s_k) K_rk w_k."""
    near = w.dtype.type(0)
    apart = near
    for r in range(n):
        near *= decay[r]
        if r == 0 or s[r] != s[r - 1]:
            apart = near
        signed[r] = apart
        near += w[r]
    near = w.dtype.type(0)
    apart = near
    for r in range(n - 1, -1, -1):
        near *= decay[r + 1]
        if r == n - 1 or s[r] != s[r + 1]:
            apart = near
        signed[r] -= apart
        near += w[r]


@compiled
def _ones(n: int, decay: Array, s: Array, scale: Array, signed: Array) -> None:
    """Fill c_r = 1/Z_r, Z being the kernel's row sums, and the signed sums of ones."""
    near = scale.dtype.type(0)
    apart = near
    for r in range(n):
        near *= decay[r]
        if r == 0 or s[r] != s[r - 1]:
            apart = near
        signed[r] = apart
        near += 1
        scale[r] = near
    near = scale.dtype.type(0)
    apart = near
    for r in range(n - 1, -1, -1):
        near *= decay[r + 1]
        if r == n - 1 or s[r] != s[r + 1]:
            apart = near
        signed[r] -= apart
        scale[r] = 1 / (scale[r] + near)
        near += 1


@compiled
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
            seen, sent = _four(
                v, rank[r], rank[r + 1], rank[r + 2], rank[r + 3], t, r, 1, sums,
                decay[r], decay[r + 1], decay[r + 2], decay[r + 3],
                scale[r], scale[r + 1], scale[r + 2], scale[r + 3],
            )  # fmt: skip
            for i in range(4):
                here[r + i] = seen[i]
                there[r + i] = sent[i]
                total[r + i] = seen[i]
            r += 4
        else:
            first = r == 0 or s[r] != s[r - 1]
            here[r], total[r], there[r], _ = _one(v, rank[r], t, r, sums, decay[r], scale[r], first)
            r += 1
    sums[:] = 0
    r = n - 1
    while r >= 0:
        if r >= 3 and not (tied[r] or tied[r - 1] or tied[r - 2] or tied[r - 3]):
            seen, sent = _four(
                v, rank[r], rank[r - 1], rank[r - 2], rank[r - 3], t, r, -1, sums,
                decay[r + 1], decay[r], decay[r - 1], decay[r - 2],
                scale[r], scale[r - 1], scale[r - 2], scale[r - 3],
            )  # fmt: skip
            for i in range(4):
                here[r - i] -= seen[i]
                there[r - i] -= sent[i]
                total[r - i] += seen[i]
            r -= 4
        else:
            first = r == n - 1 or s[r] != s[r + 1]
            apart, near, sent_apart, _ = _one(v, rank[r], t, r, sums, decay[r + 1], scale[r], first)
            here[r] -= apart
            there[r] -= sent_apart
            total[r] += near
            r -= 1
    for r in range(n):
        total[r] += _inner(v, rank[r], t, r)


@compiled
def _walk_once(
    s: Array, rank: Array, v: Array, t: Array, n: int, decay: Array, tied: Array, scale: Array, sums: Array
) -> float:
    """Give S alone. What rank r sees on its right is what those ranks are sent from their left: one walk is enough."""
    sums[:] = 0
    value = v.dtype.type(0)
    r = 0
    while r < n:
        if r + 3 < n and not (tied[r] or tied[r + 1] or tied[r + 2] or tied[r + 3]):
            seen, sent = _four(
                v, rank[r], rank[r + 1], rank[r + 2], rank[r + 3], t, r, 1, sums,
                decay[r], decay[r + 1], decay[r + 2], decay[r + 3],
                scale[r], scale[r + 1], scale[r + 2], scale[r + 3],
            )  # fmt: skip
            for i in range(4):
                value += scale[r + i] * (seen[i] + _inner(v, rank[r + i], t, r + i)) + sent[i]
            r += 4
        else:
            first = r == 0 or s[r] != s[r - 1]
            _, near, _, sent_near = _one(v, rank[r], t, r, sums, decay[r], scale[r], first)
            value += scale[r] * (near + _inner(v, rank[r], t, r)) + sent_near
            r += 1
    return value


@compiled
def _four(
    v: Array, i0: int, i1: int, i2: int, i3: int, t: Array, r: int, step: int, sums: Array,
    a0: float, a1: float, a2: float, a3: float, c0: float, c1: float, c2: float, c3: float,
) -> tuple[tuple[float, float, float, float], tuple[float, float, float, float]]:  # fmt: skip
    """Take four ranks that tie with nothing: ⟨T, tokens behind⟩ and ⟨v, c T behind⟩ of each."""
    zero = v.dtype.type(0)
    x0, x1, x2, x3 = zero, zero, zero, zero
    y0, y1, y2, y3 = zero, zero, zero, zero
    r1, r2, r3 = r + step, r + 2 * step, r + 3 * step
    for k in range(v.shape[1]):
        e = a0 * sums[0, k]
        g = a0 * sums[1, k]
        x0 += t[r, k] * e
        y0 += v[i0, k] * g
        e = a1 * (e + v[i0, k])
        g = a1 * (g + c0 * t[r, k])
        x1 += t[r1, k] * e
        y1 += v[i1, k] * g
        e = a2 * (e + v[i1, k])
        g = a2 * (g + c1 * t[r1, k])
        x2 += t[r2, k] * e
        y2 += v[i2, k] * g
        e = a3 * (e + v[i2, k])
        g = a3 * (g + c2 * t[r2, k])
        x3 += t[r3, k] * e
        y3 += v[i3, k] * g
        sums[0, k] = e + v[i3, k]
        sums[1, k] = g + c3 * t[r3, k]
    return (x0, x1, x2, x3), (y0, y1, y2, y3)


@compiled
def _one(
    v: Array, i: int, t: Array, r: int, sums: Array, a: float, c: float, first: bool
) -> tuple[float, float, float, float]:
    """Take one rank: ⟨T, tokens behind⟩ without and with ties, then ⟨v, c T behind⟩ without and with ties."""
    zero = v.dtype.type(0)
    if first:  # nothing behind it ties with it
        for k in range(v.shape[1]):
            sums[2, k] = a * sums[0, k]
            sums[3, k] = a * sums[1, k]
    apart, near, sent_apart, sent_near = zero, zero, zero, zero
    for k in range(v.shape[1]):
        e = a * sums[0, k]
        g = a * sums[1, k]
        near += t[r, k] * e
        apart += t[r, k] * sums[2, k]
        sent_near += v[i, k] * g
        sent_apart += v[i, k] * sums[3, k]
        sums[0, k] = e + v[i, k]
        sums[1, k] = g + c * t[r, k]
    return apart, near, sent_apart, sent_near


@compiled
def _inner(v: Array, i: int, t: Array, r: int) -> float:
    total = v.dtype.type(0)
    for k in range(v.shape[1]):
        total += v[i, k] * t[r, k]
    return total


@compiled
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
) -> float:
    """Give S, and its slope with the normaliser's own derivative in it: without that it is wrong by a factor."""
    value = total.dtype.type(0)
    for r in range(n):
        seen = scale[r] * total[r]
        value += seen
        total[r] = -scale[r] * seen  # h_r
    _signed(s, n, decay, total, slope)
    factor = slope.dtype.type(-1 / tau)
    for r in range(n):
        slope[r] = factor * (scale[r] * here[r] + there[r] + total[r] * ones_signed[r] + slope[r])
    for r in range(n, slope.shape[0]):
        slope[r] = 0
    return value


@compiled
def sums_at_ranks(
    points: Array,
    order: Array,
    rows: Array,
    weights: Array,
    lengths: Array,
    samples: Array,
    slices: Array,
    tau: float,
    gradient: Array,
) -> None:
    """Add the targets' gradient ``(L, M, d)``: kernel sums of the tokens, over Z, times a weight per sample and slice.

    Samples of one length should follow one another: they are added up before they are spread over the targets.
    """
    count, width = rows.shape[1], gradient.shape[2]
    received = np.zeros((len(slices), count, width), rows.dtype)
    state = np.empty(width, rows.dtype)
    decay = np.empty(count + 1, rows.dtype)
    tied = np.empty(count, np.bool_)
    scale = np.empty(count, rows.dtype)
    unused = np.empty(count, rows.dtype)
    ones = np.ones(count, rows.dtype)
    ranks = np.arange(count)
    last = -1
    for b in samples:
        n = lengths[b]
        if n != last and last >= 0:
            for i in range(len(slices)):
                uncouple(received[i], last, gradient[slices[i]])
            received[:] = 0
        last = n
        for i in range(len(slices)):
            l = slices[i]
            _decays(points[b, l], n, tau, decay, tied)
            _ones(n, decay, points[b, l], scale, unused)
            for r in range(n):
                scale[r] *= weights[b, l]
            kernel_sums(rows[b], order[b, l], ones, received[i], ranks, scale, n, decay, state)
    for i in range(len(slices)):
        uncouple(received[i], last, gradient[slices[i]])


@compiled
def sums_at_tokens(
    points: Array,
    order: Array,
    targets: Array,
    weights: Array,
    lengths: Array,
    samples: Array,
    tau: float,
    gradient: Array,
) -> None:
    """Add the gradient of the augmented tokens ``(B, N, W)``: kernel sums of the weighted rows T over Z."""
    count, width = gradient.shape[1], gradient.shape[2]
    coupled = np.empty((count, width), gradient.dtype)
    state = np.empty(width, gradient.dtype)
    decay = np.empty(count + 1, gradient.dtype)
    tied = np.empty(count, np.bool_)
    scale = np.empty(count, gradient.dtype)
    unused = np.empty(count, gradient.dtype)
    ones = np.ones(count, gradient.dtype)
    ranks = np.arange(count)
    for l in range(points.shape[1]):
        last = -1
        for b in samples:
            n = lengths[b]
            if n != last:
                _couple(targets[l], n, coupled)
                last = n
            _decays(points[b, l], n, tau, decay, tied)
            _ones(n, decay, points[b, l], scale, unused)
            for r in range(n):
                scale[r] *= weights[b, l]
            kernel_sums(coupled, ranks, scale, gradient[b], order[b, l], ones, n, decay, state)


@compiled
def kernel_sums(
    source: Array, read: Array, u: Array, into: Array, write: Array, w: Array, n: int, decay: Array, state: Array
) -> None:
    """Add w_r Σ_k K_rk u_k source[read_k] to into[write_r]."""
    state[:] = 0
    r = 0
    while r + 3 < n:
        _four_right(
            source, read[r], read[r + 1], read[r + 2], read[r + 3], u[r], u[r + 1], u[r + 2], u[r + 3],
            into, write[r], write[r + 1], write[r + 2], write[r + 3], w[r], w[r + 1], w[r + 2], w[r + 3],
            decay[r], decay[r + 1], decay[r + 2], decay[r + 3], state,
        )  # fmt: skip
        r += 4
    while r < n:
        i, j = read[r], write[r]
        for k in range(state.shape[0]):
            state[k] = decay[r] * state[k] + u[r] * source[i, k]
            into[j, k] += w[r] * state[k]
        r += 1
    state[:] = 0
    r = n - 1
    while r >= 3:
        _four_left(
            source, read[r], read[r - 1], read[r - 2], read[r - 3], u[r], u[r - 1], u[r - 2], u[r - 3],
            into, write[r], write[r - 1], write[r - 2], write[r - 3], w[r], w[r - 1], w[r - 2], w[r - 3],
            decay[r + 1], decay[r], decay[r - 1], decay[r - 2], state,
        )  # fmt: skip
        r -= 4
    while r >= 0:
        i, j = read[r], write[r]
        for k in range(state.shape[0]):
            e = decay[r + 1] * state[k]
            into[j, k] += w[r] * e
            state[k] = e + u[r] * source[i, k]
        r -= 1


@compiled
def _four_right(
    source: Array, i0: int, i1: int, i2: int, i3: int, u0: float, u1: float, u2: float, u3: float,
    into: Array, j0: int, j1: int, j2: int, j3: int, w0: float, w1: float, w2: float, w3: float,
    a0: float, a1: float, a2: float, a3: float, state: Array,
) -> None:  # fmt: skip
    for k in range(state.shape[0]):
        e = a0 * state[k] + u0 * source[i0, k]
        into[j0, k] += w0 * e
        e = a1 * e + u1 * source[i1, k]
        into[j1, k] += w1 * e
        e = a2 * e + u2 * source[i2, k]
        into[j2, k] += w2 * e
        e = a3 * e + u3 * source[i3, k]
        into[j3, k] += w3 * e
        state[k] = e


@compiled
def _four_left(
    source: Array, i0: int, i1: int, i2: int, i3: int, u0: float, u1: float, u2: float, u3: float,
    into: Array, j0: int, j1: int, j2: int, j3: int, w0: float, w1: float, w2: float, w3: float,
    a0: float, a1: float, a2: float, a3: float, state: Array,
) -> None:  # fmt: skip
    for k in range(state.shape[0]):
        e = a0 * state[k]
        into[j0, k] += w0 * e
        e = a1 * (e + u0 * source[i0, k])
        into[j1, k] += w1 * e
        e = a2 * (e + u1 * source[i1, k])
        into[j2, k] += w2 * e
        e = a3 * (e + u2 * source[i2, k])
        into[j3, k] += w3 * e
        state[k] = e + u3 * source[i3, k]
