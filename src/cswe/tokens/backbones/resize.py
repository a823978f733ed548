"""Pillow's resampling as two small matrices, so that it can run where the model runs.

Enlarging a small image costs more than decoding it. Done here for a whole batch at once it costs the GPU next to
nothing, and what travels from the workers is the small image.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Pillow's numbers for its filters, and their supports.
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
SUPPORTS = {LANCZOS: 3.0, BILINEAR: 1.0, BICUBIC: 2.0}
# Pillow computes 8-bit images with weights rounded to this many binary places.
_PLACES = 2.0**22


def _kernel(distance: npt.NDArray[np.floating], resample: int) -> npt.NDArray[np.floating]:
    x = np.abs(distance)
    if resample == BILINEAR:
        return np.where(x < 1, 1 - x, 0.0)
    if resample == BICUBIC:
        near = (1.5 * x - 2.5) * x**2 + 1
        far = ((-0.5 * x + 2.5) * x - 4) * x + 2
        return np.where(x < 1, near, np.where(x < 2, far, 0.0))
    return np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


@lru_cache(maxsize=64)
def resample_matrix(size: int, target: int, resample: int) -> Tensor:
    """Return the ``(target, size)`` matrix by which Pillow resamples a line of `size` pixels.

    Examples
    --------
    >>> resample_matrix(2, 4, BILINEAR)
    tensor([[1.0000, 0.0000],
            [0.7500, 0.2500],
            [0.2500, 0.7500],
            [0.0000, 1.0000]], dtype=torch.float64)
    """
    scale = size / target
    stretch = max(scale, 1.0)
    support = SUPPORTS[resample] * stretch
    matrix = np.zeros((target, size))
    for position in range(target):
        centre = (position + 0.5) * scale
        first = max(int(centre - support + 0.5), 0)
        last = min(int(centre + support + 0.5), size)
        weights = _kernel((np.arange(first, last) - centre + 0.5) / stretch, resample)
        matrix[position, first:last] = weights / weights.sum()
    return torch.from_numpy(np.round(matrix * _PLACES) / _PLACES)


def enlarge_images(images: Tensor, height: int, width: int, resample: int) -> Tensor:
    """Enlarge 8-bit images as Pillow does: along rows, rounded to 8 bits, then along columns, rounded again.

    Parameters
    ----------
    images
        ``(B, C, H, W)``, uint8.
    height, width
        The size wanted, at least that of `images`.
    resample
        `LANCZOS`, `BILINEAR` or `BICUBIC`.

    Returns
    -------
    torch.Tensor
        ``(B, C, height, width)``, float32 with whole values from 0 to 255, on the device of `images`.
    """
    # In float64 sums of 8-bit values with 22-bit weights are exact, and so the result is Pillow's to the bit.
    values = images.double()
    if images.shape[-1] != width:
        values = _round(values @ resample_matrix(images.shape[-1], width, resample).to(images.device).T)
    if images.shape[-2] != height:
        values = _round(resample_matrix(images.shape[-2], height, resample).to(images.device) @ values)
    return values.float()


def _round(values: Tensor) -> Tensor:
    return values.add_(0.5).floor_().clamp_(0, 255)
