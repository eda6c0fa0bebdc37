"""The bench: FLOPs against brute force and published ratios, what is timed, and what it writes."""

import argparse
import itertools
import json
import platform
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig

from lightning_collider import cli
from lightning_collider.eval import efficiency, memory, memory_grid
from lightning_collider.eval.flops import causal_pairs, step_flops
from lightning_collider.eval.steps import Steps, labels_of_kept, selection_share
from lightning_collider.filtering.selectors import has_target
from tests.conftest import batch_of, random_keep, relative_error, small_llama

TINY = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=5,
    vocab_size=97,
)


def test_causal_pairs_against_a_loop():
    keep = random_keep(3, 17)
    pairs = both = mixed = 0
    for row in keep.tolist():
        for query in range(17):
            for key in range(query + 1):
                pairs += 1
                both += row[query] and row[key]
                mixed += row[query] and not row[key]
    assert causal_pairs(keep) == (pairs, both, mixed)


def test_flops_of_a_hand_computed_step():
    # One sequence of 2, keep the second token; 10 weights; attention width 4, one layer.
    flops = step_flops(10, 4, 1, torch.tensor([[False, True]]))
    assert flops.forward == 2 * 2 * 10 + 2 * 3 * 8
    assert flops.dense_backward == 4 * 2 * 10 + 5 * 3 * 8
    assert flops.filtered_backward == 4 * 1 * 10 + (5 * 1 + 3 * 1) * 8
    everything = step_flops(10, 4, 1, torch.ones(1, 5, dtype=torch.bool))
    assert everything.floor_backward == everything.floor_step == 1.0


def test_random_masks_cost_what_the_formula_says():
    # (3 f + 2 f^2) / 5 of attention, and f of the linear layers (method: see eval/flops.py).
    share = 0.6
    keep = random_keep(1, 8192, share)
    attention_only = step_flops(0, 64, 1, keep).floor_backward
    assert attention_only == pytest.approx((3 * share + 2 * share**2) / 5, rel=0.02)
    linear_only = step_flops(1000, 0, 1, keep).floor_backward
    assert linear_only == pytest.approx(keep.float().mean().item(), rel=1e-6)


def test_peak_is_the_highest_running_sum():
    assert memory.largest_sum([]) == 0
    assert memory.largest_sum([5, -3, 4, -6, 5]) == 6


def test_peak_memory_of_one_product():
    weight = torch.nn.Linear(256, 512, bias=False)
    x = torch.randn(64, 256)
    # Forward: the product and its sum; backward: the sum's gradient, expanded, and a fresh dw.
    peak = memory.peak_bytes(lambda: lambda: weight(x).sum(), weight)
    product, gradient = 64 * 512 * 4, 512 * 256 * 4
    assert product + gradient <= peak <= 1.2 * (2 * product + gradient)


def test_hugging_faces_labels_give_the_loss_of_the_kept_rows():
    model = small_llama()
    ids, labels = batch_of(2, 17)
    keep = random_keep(2, 17)
    loss = model(ids, labels=labels_of_kept(labels, keep)).loss
    logits = model(ids).logits[:, :-1]
    kept = (keep & has_target(labels))[:, :-1]
    want = F.cross_entropy(logits[kept], labels[:, 1:][kept])
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)


