"""Compile the Triton kernels for a GPU that is not here: `python tests/ops/compile_kernels.py 90 232448`.

Arguments: compute capability, and the bytes of shared memory that a program may have there. The interpreter knows no
types and no shared memory, so it passes kernels that no GPU would take. Here the real compiler compiles all that real
calls ask for; launching is left out, and what comes back means nothing. A script, not a test: Triton has one driver.
"""

import sys
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from cswe.ops.kernels import cuda_cost, cuda_laplace, cuda_moments, cuda_project, cuda_quantiles, cuda_sort, cuda_stored

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32

# Samples, tokens, dimensions, slices, reference points; tokens in; masked, τ in units of the spread, token gradients.
DISTANCES = [
    (16, 196, 192, 8, 196, HALF, False, False, False),
    (4, 600, 128, 4, 600, SINGLE, False, False, False),  # states one by one
    (4, 300, 320, 4, 200, HALF, True, False, True),
    (4, 300, 16, 8, 1000, SINGLE, False, False, False),  # a reference with too many pairs
    (4, 100, 1280, 4, 100, HALF, False, False, False),  # small sets
    (4, 100, 320, 4, 90, HALF, True, False, True),
    (4, 50, 40, 4, 50, SINGLE, False, True, True),
    (4, 30, 10, 4, 20, SINGLE, True, True, True),
]

# Samples, tokens, dimensions, slices; tokens in; masked. Enough tokens for the larger tiles.
PROJECTIONS = [
    (87, 196, 128, 64, HALF, False),
    (87, 197, 80, 70, HALF, True),
    (44, 196, 128, 64, HALF, True),
    (44, 196, 128, 64, BRAIN, False),
    (44, 197, 67, 3, SINGLE, True),
    (44, 197, 67, 64, SINGLE, True),
]


class Utilities:
    """What loads kernels: nothing is loaded, but one that asks for too much shared memory is refused."""

    def load_binary(self, *_):
        return "module", "function", 0, 0, 1024

    def unload_module(self, *_):
        pass

    def get_device_properties(self, _):
        return {"max_shared_mem": int(sys.argv[2])}


COMPILED = set()


class Launcher:
    def __init__(self, source, _):
        COMPILED.add(source.fn.__name__)

    def __call__(self, *_):
        pass


class Driver:
    utils, launcher_cls = Utilities(), Launcher

    def get_current_device(self):
        return 0

    def get_current_stream(self, _):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_device_interface(self):
        return torch.cuda

    def map_python_to_cpp_type(self, kind):
        return kind


def sorted_by_torch(launch):
    """Sort for real after the launch that was left out: orders are indices, and torch follows them."""

    def both(values, index):
        launch(values, index)
        ordered, order = torch.sort(values, dim=-1, stable=True)
        return ordered, order.to(index)

    return both


def distance(batch, count, width, slices, targets, dtype, masked, relative, to_tokens):
    x = torch.randn(batch, count, width).to(dtype).requires_grad_(to_tokens)
    y, directions = torch.randn(targets, width, requires_grad=True), torch.randn(slices, width, requires_grad=True)
    mask = None
    if masked:
        mask = torch.rand(batch, count) < 0.7
        mask[:, 0] = True
    cuda_cost.distance(x, y, directions, mask, 0.1, None, relative).sum().backward()


def projections(batch, count, width, slices, dtype, masked):
    x, y = torch.randn(batch, count, width).to(dtype), torch.randn(count, width)
    mask = torch.rand(batch, count) < 0.7 if masked else None
    centre = cuda_project.centre_of(y)
    points, _, _ = cuda_project.project(x, mask, centre, torch.randn(slices, width))
    cuda_project.slices_gradient(points, x, mask, centre)
    directions = torch.randn(slices, width, requires_grad=True)
    stored, _ = cuda_stored.project_stored(x, mask, None, centre[0], directions)
    stored.sum().backward()


def readouts(masked):
    x = torch.randn(4, 8, 98, requires_grad=True)
    masses = torch.softmax(torch.randn(4, 2, 98), -1).requires_grad_()
    cuda_moments.higher_moments(x, masses, torch.rand(4, 98) < 0.7 if masked else None, 3).sum().backward()
    ranked = torch.randn(4, 8, 98).sort(-1).values.requires_grad_()
    lengths = torch.randint(1, 99, (4,)) if masked else None
    cuda_quantiles.averages(ranked, lengths, 60).sum().backward()


def main():
    driver.set_active(Driver())
    cuda_sort._launch = sorted_by_torch(cuda_sort._launch)
    for case in DISTANCES:
        distance(*case)
    for case in PROJECTIONS:
        projections(*case)
    for masked in (False, True):
        readouts(masked)
    cuda_sort.sort_rows(torch.randn(64, 256, 196, requires_grad=True))[0].sum().backward()
    cuda_laplace.plain_and_signed_sums(torch.randn(4, 300).sort(-1).values, torch.randn(4, 300, 130), 0.7)
    print(*sorted(COMPILED))


if __name__ == "__main__":
    main()
