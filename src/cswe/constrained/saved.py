"""A multiplier's state as plain tensors, and back."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from cswe.constrained.bound import Fraction
from cswe.constrained.multiplier import Multiplier, State
from cswe.constrained.watch import Watch

LEVEL_OF = "level.of"  # batches that the level was to be measured on
WATCH = ("watch.rose", "watch.early", "watch.late", "watch.steps", "watch.patience", "warned")


def save(multiplier: Multiplier) -> dict[str, Tensor]:
    """Return the state of one multiplier as tensors; nothing before its first step."""
    state = multiplier.state
    if state is None:
        return {}
    fields = {"values": state.values, "dual": state.dual}
    fields |= {f"dual.{key}": tensor for key, tensor in state.dual_memory.items()}
    if multiplier.has_slack:
        fields["slack"] = state.slack
        fields |= {f"slack.{key}": tensor for key, tensor in state.slack_memory.items()}
    if state.level is not None:
        fields["level"] = state.level
        fields["level.count"] = number(state.level_count)
        fields["level.batches"] = number(state.level_batches)
        fields[LEVEL_OF] = number(_batches(multiplier))
    if state.watch is not None:
        fields["watch.rose"] = state.watch.rose
        fields["watch.early"] = state.watch.early
        fields["watch.late"] = state.watch.late
        fields["watch.steps"] = number(state.watch.steps)
        fields["watch.patience"] = number(state.watch.patience)
        fields["warned"] = number(state.warned)
    return {key: tensor.detach().clone() for key, tensor in fields.items()}


def number(value: float | bool) -> Tensor:
    """Return a number as a tensor on the CPU, whatever the default device, which may have no float64."""
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu")


def load(multiplier: Multiplier, fields: Mapping[str, object], steps: int) -> State | None:
    """Return the state that the fields describe after so many steps; the multiplier itself stays as it is."""
    if not fields:
        return None
    name = multiplier.constraint.name
    tensors = {key: _tensor(value, f"{name}.{key}") for key, value in fields.items()}
    if "dual" not in tensors:
        raise ValueError(f"expected the state to have '{name}.dual' but got only {sorted(tensors)} for {name!r}")
    # What a fresh multiplier of this size would save is what has to be there: settings and state must fit.
    dual = tensors["dual"]
    if dual.ndim != 1:
        raise ValueError(f"expected '{name}.dual' in the state to have shape (K,) but got {tuple(dual.shape)}")
    fresh = Multiplier(
        multiplier.constraint,
        multiplier.dual_rule,
        multiplier.slack_rule,
        multiplier.slack_weight,
        multiplier.patience,
    )
    fresh.state = fresh.current(dual)
    expected = save(fresh)
    # The watch only decides when to warn: a run may resume with another patience, and starts a new window
    # then.
    missing = [f"{name}.{key}" for key in expected if key not in tensors and key not in (*WATCH, LEVEL_OF)]
    extra = [f"{name}.{key}" for key in tensors if key not in expected and key not in WATCH]
    if missing or extra:
        raise ValueError(
            f"expected a state saved with the same bound kind, optimizers and slack for {name!r} but got one "
            f"with missing {missing} and unexpected {extra}"
        )
    for key, tensor in expected.items():
        if key in tensors and tensors[key].shape != tensor.shape:
            raise ValueError(
                f"expected '{name}.{key}' in the state to have shape {tuple(tensor.shape)} but got "
                f"{tuple(tensors[key].shape)}"
            )
    state = replace(
        fresh.state,
        values=tensors["values"],
        dual=dual,
        slack=tensors.get("slack", torch.zeros_like(dual)),
        dual_memory={key: tensors[f"dual.{key}"] for key in fresh.state.dual_memory},
        slack_memory={key: tensors[f"slack.{key}"] for key in fresh.state.slack_memory},
    )
    if state.level is not None:
        batches = int(tensors["level.batches"])
        # States of old do not say of how many batches: a step that measured nothing came after the last of them.
        done = batches >= int(tensors[LEVEL_OF]) if LEVEL_OF in tensors else steps > batches
        if done:
            # Perhaps of fewer batches than today's setting asks for. But values that a multiplier has moved since say
            # nothing of the unconstrained level.
            batches = max(batches, _batches(multiplier))
        state = replace(state, level=tensors["level"], level_count=float(tensors["level.count"]), level_batches=batches)
    if state.watch is not None and all(key in tensors for key in WATCH):
        state = replace(state, watch=_watch(state.watch, tensors), warned=bool(tensors["warned"]))
    return state


def _batches(multiplier: Multiplier) -> int:
    """Return the number of batches that a level is measured on."""
    bound = multiplier.constraint.bound
    return bound.batches if isinstance(bound, Fraction) else 0


def _watch(fresh: Watch, tensors: Mapping[str, Tensor]) -> Watch:
    if int(tensors["watch.patience"]) != fresh.patience:
        return fresh  # half a window of another length says nothing
    return replace(
        fresh,
        rose=tensors["watch.rose"].bool(),
        early=tensors["watch.early"],
        late=tensors["watch.late"],
        steps=int(tensors["watch.steps"]),
    )


def _tensor(value: object, key: str) -> Tensor:
    # Numbers and lists too: the state may have been through JSON, whose decimals give every float64 back
    # exactly.
    if isinstance(value, Tensor):
        return value.detach().clone()
    try:
        tensor = torch.tensor(value, device="cpu")
        return torch.tensor(value, dtype=torch.float64, device="cpu") if tensor.is_floating_point() else tensor
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"expected {key!r} in the state to be a tensor or numbers but got {value!r}") from error
