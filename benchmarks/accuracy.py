"""What float32 knows of D and its gradients at full size: `python benchmarks/accuracy.py` (or `--device cuda`).

Every way in float32 against `dense` in float64, in norm: D, gradient by the reference, gradient by the slices. The last
column is float64 against itself, with slices that were moved by a quarter of float32's last place.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from cswe.ops import SoftSort, swgg
from cswe.ops.kernels import backend

# B, N, d, L, τ, tokens.
CASES = [
    (128, 196, 192, 64, 0.01, torch.float32),
    (128, 196, 192, 64, 0.01, torch.float16),
    (128, 196, 192, 64, 10.0, torch.float32),
    (64, 512, 256, 32, 0.001, torch.float32),
    (64, 512, 256, 32, 0.001, torch.float16),
    (32, 100, 1280, 64, 0.01, torch.float32),
]


def computed(x, y, slices, tau, way, together):
    """D and the gradients of its sum, so many samples at a time: dense takes much memory."""
    y, slices = y.clone().requires_grad_(), slices.clone().requires_grad_()
    values = []
    with backend(way):
        for part in x.split(together):
            value = swgg(part, y, slices, SoftSort(tau))
            value.sum().backward()
            values.append(value.detach())
    return torch.cat(values), y.grad, slices.grad


def errors(found, expected):
    return " ".join(f"{float((f.double() - e).norm() / e.norm()):.1e}" for f, e in zip(found, expected, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=3)
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda was asked for, but there is no CUDA device; leave it out to use the CPU")
    for batch, count, width, number, tau, dtype in CASES:
        generator = torch.Generator(chosen.device).manual_seed(chosen.seed)

        def draw(*shape, generator=generator, **kind):
            return torch.randn(*shape, device=chosen.device, generator=generator, **kind)

        x, y, slices = draw(batch, count, width).to(dtype), draw(count, width), draw(number, width)
        slices = torch.nn.functional.normalize(slices, dim=-1)
        exact = computed(x.double(), y.double(), slices.double(), tau, "dense", 4)
        moved = slices.double() * (1 + 3e-8 * draw(number, width, dtype=torch.float64))
        print(
            f"{batch}, {count}, {width}, {number}, {tau:g}, {str(dtype)[6:]}:",
            f"{chosen.device} {errors(computed(x, y, slices, tau, chosen.device, batch), exact)};",
            f"dense {errors(computed(x.float(), y, slices, tau, 'dense', 16), exact)};",
            f"moved {errors(computed(x.double(), y.double(), moved, tau, 'scan', 4), exact)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
