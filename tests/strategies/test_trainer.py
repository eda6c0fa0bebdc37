"""The Trainer's strategy on one device: selection, normalisation, checkpoints, mistakes."""

import copy
import warnings

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, Subset

import lightning_collider as lc
from lightning_collider.filtering.reference import LiveReference
from lightning_collider.filtering.selectors import has_target
from tests.conftest import float64_reference, relative_error, small_llama
from tests.strategies.lightning_module import Batches, UsersModule, fit, loader

LR = 0.1


def steps_by_hand(model, items, masks_of, window, lr=LR, divisor=None):
    """SGD on the mean over the kept rows of each window of batches, by the oracle.

    divisor: of each window's sum, where it is not the number of kept rows.
    """
    model = float64_reference(model)
    for start in range(0, len(items), window):
        total, kept = None, 0
        for item in items[start : start + window]:
            ids, labels = item["input_ids"][None], item["labels"][None]
            keep = masks_of(model, ids, labels)
            grads = lc.oracle.filtered_grads(model, ids, labels, keep, reduction="sum")
            total = grads if total is None else {n: total[n] + g for n, g in grads.items()}
            kept += int((keep & has_target(labels)).sum())
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= lr * total[name] / (divisor or max(kept, 1))
    return dict(model.named_parameters())


def weights(module):
    return {n: p.detach() for n, p in module.model.named_parameters()}


def moved(after, before):
    return max(float((after[n] - p).abs().max()) for n, p in before.items())


def excess_loss_masks(reference):
    def masks_of(model, ids, labels):
        losses = lc.token_losses(model, ids, labels).detach()
        return lc.select(losses, LiveReference(reference).losses(ids, labels), labels, keep=0.6)

    return masks_of


def keep_everything(model, ids, labels):
    return torch.ones_like(labels, dtype=torch.bool)


