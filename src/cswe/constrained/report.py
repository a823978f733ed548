"""Words for a reader: the summary of a multiplier, and the warning when its bound looks out of reach."""

from torch import Tensor

from cswe.constrained.bound import Fraction
from cswe.constrained.multiplier import Multiplier


def summary(multiplier: Multiplier) -> str:
    """Return a few lines on one constraint: means over its values, with the extremes where they differ."""
    name, state = multiplier.constraint.name, multiplier.state
    if state is None:
        return f"{name}: not seen yet"
    size = len(state.values)
    plural = "value" if size == 1 else "values"
    bound = multiplier.bound(state)
    rows = {"value": state.values, "bound": bound, "slack": state.slack, "dual": state.dual}
    if not multiplier.has_slack:
        del rows["slack"]
    given = multiplier.constraint.bound
    if bound is None and isinstance(given, Fraction):
        status = f"measuring its level, {state.level_batches} of {given.batches} batches"
    else:
        above = 0 if bound is None else int((state.values > bound + state.slack + _rounding(bound)).sum())
        status = f"{above} above bound" + (" + slack" if multiplier.has_slack else "")
    lines = [f"{name}: {size} {plural}, {status}"]
    lines += [f"    {row:<6} {_numbers(values)}" for row, values in rows.items() if values is not None]
    return "\n".join(lines)


def warning(multiplier: Multiplier, stuck: list[int]) -> str:
    """Return what to say about the values whose multipliers grow without effect."""
    name, state = multiplier.constraint.name, multiplier.state
    which = ", ".join(map(str, stuck[:5])) + (", ..." if len(stuck) > 5 else "")
    detail = ""
    if state is not None and (bound := multiplier.bound(state)) is not None:
        i = stuck[0]
        detail = f" (index {i}: {state.values[i]:.4g} above {bound[i]:.4g}, multiplier {state.dual[i]:.4g})"
    return (
        f"the bound of constraint {name!r} may be out of reach: over {multiplier.patience} steps the multipliers "
        f"of {len(stuck)} of its values (index {which}) only rose and the violation did not shrink{detail}. "
        "Give it slack (slack_weight), a larger bound, or, if the multiplier is still small, a larger lr"
    )


def _numbers(values: Tensor) -> str:
    mean, least, most = (f"{number.item():.4g}" for number in (values.mean(), values.min(), values.max()))
    return mean if least == most else f"{mean} (from {least} to {most})"


def _rounding(bound: Tensor) -> Tensor:
    # An active constraint sits at its bound to within a few digits: that is not a violation worth a number.
    return 1e-4 * bound.abs()