def test_bench_writes_the_keys_of_its_contract(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(efficiency.SHAPES, "tiny", TINY)
    parser = argparse.ArgumentParser()
    efficiency.add_arguments(parser)
    options = "--shape tiny --layers 2 --seq 64 --batch 2 --keep 0.5 --dtype fp32 --rounds 2 "
    options += "--alternatives --keep-memory --json"
    file = tmp_path / "new" / "bench.json"
    asked: list[bool] = []
    monkeypatch.setattr(efficiency, "keep_freed_memory", lambda: asked.append(True))
    efficiency.main(parser.parse_args([*options.split(), str(file)]))
    assert asked
    result = json.loads(file.read_text())
    assert result["memory"] == "kept"
    plain = "shape layers seq batch keep dtype device floor_backward floor_step peak_memory_ratio"
    assert set(plain.split()) <= result.keys()
    assert {"load_average", "versions", "machine"} <= result.keys()
    for kind in ("hf", "dense", "filtered"):
        assert result[f"{kind}_forward_s"] > 0 and result[f"{kind}_backward_s"] > 0
    table = capsys.readouterr().out
    ratios = "backward_vs_hf step_vs_hf backward_vs_dense step_vs_dense dense_vs_hf".split()
    for name in ratios:
        low, high = result[f"{name}_iqr"]
        assert 0 < low <= result[name] <= high and name in table
    for name in ("head_only", "hf_checkpointed", "filtered_checkpointed"):
        assert result[f"{name}_backward_s"] > 0 and result[f"{name}_peak_memory_ratio"] > 0
    assert result["filtered_checkpointed_step_vs_hf_checkpointed"] > 0
    assert 0 < result["selection_share"] < 1
    assert result["rounds"] >= 7 and result["layers"] == 2
    assert 0.4 < result["floor_backward"] < 0.55
    assert 0 < result["peak_memory_ratio"]


def test_fractions_of_one_bench_share_what_does_not_depend_on_them(monkeypatch):
    monkeypatch.setitem(efficiency.SHAPES, "tiny", TINY)
    counts = []
    timed = efficiency.Steps.timed

    def counted(steps, step):
        counts.append(step.__name__)
        return timed(steps, step)

    monkeypatch.setattr(efficiency.Steps, "timed", counted)
    results = efficiency.bench("tiny", 2, 64, 2, [0.25, 0.75], "fp32", "cpu", 7)
    assert [r["keep"] for r in results] == [0.25, 0.75]
    few, many = results
    shared = ("hf_forward_s", "hf_backward_s", "dense_forward_s", "dense_backward_s", "dense_vs_hf")
    assert all(few[name] == many[name] for name in shared)
    assert few["filtered_backward_s"] != many["filtered_backward_s"]
    assert few["floor_backward"] < 0.35 and many["floor_backward"] > 0.65
    assert few["peak_memory_ratio"] < many["peak_memory_ratio"]
    assert counts.count("hugging_face") == counts.count("dense") == 8
    assert counts.count("filtered") == 2 * 8 + 2 * 3  # and selection's share


def test_a_step_at_another_fraction_trains_the_same_weights():
    steps = Steps(TINY, 1, 32, 0.5, torch.float32, torch.device("cpu"))
    loss = steps.filtered()().item()
    other = steps.at(0.25)
    assert other.model is steps.model and int(other.mask.sum()) == int(0.25 * 31 + 0.5)
    assert other.filtered()().item() == pytest.approx(other.hugging_face()().item(), rel=1e-5)
    assert steps.filtered()().item() == loss


def test_memory_alone_prints_the_benchs_ratio(monkeypatch, capsys):
    monkeypatch.setitem(memory_grid.SHAPES, "tiny", TINY)
    words = "memory_grid --shape tiny --layers 1 2 --seq 64 --keep 0.5"
    monkeypatch.setattr("sys.argv", words.split())
    memory_grid.main()
    one, two = capsys.readouterr().out.splitlines()[1:]
    assert one.startswith("tiny, 1 x 64") and two.startswith("tiny, 2 x 64")
    (result,) = efficiency.bench("tiny", 2, 64, 1, [0.5], "bf16", "cpu", 7)
    assert float(two.split()[-1]) == pytest.approx(result["peak_memory_ratio"], abs=0.02)


def test_a_file_that_cannot_be_written_is_refused_before_the_work(monkeypatch, tmp_path, capsys):
    def never(*_):
        raise AssertionError("the bench has begun")

    monkeypatch.setattr(efficiency, "bench", never)
    words = ["bench", "--shape", "tinyllama", "--json"]
    (tmp_path / "old.json").write_text("measured\n")
    for path, message in (
        (tmp_path / "old.json", "exists and is not overwritten: name another file"),
        (tmp_path, "exists and is not overwritten: name another file"),
        (tmp_path / "old.json" / "bench.json", "cannot write to"),
    ):
        assert cli.main([*words, str(path)]) == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "old.json").read_text() == "measured\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_bench_on_cuda_says_when_there_is_none():
    with pytest.raises(ValueError, match="no CUDA device: use --device cpu"):
        efficiency.bench("tinyllama", 1, 8, 1, [0.5], "fp32", "cuda", 7)