@pytest.mark.parametrize(
    ("window", "n"), [(1, 3), (2, 4), (2, 5)], ids=["plain", "window", "short"]
)
def test_filtered_steps_equal_the_oracles(window, n):
    reference = small_llama(seed=9, layers=2).double().requires_grad_(False)
    module = UsersModule()
    start = copy.deepcopy(module.model)
    strategy = lc.ColliderStrategy(keep=0.6, selector="excess_loss", reference=reference)
    fit(module, strategy, loader(n), max_steps=-(-n // window), accumulate_grad_batches=window)
    want = steps_by_hand(start, Batches(n).items, excess_loss_masks(reference), window)
    # The norms of live Hugging Face references are float32 inside; the student's are not.
    assert relative_error(weights(module), want) < 1e-8
    assert moved(weights(module), dict(start.named_parameters())) > 1e-3


def test_a_model_in_eval_mode_is_filtered_all_the_same():
    """`from_pretrained` returns eval mode and the Trainer keeps it; eval mode is not filtered."""
    reference = small_llama(seed=9, layers=2).double()
    module = UsersModule()
    start = copy.deepcopy(module.model)
    module.model.eval()
    strategy = lc.ColliderStrategy(keep=0.6, selector="excess_loss", reference=reference)
    fit(module, strategy, loader(3), max_steps=3)
    want = steps_by_hand(start, Batches(3).items, excess_loss_masks(reference), 1)
    assert relative_error(weights(module), want) < 1e-8


def test_a_loss_that_the_selector_does_not_reach_is_told():
    class Evaluating(UsersModule):
        def training_step(self, batch, batch_idx):
            self.model.eval()
            return super().training_step(batch, batch_idx)

    strategy = lc.ColliderStrategy(keep=0.6, selector="top_loss")
    with pytest.warns(UserWarning, match=r"not filtered.*Call model\.train\(\)"):
        fit(Evaluating(), strategy, loader(2), max_steps=2)


@pytest.mark.parametrize("window", [1, 3])
def test_dense_steps_are_the_mean_over_all_tokens_of_the_window(window):
    module = UsersModule()
    start = copy.deepcopy(module.model)
    fit(module, "collider", loader(3), max_steps=3 // window, accumulate_grad_batches=window)
    want = steps_by_hand(start, Batches(3).items, keep_everything, window)
    assert relative_error(weights(module), want) < 1e-8


def test_stored_reference_losses_come_with_the_batch():
    reference = small_llama(seed=9, layers=2).double().requires_grad_(False)
    live = LiveReference(reference)

    def stored(i, length):
        item = Batches(i + 1).items[i]
        return live.losses(item["input_ids"][None], item["labels"][None])[0]

    runs = []
    for extra, settings in (({}, {"reference": reference}), ({"reference_losses": stored}, {})):
        module = UsersModule()
        strategy = lc.ColliderStrategy(keep=0.6, selector="excess_loss", **settings)
        fit(module, strategy, loader(3, **extra), max_steps=3)
        runs.append(weights(module))
    assert all(runs[0][n].equal(runs[1][n]) for n in runs[0])


class UsersFilter(UsersModule):
    """Calls backward_filter itself, on the model's loss or on a mean of its own."""

    own_mean = False

    def training_step(self, batch, batch_idx):
        keep = batch["keep"]
        if self.own_mean:
            losses = lc.token_losses(self.model, batch["input_ids"], batch["labels"])
            loss = losses[keep & has_target(batch["labels"])].mean()
        else:
            loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        lc.backward_filter(loss, keep)
        return loss


def given_mask(i, length):
    return torch.rand(length, generator=torch.Generator().manual_seed(i)) < 0.4 + 0.25 * (i % 3)


@pytest.mark.parametrize("own_mean", [False, True])
def test_backward_filter_in_training_step(own_mean):
    module = UsersFilter()
    module.own_mean = own_mean
    start = copy.deepcopy(module.model)
    batches = loader(5, keep=given_mask)
    fit(module, "collider", batches, max_steps=3, accumulate_grad_batches=2)
    items = Batches(5, keep=given_mask).items
    masks = iter(item["keep"][None] for item in items)
    want = steps_by_hand(start, items, lambda *_: next(masks), window=2)
    assert relative_error(weights(module), want) < 1e-8


def test_gradient_clipping_by_norm_sees_the_normalised_gradient():
    class Recorder(L.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            grads = [p.grad for p in module.parameters()]
            self.norm = torch.stack([g.norm() for g in grads]).norm().item()

    module, recorder = UsersModule(), Recorder()
    start = copy.deepcopy(module.model)
    fit(module, "collider", loader(1), max_steps=1, gradient_clip_val=1e-3, callbacks=[recorder])
    item = Batches(1).items[0]
    ids, labels = item["input_ids"][None], item["labels"][None]
    keep = torch.ones_like(labels, dtype=torch.bool)
    want = lc.oracle.filtered_grads(float64_reference(start), ids, labels, keep)
    norm = torch.stack([g.norm() for g in want.values()]).norm().item()
    assert recorder.norm == pytest.approx(norm, rel=1e-8)
    change = torch.stack(
        [(p - q).norm() for p, q in zip(module.model.parameters(), start.parameters(), strict=True)]
    ).norm()
    assert change.item() == pytest.approx(LR * 1e-3, rel=1e-4)


class Manual(UsersModule):
    """Manual optimisation, as Lightning's documentation shows it: backward, clip, step."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=1e3)
            self.norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm().item()
            optimizer.step()
            optimizer.zero_grad()


def test_manual_optimisation_clips_the_normalised_gradient():
    """A mean of two micro-batches is far below the bound; the sum over their rows is above it."""
    module = Manual()
    start = copy.deepcopy(module.model)
    fit(module, "collider", loader(2), max_steps=1)
    want = steps_by_hand(start, Batches(2).items, keep_everything, window=2)
    assert relative_error(weights(module), want) < 1e-8
    assert module.norm < 1e2


def test_a_later_strategy_without_a_selector_is_dense():
    module = UsersModule()
    fit(module, lc.ColliderStrategy(keep=0.6, selector="top_loss"), loader(1), max_steps=1)
    start = copy.deepcopy(module.model)
    assert start.token_filter is not None
    fit(module, "collider", loader(3), max_steps=3)
    plain = small_llama(layers=2).double()
    plain.load_state_dict(start.state_dict())
    want = steps_by_hand(plain, Batches(3).items, keep_everything, window=1)
    assert relative_error(weights(module), want) < 1e-8


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_precisions(precision):
    reference = small_llama(seed=9, layers=2)
    module = UsersModule(double=False)
    before = copy.deepcopy(module.model).state_dict()
    strategy = lc.ColliderStrategy(keep=0.6, selector="excess_loss", reference=reference)
    fit(module, strategy, loader(4), max_steps=4, precision=precision)
    expected = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert all(p.dtype == expected for p in module.model.parameters())
    assert moved(weights(module), before) > 1e-3
    assert all(loss > 0 for loss in module.losses)


def test_an_ordered_loader_stays_in_order():
    class Order(UsersModule):
        seen: list[int]

        def training_step(self, batch, batch_idx):
            self.seen.append(int(batch["index"]))
            return super().training_step(batch, batch_idx)

    module = Order()
    module.seen = []
    fit(module, "collider", loader(6, index=lambda i, length: i), max_steps=6)
    assert module.seen == list(range(6))


@pytest.mark.parametrize("selector", ["random", "excess_loss"])
def test_resume_continues_exactly(tmp_path, selector):
    settings = {"keep": 0.5, "selector": selector, "keep_warmup_steps": 5}
    if selector == "excess_loss":
        settings["reference"] = small_llama(seed=9, layers=2)

    class SaveHalf(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    def run(batches, **trainer_settings):
        module = UsersModule(double=False, optimizer=torch.optim.Adam)
        strategy = lc.ColliderStrategy(**settings)
        fit(module, strategy, batches, max_steps=6, **trainer_settings)
        return module

    whole = run(loader(6), callbacks=[SaveHalf()])
    # Lightning restores step and epoch; which batch comes next is the loader's affair.
    rest = DataLoader(Subset(Batches(6), range(3, 6)))
    resumed = run(rest, ckpt_path=tmp_path / "half.ckpt")
    assert len(resumed.losses) == 3 and resumed.losses == whole.losses[3:]
    assert all(weights(whole)[n].equal(p) for n, p in weights(resumed).items())


def test_checkpoints_load_without_the_plugin(tmp_path):
    module = UsersModule(double=False)
    trainer = fit(module, "collider", loader(2), max_steps=2)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    plain = UsersModule(double=False)
    state = torch.load(tmp_path / "model.ckpt", weights_only=True)["state_dict"]
    plain.load_state_dict(state)
    assert all(weights(module)[n].equal(p) for n, p in weights(plain).items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0.0}, r"\(0, 1\]"),
        ({"keep": 1.5, "selector": "top_loss"}, r"\(0, 1\]"),
        ({"selector": "nonsense"}, "selector must be one of"),
        ({"engine": "rust"}, "engine must be one of"),
        ({"sharding": "some"}, "sharding must be one of"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not supported"),
    ],
)
def test_settings_are_checked(settings, message):
    for strategy in (lc.ColliderStrategy, lc.fabric.ColliderStrategy):
        with pytest.raises(ValueError, match=message):
            strategy(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0.6}, "no effect without a selector"),
        ({"selector": "top_loss"}, "keep=1.0"),
        ({"selector": "random", "keep": 0.5, "reference": small_llama(layers=1)}, "does not use"),
        ({"selector": "threshold", "threshold": 1.0, "keep": 0.5}, "decides by itself"),
        ({"selector": keep_everything, "over": "sequence"}, "decides by itself"),
    ],
)
def test_settings_without_effect_warn(settings, message):
    with pytest.warns(UserWarning, match=message):
        lc.ColliderStrategy(**settings)


@pytest.mark.parametrize("settings", [{"cpu_offload": True}, {"mp_policy": MixedPrecisionPolicy()}])
def test_settings_of_fsdp2_warn_on_one_device(settings):
    with pytest.warns(UserWarning, match="one device is not sharded"):
        fit(UsersModule(), lc.ColliderStrategy(**settings), loader(1), 1)
    with pytest.warns(UserWarning, match="one device is not sharded"):
        strategy = lc.fabric.ColliderStrategy(**settings)
        L.Fabric(accelerator="cpu", devices=1, strategy=strategy).launch()


def test_start_up_says_what_is_filtered_and_warns_where_it_is_little(caplog):
    with caplog.at_level("INFO"):
        fit(UsersModule(), "collider", loader(1), 1)
    assert "11 of 11 modules filtered, 100.0% of the linear layers' backward FLOPs" in caplog.text
    module = UsersModule()
    module.model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda m, args, out: out)
    # 2 layers of attention 10,240 and MLP 18,432 weights, and a head of 6,208.
    with pytest.warns(UserWarning, match="only 84% of the linear"):
        fit(module, "collider", loader(1), 1)


def test_a_run_gives_back_the_memory_of_its_gradients():
    module = UsersModule(vocab_size=4096, hidden_size=128)  # embedding and head: 4 MiB in float64
    module.model.lm_head.weight.register_hook(lambda grad: sizes.append(grad.nbytes))
    sizes: list[int] = []
    lc.ops.release_gradient_memory()
    fit(module, lc.ColliderStrategy(keep=0.5, selector="top_loss"), loader(3), max_steps=3)
    assert min(sizes) > 2**20  # large enough that they are kept
    module.zero_grad()
    assert lc.ops.release_gradient_memory() == 0


def test_float16_is_refused_by_name():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=r"16-true.*float16"):
            fit(UsersModule(double=False), "collider", loader(1), 1, precision="16-true")


def test_a_reference_with_another_vocabulary_is_refused():
    reference = small_llama(vocab_size=98, layers=1)
    strategy = lc.ColliderStrategy(keep=0.6, selector="excess_loss", reference=reference)
    with pytest.raises(ValueError, match=r"98 tokens.*97"):
        fit(UsersModule(), strategy, loader(1), 1)


def test_a_module_without_a_language_model_is_refused():
    module = UsersModule()
    module.model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="UsersModule holds no trainable"):
        fit(module, "collider", loader(1), 1)


def test_pytorch_lightning_is_told_to_use_lightning():
    pytorch_lightning = pytest.importorskip("pytorch_lightning", reason="not installed")
    with pytest.raises(ValueError, match=r"for lightning\.pytorch, not pytorch_lightning"):
        pytorch_lightning.Trainer(strategy=lc.ColliderStrategy(), accelerator="cpu")
