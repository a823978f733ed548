"""What every operation does with its arguments before it computes: check them, and choose a precision.

Shapes and types are always checked. Checks that have to look at values (NaN, an empty set, a zero slice)
run when ``validate`` is true; ``None`` means "in eager use on the CPU", where looking is cheap. On an
accelerator a look costs a synchronisation, and under ``torch.compile``, ``torch.export`` or ``torch.func`` it has no
place.
"""

import operator
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from cswe.ops._transforms import is_transforming

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_Given = TypeVar("_Given")


def without_autocast(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Run an operation in the precision it chooses itself, whatever autocast says.

    Projections in bfloat16 collapse into ties, so autocast must not touch them.
    """

    @wraps(function)
    def exact(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        # Entered only where needed, so that exported graphs stay free of autocast regions.
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return exact


def whole(value: object, name: str, least: int = 1, more: str = "") -> int:
    """Return an argument that counts something as an int, or say what is wrong, and ``more`` of what is expected.

    Examples
    --------
    >>> whole(3, "slices")
    3
    """
    if isinstance(value, int) and not isinstance(value, bool):
        number = value  # also one that torch.compile keeps as a symbol
    elif isinstance(value, bool | Tensor) or not hasattr(value, "__index__"):
        raise TypeError(f"expected {name} ≥ {least}{more}, a whole number, but got {value!r}")
    else:
        number = operator.index(value)
    if number < least:
        raise ValueError(f"expected {name} ≥ {least}{more} but got {number}")
    return number


def working_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Give the precision to compute in: that of the inputs, but float32 at least. What is no tensor has no say."""
    dtype = torch.float32
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def looks_at_values(validate: bool | None, tensor: Tensor) -> bool:
    """Say whether checks that read values should run."""
    if torch.compiler.is_compiling():
        return False
    return tensor.device.type == "cpu" and not is_transforming() if validate is None else validate


def check_floating(tensor: object, name: str) -> None:
    """Raise unless ``tensor`` is a tensor of real floating-point numbers."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected {name} to be a torch.Tensor but got {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise TypeError(f"expected {name} of a floating-point dtype but got {tensor.dtype}")


def check_points(points: object, name: str, ranks: tuple[int, ...], width: int | None = None) -> None:
    """Raise unless ``points`` is a floating tensor ``(…, N, d)`` with N ≥ 1, of an allowed rank and width."""
    check_floating(points, name)
    assert isinstance(points, Tensor)  # narrows the type; check_floating has raised otherwise
    shape = tuple(points.shape)
    if points.ndim not in ranks or (width is not None and points.shape[-1] != width):
        # Words are found only here: torch.compile has none for a width that is a symbol.
        letters = {2: "(N, {})", 3: "(B, N, {})"}
        expected = " or ".join(letters[rank].format("d" if width is None else width) for rank in ranks)
        raise ValueError(f"expected {name} of shape {expected} but got {shape}")
    if points.shape[-2] == 0 or points.shape[-1] == 0:
        raise ValueError(f"expected at least one point of at least one dimension in {name} but got {shape}")


def usable(given: _Given) -> _Given:
    """Give a tensor that may take part in a gradient: one made in inference mode may not, but a copy may."""
    if isinstance(given, Tensor) and given.is_inference():
        return cast(_Given, given.clone())
    return given


def check_finite(tensor: Tensor, name: str, where: str = "") -> None:
    """Raise if a value is NaN or infinite. One reduction: a finite sum means that all terms are finite.

    (One that overflows means nothing, and a second look follows. A sum in float64 would copy the tensor first.)
    """
    with torch.no_grad():
        total = tensor.sum(dtype=working_dtype(tensor))
        if torch.isfinite(total):
            return
        bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise ValueError(f"{name} has {bad} NaN or infinite value{'s'[: bad > 1]}{where}; remove or mask them")


def as_mask(mask: Tensor | None, shape: tuple[int, ...], name: str, validate: bool) -> Tensor | None:
    """Turn a mask (bool, or 0/1 in any dtype; True = valid) into a boolean tensor, or raise."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise TypeError(f"expected {name} to be a torch.Tensor but got {type(mask).__name__}")
    if tuple(mask.shape) != tuple(shape):
        raise ValueError(f"expected {name} of shape {tuple(shape)} but got {tuple(mask.shape)}")
    if validate:
        if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError(f"expected {name} to be boolean or to hold only 0 and 1 (1 = valid)")
        empty = (mask == 0).all(-1)
        if bool(empty.any()):
            raise ValueError(
                f"{name} leaves {_places(empty)} without a single valid token; an empty set has no embedding"
            )
    return mask if mask.dtype == torch.bool else mask != 0


def check_weights(
    weights: Tensor | None, shape: tuple[int, ...], name: str, validate: bool, mask: Tensor | None = None
) -> None:
    """Raise unless weights have this shape and, per set, are finite, non-negative and not all zero under the mask."""
    if weights is None:
        return
    check_floating(weights, name)
    if tuple(weights.shape) != tuple(shape):
        raise ValueError(f"expected {name} of shape {tuple(shape)} but got {tuple(weights.shape)}")
    if validate:
        if mask is not None:
            weights = torch.where(mask, weights, 0.0)
        check_finite(weights, name)
        if bool((weights < 0).any()):
            raise ValueError(f"{name} has negative values; weights are masses and must be ≥ 0")
        empty = (weights == 0).all(-1)
        if bool(empty.any()):
            if mask is not None:
                raise ValueError(f"the mask and the {name} together leave no mass in {_places(empty)}")
            raise ValueError(f"{name} are all zero for {_places(empty)}; a set needs some mass")


def check_slices(slices: Tensor, width: int, validate: bool, name: str = "slices") -> None:
    """Raise unless slices are directions ``(L, d)``."""
    check_floating(slices, name)
    if slices.ndim != 2 or slices.shape[1] != width or slices.shape[0] == 0:
        raise ValueError(f"expected {name} of shape (L, {width}) but got {tuple(slices.shape)}")
    if validate:
        check_finite(slices, name)
        zero = (slices == 0).all(-1)
        if bool(zero.any()):
            raise ValueError(f"slice {int(zero.nonzero()[0])} is zero; a direction needs a length")


def unit_slices(slices: Tensor, width: int, dtype: torch.dtype, validate: bool, name: str = "slices") -> Tensor:
    """Normalise slices ``(L, d)`` to unit rows, or raise."""
    check_slices(slices, width, validate, name)
    slices = slices.to(dtype)
    return torch.nn.functional.normalize(slices, dim=-1, eps=torch.finfo(dtype).tiny)


def measure_weights(
    points: Tensor, mask: Tensor | None, weights: Tensor | None, dtype: torch.dtype = torch.float64
) -> Tensor | None:
    """Combine mask and weights into masses that sum to one, ``None`` for the plain uniform measure."""
    if mask is None and weights is None:
        return None
    if weights is None:
        assert mask is not None
        masses = mask.to(dtype)
    else:
        masses = weights.to(device=points.device, dtype=dtype)
        if mask is not None:
            masses = masses.masked_fill(~mask, 0)
    return masses / masses.sum(-1, keepdim=True)


def _places(flags: Tensor) -> str:
    """Name the first set that a flag is raised for."""
    if flags.ndim == 0:
        return "the set"
    first = tuple(int(i) for i in flags.nonzero()[0])
    return f"sample {first[0] if len(first) == 1 else first}"
