r"""The loops that numba compiles. numba is imported here and nowhere else.

All of them walk along sorted points with one decayed sum of rows per walk, left to right and back:

    e_r = a_r (e_{r−1} + w_{r−1}),      a_r = exp(−(s_r − s_{r−1})/τ)

e_r is what rank r sees of the ranks behind it, itself left out. Rows are contiguous, and four ranks are taken at a time
so that the sums stay in registers in between: that is where the speed comes from. Where points tie, two sums are
needed, with and without the tied ranks (the slope of |s_r − s_k| at 0 is 0); those ranks are taken one at a time.

Reassociation and contraction are all of "fast math" that is allowed: they vectorise the inner products and leave
comparisons, and with them the tie rules, as they are.

numba keeps what it has compiled by the file of the loop that calls it: after a change to a file of steps, remove
``__pycache__/*.nb*`` beside it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])
Array = np.ndarray[Any, Any]
Four = tuple[float, float, float, float]


def compiled(function: Function) -> Function:
    """Compile at the first call and keep the result on disk, where there is a place for it."""
    try:
        return cast(Function, _compile(function, cache=True))
    except RuntimeError:  # nowhere to write: a read-only installation without a home
        return cast(Function, _compile(function))


def internal(function: Function) -> Function:
    """Compile as a part of those that call it: not to be called from Python, and not kept by itself.

    Inlined always. Called, it would be there twice in the process that compiles it, by itself and in its caller's
    module, summed in two orders: that process would then run the one, and all that load the caller from disk the other.
    """
    return cast(Function, _compile(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True))


_compile = partial(njit, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})


@internal
def decays(s: Array, n: int, tau: float, decay: Array, tied: Array) -> None:
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


@internal
def signed_sums(s: Array, n: int, decay: Array, w: Array, signed: Array) -> None:
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


@internal
def normaliser(n: int, decay: Array, s: Array, scale: Array, signed: Array) -> None:
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


@internal
def four_ranks(
    v: Array, i0: int, i1: int, i2: int, i3: int, t: Array, r: int, step: int, sums: Array,
    a0: float, a1: float, a2: float, a3: float, c0: float, c1: float, c2: float, c3: float, own: bool,
) -> tuple[Four, Four, Four]:  # fmt: skip
    """Take four ranks that tie with nothing: ⟨T, tokens behind⟩, ⟨v, c T behind⟩ and, if asked for, ⟨T, v⟩ of each."""
    zero = v.dtype.type(0)
    z0, z1, z2, z3 = zero, zero, zero, zero
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
        if own:
            z0 += v[i0, k] * t[r, k]
            z1 += v[i1, k] * t[r1, k]
            z2 += v[i2, k] * t[r2, k]
            z3 += v[i3, k] * t[r3, k]
    return (x0, x1, x2, x3), (y0, y1, y2, y3), (z0, z1, z2, z3)


@internal
def one_rank(
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


@internal
def inner_product(v: Array, i: int, t: Array, r: int) -> Any:
    """Give ⟨T_r, v_i⟩."""
    total = v.dtype.type(0)
    for k in range(v.shape[1]):
        total += v[i, k] * t[r, k]
    return total


@internal
def kernel_sums(
    source: Array,
    origin: Array,
    read: Array,
    u: Array,
    into: Array,
    write: Array,
    w: Array,
    n: int,
    decay: Array,
    state: Array,
) -> None:
    """Add w_r Σ_k K_rk u_k (source[read_k] − origin) to into[write_r], which must be different rows."""
    state[:] = 0
    for r in range(0, n - 1, 2):
        _two_right(
            source, origin, read[r], read[r + 1], u[r], u[r + 1],
            into, write[r], write[r + 1], w[r], w[r + 1], decay[r], decay[r + 1], state,
        )  # fmt: skip
    if n % 2:
        r, i, j = n - 1, read[n - 1], write[n - 1]
        for k in range(state.shape[0]):
            into[j, k] += w[r] * (decay[r] * state[k] + u[r] * (source[i, k] - origin[k]))
    state[:] = 0
    for r in range(n - 1, 0, -2):
        _two_left(
            source, origin, read[r], read[r - 1], u[r], u[r - 1],
            into, write[r], write[r - 1], w[r], w[r - 1], decay[r + 1], decay[r], state,
        )  # fmt: skip
    if n % 2:
        for k in range(state.shape[0]):
            into[write[0], k] += w[0] * decay[1] * state[k]


@internal
def _two_right(
    source: Array, origin: Array, i0: int, i1: int, u0: float, u1: float,
    into: Array, j0: int, j1: int, w0: float, w1: float, a0: float, a1: float, state: Array,
) -> None:  # fmt: skip
    for k in range(state.shape[0]):
        e = a0 * state[k] + u0 * (source[i0, k] - origin[k])
        into[j0, k] += w0 * e
        e = a1 * e + u1 * (source[i1, k] - origin[k])
        into[j1, k] += w1 * e
        state[k] = e


@internal
def _two_left(
    source: Array, origin: Array, i0: int, i1: int, u0: float, u1: float,
    into: Array, j0: int, j1: int, w0: float, w1: float, a0: float, a1: float, state: Array,
) -> None:  # fmt: skip
    for k in range(state.shape[0]):
        e = a0 * state[k]
        into[j0, k] += w0 * e
        e = a1 * (e + u0 * (source[i0, k] - origin[k]))
        into[j1, k] += w1 * e
        state[k] = e + u1 * (source[i1, k] - origin[k])
