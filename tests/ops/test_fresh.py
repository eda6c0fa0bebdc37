"""Large tensors that operators fill: on huge pages where there are any, with exact values."""

from pathlib import Path

import pytest
import torch

from lightning_collider import ops

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def advised(x: torch.Tensor) -> bool:
    """Whether the middle of x lies in memory that asks for huge pages."""
    middle = x.data_ptr() + x.nbytes // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name:
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = begin <= middle < end
        elif inside and name == "VmFlags:":
            return "hg" in rest
    raise AssertionError("no mapping holds the tensor")


def all_rows(n: int):
    return ops.kept_rows([0, n])


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="the kernel has no transparent huge pages")
def test_large_gradients_ask_for_huge_pages():
    # 12,000,000 bytes each; not a multiple of a page, so that its ends are cut
    w, x = torch.randn(3000, 1000, requires_grad=True), torch.randn(1, 5, 1000)
    ops.linear(x, w, None, all_rows(5)).sum().backward()
    table = torch.randn(3000, 1000, requires_grad=True)
    ops.embedding(torch.tensor([[1, 2]]), table, -1, all_rows(2)).sum().backward()
    assert advised(w.grad) and advised(table.grad)
    assert not advised(torch.zeros(50_000_000))  # mapped by itself, and not by us


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
