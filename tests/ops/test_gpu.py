"""The operators on a GPU, against the oracle in float64 on the CPU."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_collider as lc
from lightning_collider import ops
from lightning_collider.filtering.token_filter import TokenFilter
from lightning_collider.ops import extension
from tests.conftest import (
    CONFIGS,
    batch_of,
    float64_reference,
    grads_of,
    random_keep,
    relative_error,
    small_llama,
    small_model,
)
from tests.nn.test_gradients import MASKS, rms_error

pytestmark = pytest.mark.gpu
B, T = 3, 150
OURS = {"dropped_keys", "rotate", "swiglu_backward", "rms_backward"}
FLASH = {"_flash_attention_forward", "_flash_attention_backward"}
KERNELS = {"triton": OURS | FLASH, "flash": FLASH, "aten": set()}


class Ran(TorchDispatchMode):
    """Names of the operators that run inside, in forward and in backward."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["triton", "flash", "aten"])
def path(request, monkeypatch):
    """All three ways to compute on CUDA: with the Triton kernels, without them, and ATen only."""
    module = ops.load()
    if request.param == "triton" and module.triton_library is None:
        pytest.skip("Triton is not installed")
    if request.param == "flash" and module.triton_library is not None:
        module.triton_library._destroy()
    if request.param == "aten":
        plain = ops.kept_rows

        def kept_rows(starts):
            rows = plain(starts)
            rows.forced_path = module.Path.aten
            return rows

        monkeypatch.setattr(ops, "kept_rows", kept_rows)
    yield request.param
    if request.param == "flash":
        module.triton_library = extension._register_triton()


def grads_on_gpu(model, ids, labels, keep, autocast=False, **inputs):
    """Filtered gradients of a model moved to the GPU, as CPU tensors."""
    model = lc.convert(model.cuda())
    inputs = {name: x.cuda() for name, x in inputs.items()}
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = lc.token_losses(model, ids.cuda(), labels.cuda(), **inputs).sum()
    lc.backward_filter(loss, keep.cuda())
    loss.backward()
    return {name: grad.cpu() for name, grad in grads_of(model).items()}


@pytest.mark.parametrize("family", CONFIGS)
def test_float32_equals_the_oracle(family, path):
    model = small_model(family)
    (ids, labels), keep = batch_of(B, T), random_keep(B, T)
    want = lc.oracle.filtered_grads(float64_reference(model), ids, labels, keep, "sum")
    assert relative_error(grads_on_gpu(model, ids, labels, keep), want) < 1e-4


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, path):
    model = small_llama()
    (ids, labels), keep = batch_of(B, T), MASKS[mask](B, T)
    want = lc.oracle.filtered_grads(float64_reference(model), ids, labels, keep, "sum")
    assert relative_error(grads_on_gpu(model, ids, labels, keep), want) < 1e-4


def wide_llama():
    """Heads of 64, so that rounding is that of a real shape and flash attention applies."""
    return small_llama(
        hidden_size=512, num_attention_heads=8, num_key_value_heads=2, intermediate_size=768
    )


# Packed documents: sequences of 1, 49 and 100 tokens in each row.
DOCUMENTS = torch.cat([torch.arange(n) for n in (1, 49, 100)]).expand(B, T)


@pytest.mark.parametrize("documents", [False, True], ids=["sequences", "documents"])
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16-true", "bf16-mixed"])
def test_bfloat16_is_as_close_as_hugging_face(autocast, documents, path):
    model = wide_llama() if autocast else wide_llama().bfloat16()
    (ids, labels), keep = batch_of(B, T, holes=0.0), random_keep(B, T)
    inputs = {"position_ids": DOCUMENTS} if documents else {}
    truth = lc.oracle.filtered_grads(float64_reference(model), ids, labels, keep, "sum", **inputs)
    theirs = copy.deepcopy(model).cuda()
    on_gpu = {name: x.cuda() for name, x in inputs.items()}
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        baseline = lc.oracle.filtered_grads(
            theirs, ids.cuda(), labels.cuda(), keep.cuda(), "sum", **on_gpu
        )
    baseline = {name: grad.cpu() for name, grad in baseline.items()}
    with Ran() as ran:
        ours = grads_on_gpu(model, ids, labels, keep, autocast, **inputs)
    assert ran.names & (OURS | FLASH) == KERNELS[path]  # a kernel that declines is silent
    assert rms_error(ours, truth) < 2 * rms_error(baseline, truth)


@pytest.mark.parametrize("mask", ["none", "one", "all"])
def test_bfloat16_masks(mask, path):
    model = wide_llama().bfloat16()
    (ids, labels), keep = batch_of(B, T), MASKS[mask](B, T)
    want = lc.oracle.filtered_grads(float64_reference(model), ids, labels, keep, "sum")
    got = grads_on_gpu(model, ids, labels, keep)
    assert all(g.isfinite().all() for g in got.values())
    assert relative_error(got, want) < 0.1


def test_a_filtered_step(path):
    model = small_llama()
    reference = float64_reference(model)
    model = lc.convert(model.cuda())
    model.token_filter = TokenFilter("excess_loss", 0.6)
    ids, labels = batch_of(B, T)
    stored = torch.rand(B, T, generator=torch.Generator().manual_seed(2))
    out = model(input_ids=ids.cuda(), labels=labels.cuda(), reference_losses=stored.cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out.loss.backward()
    optimizer.step()
    want = lc.oracle.filtered_grads(reference, ids, labels, out.keep.cpu())
    for name, p in reference.named_parameters():
        stepped = p.detach() - 0.1 * want[name]
        now = model.get_parameter(name).detach().cpu().double()
        assert torch.allclose(now, stepped, atol=1e-5), name
