r"""The steps of LapSum that numba compiles: where its thresholds lie among the points, and walks over both.

Points s and thresholds b are merged into one ascending list of *events*. A walk along it keeps one decayed sum of rows
per kind of event; at every event the sum of its own kind takes its row in, and the sum of the other kind is read:

    own ← a · own + row,      read = w · ⟨row, other⟩

with a and w the decays since the last event of its own and of the other kind. As in
:mod:`cswe.ops.kernels.cpu_steps`, two events are taken at a time so that the sums stay in registers.

No threshold is ever computed. Between the points s_j and s_{j+1} the equation that defines one is quadratic in its
decays x = exp(−(b − s_j)) and y = exp(−(s_{j+1} − b)), and those decays are all that is needed: no logarithm, one
exponential a point, and no digits lost by subtracting what is large. All of it is in float64.
"""

from typing import Any, NamedTuple

import numpy as np

from cswe.ops.kernels.cpu_steps import Array, inner_product, internal

POINT, THRESHOLD = 0, 1
"""The two kinds of events."""


class Events(NamedTuple):
    """Points and thresholds in ascending order; where they tie, the point comes first. One entry per event."""

    kind: Array
    place: Array
    """The row that the event stands for."""
    near: Array
    """Decay from the event before it."""
    density: Array
    """Σ_i exp(−|b − s_i|)/2 at a threshold b."""
    behind: Array
    """Decay from the last event of its own kind."""
    ahead: Array
    """Decay to the next event of its own kind."""
    below: Array
    """Decay from the last event of the other kind."""
    above: Array
    """Decay to the next event of the other kind."""
    gap: Array
    """Decay from the point before, one entry per point and one more."""
    from_above: Array
    """Σ exp(−(s_i − s_j)) over the points i ≥ j, one entry per point and one more."""


@internal
def room_for_events(points: int, ranks: int, like: Array) -> Events:
    """Make space for as many points and the thresholds between as many ranks."""
    total = points + ranks - 1
    return Events(
        np.empty(total, np.int64),
        np.empty(total, np.int64),
        np.empty(total, np.float64),
        np.empty(total, np.float64),
        np.empty(total, like.dtype),
        np.empty(total, like.dtype),
        np.empty(total, like.dtype),
        np.empty(total, like.dtype),
        np.empty(points + 1, np.float64),
        np.empty(points + 1, np.float64),
    )


@internal
def place_events(s: Array, rank: Array, n: int, ranks: int, events: Events) -> int:
    """Merge n points with the thresholds between the ranks, and say how many events there are."""
    _merge(s, rank, n, ranks, events)
    _fill_decays(n + ranks - 1, events)
    return n + ranks - 1


@internal
def _merge(s: Array, rank: Array, n: int, ranks: int, events: Events) -> None:
    kind, place, near, gap, from_above = events.kind, events.place, events.near, events.gap, events.from_above
    gap[0] = 0
    gap[n] = 0
    for i in range(1, n):
        gap[i] = np.exp(np.float64(s[i - 1]) - np.float64(s[i]))
    from_above[n] = 0
    for i in range(n - 1, -1, -1):
        from_above[i] = gap[i + 1] * from_above[i + 1] + 1
    m, j = 0, 0
    from_below = 0.0  # Σ exp(−(s_{j−1} − s_i)) over the j points passed
    x, y = 0.0, 0.0
    for k in range(1, ranks + 1):
        level = k * n / ranks
        after_threshold = k > 1
        while j < n:
            below_next = gap[j] * from_below + 1
            # The smoothed number of points below s_j. Above the last rank there is no threshold: all the rest passes.
            if k < ranks and j + 0.5 + (from_above[j] - below_next) / 2 > level:
                break
            kind[m] = POINT
            place[m] = rank[j]
            near[m] = y if after_threshold else gap[j]
            after_threshold = False
            from_below = below_next
            j += 1
            m += 1
        if k == ranks:
            return
        excess = (k * n - j * ranks) / ranks  # of integers: exactly 0 where it is 0
        root = np.sqrt(excess * excess + from_below * from_above[j] * gap[j])
        last_x, last_y = x, y
        # B y − A x = 2 excess and x y = gap, each solved for where nothing cancels.
        if excess > 0:
            y = min(1.0, (root + excess) / from_above[j])
            x = min(1.0, gap[j] / y)
        else:
            x = min(1.0, (root - excess) / from_below)
            y = min(1.0, gap[j] / x) if x > 0 else 0.0
        kind[m] = THRESHOLD
        place[m] = k - 1
        events.density[m] = root
        if not after_threshold:
            near[m] = x
        elif excess > 0:
            near[m] = last_y / y
        else:
            near[m] = x / last_x
        m += 1


