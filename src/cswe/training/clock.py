"""Where an epoch's time goes."""

from time import perf_counter

import torch
from torch import Tensor


class Clock:
    """Adds up the seconds of each phase; switched off it does nothing.

    A phase lasts until the next one is named. The backward pass runs through the phases in reverse, so it is cut where
    the gradient arrives at a phase's result.

    Parameters
    ----------
    enabled
        Whether to measure. Measuring makes an accelerator wait at the end of every phase.
    device
        The device to wait for.

    Examples
    --------
    >>> clock = Clock(True, torch.device("cpu"))
    >>> clock("loading"); clock("pool")
    >>> sorted(clock.read())
    ['loading', 'pool']
    """

    def __init__(self, enabled: bool, device: torch.device) -> None:
        self._enabled, self._device = enabled, device
        self._phase: str | None = None
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    def __call__(self, phase: str | None) -> None:
        """Begin a phase; None ends the last one."""
        if not self._enabled:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = perf_counter()
        if self._phase is not None:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def in_backward(self, tensor: Tensor, phase: str) -> None:
        """Begin a phase when the gradient of a tensor arrives."""
        if self._enabled and tensor.requires_grad:
            tensor.register_hook(lambda gradient: self(phase))

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase since the last reading."""
        self(None)
        seconds, self._seconds = self._seconds, {}
        return seconds
