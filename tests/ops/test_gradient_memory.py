"""Memory of weights' gradients: used again and never shared, given back; with exact values."""

import resource

import pytest
import torch

from lightning_collider import ops

E, D = 1500, 1000  # 6,000,000 bytes in float32


@pytest.fixture(autouse=True)
def _none_kept():
    ops.release_gradient_memory()
    yield
    ops.release_gradient_memory()


def all_rows(n: int):
    return ops.kept_rows([0, n])


def backward(w: torch.Tensor, x: torch.Tensor) -> None:
    ops.linear(x, w, None, all_rows(x.shape[1])).sum().backward()


def weight_and_input(e: int = E) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(e, D, requires_grad=True), torch.randn(1, 5, D)


def by_hand(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.sum((0, 1)).expand_as(w)


def test_the_next_backward_uses_the_memory_again():
    w, x = weight_and_input()
    backward(w, x)
    place = w.grad.data_ptr()
    w.grad = None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    backward(w, 2 * x)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert w.grad.data_ptr() == place
    assert faults < w.grad.nbytes / resource.getpagesize() / 4
    torch.testing.assert_close(w.grad, by_hand(w, 2 * x))


def test_gradients_in_use_are_never_handed_out():
    w, x = weight_and_input()
    held = []
    for factor in (1, 2, 3):
        w.grad = None
        backward(w, factor * x)
        held.append(w.grad)
    assert len({grad.data_ptr() for grad in held}) == 3
    for factor, grad in zip((1, 2, 3), held, strict=True):
        torch.testing.assert_close(grad, by_hand(w, factor * x))


def test_accumulation_keeps_one_block_beside_the_gradient():
    w, x = weight_and_input()
    for _ in range(4):
        backward(w, x)
    torch.testing.assert_close(w.grad, 4 * by_hand(w, x))
    assert ops.release_gradient_memory() == w.grad.nbytes


@pytest.mark.parametrize("operator", ["linear", "embedding", "head"])
def test_memory_is_given_back(operator):
    w, x = weight_and_input()
    ids = torch.tensor([[1, 2]])
    if operator == "linear":
        backward(w, x)
    elif operator == "embedding":
        ops.embedding(ids, w, -1, all_rows(2)).sum().backward()
    else:
        ops.linear_cross_entropy(x[:, :2], w, None, ids, all_rows(2)).sum().backward()
    grad, size = w.grad, w.grad.nbytes
    w.grad = None
    copy = grad.clone()
    assert ops.release_gradient_memory() == 0  # in use
    assert torch.equal(grad, copy)
    del grad
    assert ops.release_gradient_memory() == 0  # given back as it was freed
    backward(w, x)
    w.grad = None
    assert ops.release_gradient_memory() == size


def test_what_nobody_asks_for_is_given_back():
    (w, x), (other, _) = weight_and_input(), weight_and_input(E // 2)
    backward(w, x)
    w.grad = None
    x = x[:, :1]
    for _ in range(4200):
        other.grad = None
        backward(other, x)
    other.grad = None
    assert ops.release_gradient_memory() == other.nbytes


def test_small_gradients_are_torch_s():
    w, x = weight_and_input(100)
    backward(w, x)
    w.grad = None
    assert ops.release_gradient_memory() == 0


def test_autocast_s_gradient_is_kept_in_both_dtypes():
    w, x = weight_and_input()
    with torch.autocast("cpu", torch.bfloat16):
        loss = ops.linear(x, w, None, all_rows(5)).sum()
    loss.backward()
    assert w.grad.dtype == torch.float32
    w.grad = None
    assert ops.release_gradient_memory() == w.nbytes + w.nbytes // 2


def test_a_gradient_can_be_resized_and_outlive_its_block():
    w, x = weight_and_input()
    backward(w, x)
    grad, w.grad = w.grad, None
    expected = torch.cat([grad.flatten(), torch.zeros(1)])
    grad.resize_(E * D + 1)[-1] = 0
    backward(w, 2 * x)  # takes the block that the resizing freed
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [-1, 0, 7])
def test_embedding_gradient_is_the_exact_sum_rounded(dtype, padding):
    # 80 rows for 20 tokens: about four summands each
    ids = torch.randint(0, 20, (2, 40))
    grad = torch.randn(2, 40, 900).to(dtype)
    table = torch.zeros(5000, 900, dtype=dtype, requires_grad=True)
    ops.embedding(ids, table, padding, ops.kept_rows([0, 40, 80])).backward(grad)
    exact, sizes = (
        torch.zeros(5000, 900, dtype=torch.float64).index_add(0, ids.flatten(), summand.double())
        for summand in (grad.flatten(0, 1), grad.flatten(0, 1).abs())
    )
    if padding >= 0:
        exact[padding] = 0
    # one rounding to the gradient's dtype, and those of sums in float32
    half_ulp = torch.finfo(dtype).eps / 2
    bound = half_ulp * exact.abs() + 20 * torch.finfo(torch.float32).eps * sizes
    assert ((table.grad.double() - exact).abs() <= bound).all()
    assert table.grad[20:].count_nonzero() == 0
