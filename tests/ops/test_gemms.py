"""Every GEMM of a filtered backward works on kept rows only, except the dropped keys in dQ."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_collider as lc
from tests.conftest import batch_of, random_keep, small_llama

GEMMS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "matmul", "linear", "einsum", "mv")
QUERIES = 128  # of a chunk, for the 4 query heads that share a key head in small_llama


class Operands(TorchDispatchMode):
    """Records name and operand shapes of everything that multiplies matrices."""

    def __init__(self):
        super().__init__()
        self.gemms: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        shapes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
        if name in GEMMS:
            self.gemms.append((name, shapes))
        return func(*args, **(kwargs or {}))


def record_backward(batch, length, keep, layers=2, dtype=torch.float32):
    model = lc.convert(small_llama(layers=layers, max_position_embeddings=length).to(dtype))
    ids, labels = batch_of(batch, length)
    loss = lc.token_losses(model, ids, labels).sum()
    if keep is not None:
        lc.backward_filter(loss, keep)
    with Operands() as operands:
        loss.backward()
    return operands


# N = 3 * 101 rows is no other dimension of the model, nor is any kept or dropped count here.
BATCH, LENGTH = 3, 101


def test_the_recorder_sees_full_rows_in_a_dense_backward():
    operands = record_backward(BATCH, LENGTH, None)
    assert any(BATCH * LENGTH in shape for _, shapes in operands.gemms for shape in shapes)


# Float64 logits are not kept: the head computes its own once more.
@pytest.mark.parametrize(("dtype", "again"), [(torch.float32, 0), (torch.float64, 1)])
def test_no_operand_has_a_full_row_dimension(dtype, again):
    keep = random_keep(BATCH, LENGTH)
    kept, dropped = int(keep.sum()), int((~keep).sum())
    operands = record_backward(BATCH, LENGTH, keep, dtype=dtype)
    two_d = [shapes for name, shapes in operands.gemms if "bmm" not in name]
    # Weight and input gradient of each projection: the head's, and in each of 2 layers 3 in the
    # MLP and 4 in attention.
    assert len(two_d) == again + 2 * (1 + 2 * (3 + 4))
    for shapes in two_d:
        dims = {d for shape in shapes for d in shape}
        assert BATCH * LENGTH not in dims and LENGTH not in dims and dropped not in dims
        assert kept in dims
    # What is left is attention: kept queries with kept keys take five products a chunk, with
    # dropped ones three.
    batched = [shapes for name, shapes in operands.gemms if "bmm" in name]
    assert len(batched) == 2 * (5 + 3) * -(-kept // QUERIES)
    for shapes in batched:
        assert BATCH * LENGTH not in {d for shape in shapes for d in shape}


@pytest.mark.parametrize("pattern", ["random", "prefix", "suffix", "runs"])
def test_attention_counts_the_masks_causal_pairs(pattern):
    length = 2048
    position = torch.arange(length)
    keep = {
        "random": random_keep(1, length),
        "prefix": (position < 1300)[None],
        "suffix": (position >= 800)[None],
        "runs": (position // 40 % 2 == 0)[None],
    }[pattern]
    operands = record_backward(1, length, keep, layers=1)
    rows = keep[0].nonzero().flatten()
    dropped = (~keep[0]).nonzero().flatten()
    heads, head_dim, repeats = 8, 8, 4  # of small_llama
    products = [shapes for name, shapes in operands.gemms if name == "bmm"]
    chunks = rows.split(QUERIES)
    with_kept, with_dropped = products[: 5 * len(chunks) : 5], products[5 * len(chunks) :: 3]
    for scores, keys in ((with_kept, rows), (with_dropped, dropped)):
        # A chunk computes the keys that its last query sees, for all its queries.
        computed = sum(int((keys <= part[-1]).sum()) * len(part) for part in chunks)
        assert sum(q[0] * q[1] * k[2] for q, k in scores) == heads * computed
        assert all(q[2] == head_dim and q[1] % repeats == 0 for q, _ in scores)
        assert computed < 1.15 * int((keys[None] <= rows[:, None]).sum()) or not scores
    assert bool(with_dropped) == (pattern != "prefix")


@pytest.mark.parametrize(
    ("kept", "blocks"),
    [
        (578, [512, 66]),
        (407, [256, 151]),
        (1157, [1024, 133]),
        (900, [512, 256, 132]),
        (256, [256]),
    ],
)
def test_bfloat16_rows_are_multiplied_in_blocks(kept, blocks):
    """578 = 2 x 17 x 17 rows at once take the CPU's GEMM 1.7 times as long a row as 512 do."""
    keep = torch.rand(1, 1200, generator=torch.Generator().manual_seed(0)).argsort() < kept
    operands = record_backward(1, 1200, keep, layers=1, dtype=torch.bfloat16)
    products = [shapes for name, shapes in operands.gemms if "bmm" not in name]
    rows = [shapes[-2][0] for shapes in products if shapes[-2][1] != kept]
    n_products = 1 + 3 + 4  # head, MLP, attention
    assert sorted(rows) == sorted(blocks * n_products)
    assert len(products) == len(rows) + n_products  # weight gradients are products of all kept rows
