"""The multipliers live where the values are."""

import pytest
import torch

from cswe.constrained import Constraint, Fraction, PrimalDual

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def steps(device, duals=None, x=None, count=10):
    x = torch.tensor([2.0, 0.3], device=device, requires_grad=True) if x is None else x
    if duals is None:
        constraint = Constraint(lambda b: (x * b.mean(0)).square(), Fraction(0.9, batches=3), "level")
        duals = PrimalDual(constraint, lr=0.1, slack_weight=1.0, slack_optimizer="adam")
    for step in range(count):
        batch = torch.rand(4, 2, generator=torch.Generator().manual_seed(step)).to(device)
        duals.lagrangian((x - 3).square().sum(), batch).backward()
        with torch.no_grad():
            x -= 0.05 * x.grad
        x.grad = None
        duals.step()
    return x, duals


def test_state_follows_the_values_and_equals_the_cpu():
    (x, duals), (expected, reference) = steps("cuda"), steps("cpu")
    for key, tensor in duals.record()["level"].items():
        assert tensor.is_cuda
        assert torch.allclose(tensor.cpu(), reference.record()["level"][key], atol=1e-5)
    assert torch.allclose(x.detach().cpu(), expected.detach(), atol=1e-5)


def test_state_from_the_cpu_resumes_on_the_gpu():
    x, duals = steps("cuda")
    state = {key: tensor.cpu() for key, tensor in duals.state_dict().items()}
    duals.load_state_dict(state)
    steps("cuda", duals, x, count=1)
    assert duals.record()["level"]["dual"].is_cuda
    assert not duals.to("cpu").record()["level"]["dual"].is_cuda


def test_a_step_that_does_not_look_does_not_wait():
    x = torch.tensor([2.0, 0.3], device="cuda", requires_grad=True)
    duals = PrimalDual(
        Constraint(lambda b: (x * b.mean(0)).square(), 0.1, "level"),
        lr=0.1,
        slack_weight=1.0,
        slack_optimizer="adam",
        look_every=None,
    )
    batch = torch.ones(4, 2, device="cuda")
    duals.lagrangian((x - 3).square().sum(), batch).backward()
    duals.step()  # the first makes the state
    torch.cuda.set_sync_debug_mode("error")
    try:
        duals.lagrangian((x - 3).square().sum(), batch).backward()
        duals.step()
        duals.record()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    duals.check()
