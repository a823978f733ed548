"""Which device to compute on: the one asked for, if torch can use it."""

import os

import torch


def usable_device(name: str | torch.device | None = None) -> torch.device:
    """Return the device asked for, or a GPU if there is one: this process's own, under a launcher.

    Examples
    --------
    >>> usable_device("cpu")
    device(type='cpu')
    """
    if name is not None:
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch's, for what it was not built for
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"device: expected one that torch can use here, cpu say, but got {str(name)!r} ({reason})"
            ) from None
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")