@internal
def _fill_decays(total: int, events: Events) -> None:
    kind, near = events.kind, events.near
    # Below the working precision a decay is 0: it changes no sum, but would breed denormal numbers.
    smallest = 1e-300 if events.behind.itemsize == 8 else 1e-13
    point, threshold = 0.0, 0.0
    for m in range(total):
        point *= near[m]
        threshold *= near[m]
        own, other = (point, threshold) if kind[m] == POINT else (threshold, point)
        events.behind[m] = own if own >= smallest else 0
        events.below[m] = other if other >= smallest else 0
        if kind[m] == POINT:
            point = 1.0
        else:
            threshold = 1.0
    point, threshold = 0.0, 0.0
    for m in range(total - 1, -1, -1):
        own, other = (point, threshold) if kind[m] == POINT else (threshold, point)
        events.ahead[m] = own if own >= smallest else 0
        events.above[m] = other if other >= smallest else 0
        if kind[m] == POINT:
            point = 1.0
        else:
            threshold = 1.0
        point *= near[m]
        threshold *= near[m]


@internal
def read_upwards(points: Array, thresholds: Array, total: int, events: Events, sums: Array, read: Array) -> None:
    """Fill ⟨row, sum of the rows of the other kind below it⟩ of every event, with ``sums`` ``(2, W)`` to work in."""
    _walk((points, thresholds), events.kind, events.place, events.behind, 0, total, 1, sums, read)


@internal
def read_downwards(points: Array, thresholds: Array, total: int, events: Events, sums: Array, read: Array) -> None:
    """Fill ⟨row, sum of the rows of the other kind above it⟩ of every event."""
    _walk((points, thresholds), events.kind, events.place, events.ahead, total - 1, -1, -1, sums, read)


@internal
def _walk(
    rows: tuple[Array, Array],
    kind: Array,
    place: Array,
    decay: Array,
    start: int,
    stop: int,
    step: int,
    sums: Array,
    read: Array,
) -> None:
    sums[:] = 0
    m = start
    while m != stop:
        one, then = kind[m], m + step
        if then == stop:
            read[m] = inner_product(rows[one], place[m], sums, 1 - one)
            return
        if kind[then] == one:
            read[m], read[then] = _two_alike(rows[one], place[m], place[then], sums, one, decay[m], decay[then])
        else:
            read[m], read[then] = _two_different(
                rows[one], place[m], rows[1 - one], place[then], sums, one, decay[m], decay[then]
            )
        m += 2 * step


@internal
def _two_alike(rows: Array, i: int, j: int, sums: Array, one: int, a0: float, a1: float) -> tuple[Any, Any]:
    """Take two events of the same kind."""
    x, y = rows.dtype.type(0), rows.dtype.type(0)
    for c in range(sums.shape[1]):
        other = sums[1 - one, c]
        x += rows[i, c] * other
        y += rows[j, c] * other
        sums[one, c] = a1 * (a0 * sums[one, c] + rows[i, c]) + rows[j, c]
    return x, y


@internal
def _two_different(
    rows: Array, i: int, others: Array, j: int, sums: Array, one: int, a0: float, a1: float
) -> tuple[Any, Any]:
    """Take an event of each kind."""
    x, y = rows.dtype.type(0), rows.dtype.type(0)
    for c in range(sums.shape[1]):
        own = a0 * sums[one, c] + rows[i, c]
        other = sums[1 - one, c]
        x += rows[i, c] * other
        y += others[j, c] * own
        sums[one, c] = own
        sums[1 - one, c] = a1 * other + others[j, c]
    return x, y


@internal
def own_products(points: Array, targets: Array, total: int, events: Events) -> float:
    """Give Σ ⟨point, the target of the rank that it lies in⟩."""
    value = 0.0
    k = 0
    for m in range(total):
        if events.kind[m] == THRESHOLD:
            k += 1
        else:
            value += inner_product(targets, k, points, events.place[m])
    return value


@internal
def spread(
    source: Array, origin: Array, into: Array, source_kind: int, total: int, events: Events, weight: float, state: Array
) -> None:
    """Add weight · (sum of source − origin below it − the same above it) to every row of the other kind."""
    kind, place = events.kind, events.place
    state[:] = 0
    for m in range(total):
        if kind[m] == source_kind:
            _take_in(source, place[m], origin, events.behind[m], state)
        else:
            _give_out(state, weight * events.below[m], into, place[m])
    state[:] = 0
    for m in range(total - 1, -1, -1):
        if kind[m] == source_kind:
            _take_in(source, place[m], origin, events.ahead[m], state)
        else:
            _give_out(state, -weight * events.above[m], into, place[m])


@internal
def _take_in(source: Array, i: int, origin: Array, decay: float, state: Array) -> None:
    for c in range(state.shape[0]):
        state[c] = decay * state[c] + (source[i, c] - origin[c])


@internal
def _give_out(state: Array, weight: float, into: Array, i: int) -> None:
    scale = into.dtype.type(weight)
    for c in range(state.shape[0]):
        into[i, c] += scale * state[c]
