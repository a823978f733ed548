# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""First-order recurrences along an axis of a tile, in Triton: what the passes over scalars and the soft sort share."""

import triton
import triton.language as tl


@triton.jit
def _step(decay_left, value_left, decay_right, value_right):
    return decay_left * decay_right, value_left * decay_right + value_right


@triton.jit
def _latest(new_left, value_left, new_right, value_right):
    return new_left | new_right, tl.where(new_right != 0, value_right, value_left)


@triton.jit
def recurrence(decay, value, carry, axis: tl.constexpr, reverse: tl.constexpr):
    """Solve ``f_r = decay_r f_{r−1} + value_r`` along an axis, starting from a carry that broadcasts."""
    reach, inside = tl.associative_scan((decay, value), axis, _step, reverse=reverse)
    return inside + reach * carry


@triton.jit
def hold(new, value, carry, axis: tl.constexpr, reverse: tl.constexpr):
    """Give every place the value of the last place before it (or itself) that is new, and the carry before that."""
    seen, held = tl.associative_scan((new.to(tl.int32), value), axis, _latest, reverse=reverse)
    return tl.where(seen != 0, held, carry)


@triton.jit
def apart(decay, before, tied, carry, held, axis: tl.constexpr, reverse: tl.constexpr):
    """Sum over what lies strictly before each place, skipping what ties with it, and over all that lies before it.

    ``before`` is the value of the neighbour, ``carry`` and ``held`` are the two results at the place before the start.
    The recurrence runs on sums without the own value: subtracting it would cancel.
    """
    below = recurrence(decay, decay * before, carry, axis, reverse)
    return hold(~tied, below, held, axis, reverse), below
