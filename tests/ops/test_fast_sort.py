"""The fast sort against the stable sort of torch: values, order, gradients; and out of the way while torch traces."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from cswe.ops import fast_sort
from cswe.ops.fast_sort import permuted, sort_rows, sorted_rows


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Take the fast way for small inputs too."""
    monkeypatch.setattr(fast_sort, "SMALLEST", 0)


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def assert_is_stable_sort(values):
    expected = torch.sort(values, dim=-1, stable=True)
    ordered, order = sort_rows(values)
    assert torch.equal(order, expected.indices)
    torch.testing.assert_close(ordered, expected.values, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(sorted_rows(values), expected.values, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.floats(width=32, allow_nan=False),
            st.sampled_from([0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), 1e-45, -1e-45, 3.4028235e38]),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_any_floats(numbers):
    threshold, fast_sort.SMALLEST = fast_sort.SMALLEST, 0
    try:
        assert_is_stable_sort(torch.tensor(numbers))
    finally:
        fast_sort.SMALLEST = threshold


@pytest.mark.parametrize("shape", [(1,), (7,), (1, 1), (5, 1), (3, 4, 17), (2, 3, 4, 5), (0, 5), (300, 500)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_shapes_and_dtypes(shape, dtype):
    assert_is_stable_sort(draw(*shape, dtype=dtype))


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_in_blocks(threads, monkeypatch):
    monkeypatch.setattr(fast_sort, "BLOCK_ELEMENTS", 50)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_is_stable_sort(draw(40, 30))
        assert_is_stable_sort(draw(40, 30).round())
    finally:
        torch.set_num_threads(before)


def test_ties_keep_their_order():
    assert_is_stable_sort(torch.randint(-2, 3, (50, 60), generator=torch.Generator().manual_seed(0)).float())
    assert_is_stable_sort(torch.tensor([0.0, -0.0, 0.0, -0.0, -1.0]))


def test_nan_comes_last_whatever_its_sign():
    nan = torch.tensor([float("nan")])
    values = torch.cat([nan, torch.tensor([1.0, float("inf")]), torch.copysign(nan, -torch.ones(1)), torch.zeros(1)])
    assert_is_stable_sort(values)


def test_other_layouts():
    assert_is_stable_sort(draw(6, 7, 8).transpose(0, 2))
    assert_is_stable_sort(draw(6, 1, 8).expand(6, 5, 8))
    assert_is_stable_sort(draw(6, 16)[:, ::2])


def test_the_input_is_left_alone():
    values = draw(5, 6)
    before = values.clone()
    sorted_rows(values)
    sort_rows(values)
    assert torch.equal(values, before)


def test_the_default_device_has_no_say():
    values = draw(5, 6).requires_grad_()
    torch.set_default_device("meta")
    try:
        ordered, order = sort_rows(values)
    finally:
        torch.set_default_device(None)
    assert torch.equal(order, values.argsort(-1))
    assert ordered.device.type == "cpu"


def test_gradients():
    values, upstream = draw(4, 9).requires_grad_(), draw(4, 9) + 2
    (expected,) = torch.autograd.grad(torch.sort(values, dim=-1, stable=True).values, values, upstream)
    for ordered in (sort_rows(values)[0], sorted_rows(values)):
        (gradient,) = torch.autograd.grad(ordered, values, upstream)
        assert torch.equal(gradient, expected)
    # and of second order, and forwards
    (first,) = torch.autograd.grad(sort_rows(values)[0].pow(3).sum(), values, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), values)
    torch.testing.assert_close(second, 6 * values.detach())
    _, tangent = torch.func.jvp(lambda v: sort_rows(v)[0], (values.detach(),), (upstream,))
    assert torch.equal(tangent, upstream.gather(-1, values.argsort(-1)))
    for sort in (lambda v: sort_rows(v)[0], sorted_rows):
        with forward_ad.dual_level():
            dual = sort(forward_ad.make_dual(values.detach(), upstream))
            assert torch.equal(forward_ad.unpack_dual(dual).tangent, tangent)


class TestTracing:
    def test_compile_sees_a_plain_sort(self):
        torch._dynamo.reset()
        compiled = torch.compile(sort_rows, fullgraph=True, backend="aot_eager")
        values = draw(4, 9)
        for a, b in zip(compiled(values), torch.sort(values, dim=-1, stable=True), strict=True):
            assert torch.equal(a, b)

    def test_export_sees_a_plain_sort(self):
        class Sort(torch.nn.Module):
            def forward(self, values):
                return sort_rows(values)

        program = torch.export.export(Sort(), (draw(4, 9),))
        assert "sort" in str(program.graph)

    def test_fake_tensors(self):
        graph = make_fx(sort_rows, tracing_mode="fake")(draw(4, 9))
        other = draw(4, 9) - 5
        assert torch.equal(graph(other)[1], sort_rows(other)[1])

    def test_vmap(self):
        values = draw(4, 9)
        assert torch.equal(torch.func.vmap(lambda row: sort_rows(row)[0])(values), values.sort(-1).values)


class TestPermuted:
    """A gather by a permutation, and derivatives of it that gather, too."""

    def inverse_pair(self):
        order = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(seed)) for seed in range(3)])
        return order, order.argsort(-1)

    def test_it_is_a_gather(self):
        order, inverse = self.inverse_pair()
        values = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
        weights = torch.randn(4, 3, 5, dtype=torch.float64)
        found, expected = permuted(values, order, inverse), values.gather(-1, order.expand(values.shape))
        assert torch.equal(found, expected)
        of = [torch.autograd.grad((each * weights).sum(), values)[0] for each in (found, expected)]
        assert torch.equal(*of)

    def test_derivatives(self):
        order, inverse = self.inverse_pair()
        values = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda v: permuted(v, order, inverse).square(), values)
        assert torch.autograd.gradgradcheck(lambda v: permuted(v, order, inverse).pow(3), values)

    def test_under_vmap(self):
        order, inverse = self.inverse_pair()
        values = torch.randn(4, 3, 5)
        found = torch.func.vmap(lambda v: permuted(v, order, inverse))(values)
        assert torch.equal(found, permuted(values, order, inverse))