@pytest.mark.gpu
def test_bench_on_cuda(monkeypatch):
    monkeypatch.setitem(efficiency.SHAPES, "tiny", TINY)
    (result,) = efficiency.bench("tiny", 2, 64, 2, [0.5], "bf16", "cuda", 7)
    assert result["filtered_backward_s"] > 0 and 0 < result["peak_memory_ratio"] < 2


@pytest.mark.gpu
def test_peak_memory_of_one_product_on_cuda():
    weight = torch.nn.Linear(256, 512, bias=False, device="cuda")
    x = torch.randn(64, 256, device="cuda")
    weight(x).sum().backward()  # cuBLAS takes its workspace
    peak = memory.peak_bytes(lambda: lambda: weight(x).sum(), weight)
    product, gradient = 64 * 512 * 4, 512 * 256 * 4
    assert product + gradient <= peak <= 1.5 * (2 * product + gradient)


def test_both_models_train_the_same_weights():
    steps = Steps(TINY, 1, 32, 0.5, torch.float32, torch.device("cpu"))
    theirs, ours = dict(steps.model.named_parameters()), dict(steps.ours.named_parameters())
    assert theirs.keys() == ours.keys() and all(ours[n] is p for n, p in theirs.items())
    assert int(steps.mask.sum()) == int(0.5 * 31 + 0.5)
    # The three losses speak of the same rows: filtered equals Hugging Face's on kept labels.
    assert steps.filtered()().item() == pytest.approx(steps.hugging_face()().item(), rel=1e-5)


def gradients(steps, way):
    """Gradients of one step, by name."""
    forward = way()
    steps.model.zero_grad(set_to_none=True)
    forward().backward()
    return {name: p.grad.clone() for name, p in steps.model.named_parameters()}


def test_alternatives_have_the_gradients_of_what_they_stand_for():
    steps = Steps(TINY, 2, 32, 0.5, torch.float32, torch.device("cpu"))
    theirs = gradients(steps, steps.hugging_face)
    assert relative_error(gradients(steps, steps.head_only), theirs) < 1e-5
    assert relative_error(gradients(steps, steps.hf_checkpointed), theirs) < 1e-5
    ours = gradients(steps, steps.filtered)
    assert relative_error(gradients(steps, steps.filtered_checkpointed), ours) < 1e-5
    assert relative_error(ours, theirs) > 1e-2  # dropped keys and values are held constant


def test_checkpointing_ends_with_its_own_way():
    steps = Steps(TINY, 1, 32, 0.5, torch.float32, torch.device("cpu"))
    for checkpointed, plain in (
        (steps.hf_checkpointed, steps.hugging_face),
        (steps.hf_checkpointed, steps.head_only),
        (steps.filtered_checkpointed, steps.filtered),
        (steps.filtered_checkpointed, steps.dense),
    ):
        before, less, after = (
            memory.peak_bytes(w, steps.model) for w in (plain, checkpointed, plain)
        )
        assert less < 0.8 * before and after == pytest.approx(before, rel=0.05)


def test_selection_is_a_part_of_the_step():
    steps = Steps(TINY, 2, 64, 0.5, torch.float32, torch.device("cpu"))
    steps.now = itertools.count().__next__  # a clock that ticks once each time it is read
    # The step's own three readings span 2 ticks, and each of ranking, indices and the marks of
    # losses and their mean reads twice: (4 of 1 tick) of (2 + 4 times 2).
    assert selection_share(steps, 3) == pytest.approx(4 / 10)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc to keep memory")
def test_freed_memory_is_kept():
    """64 MiB that were freed can come back without page faults (of 4 KiB each)."""
    script = """
import resource, torch
from lightning_collider.eval.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
freed = min(faults() for _ in range(4))
keep_freed_memory()
print(freed, min(faults() for _ in range(8)))  # a small block may stand in the way at first
"""
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    freed, kept = map(int, printed.split())
    assert freed > 10 * kept
