"""TokenSuperposition: a Lightning callback that trains the first part of a run on bags of tokens.

Phase 1 takes the first ``ratio`` of all optimizer steps. Its sequences hold s L tokens, folded into
L bags of s, so a step costs what an ordinary one costs and reads s times the data. Phase 2 is
ordinary training with L tokens, from the same weights, optimizer state and schedule
(Token-Superposition Training, arXiv 2605.06546, section 3; recommended: s 4 to 8, ratio .2 to .4).

Which phase an optimizer step belongs to follows from its number alone. So the switch is exact with
gradient accumulation and over ranks, and a run that is resumed on either side of it goes on as it
would have.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import lightning as L
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_collider.strategies.filtering import trainable_causal_lms
from lightning_collider.superposition.bags import check_bag_size
from lightning_collider.superposition.data import FoldedLoader, check_enough, sequence_length
from lightning_collider.superposition.loss import bag_weights
from lightning_collider.superposition.meter import Meter
from lightning_collider.superposition.model import BagForward, BagSettings


class TokenSuperposition(L.Callback):
    """Trains the first part of a run on bags of ``bag_size`` tokens.

    The LightningModule stays as it is: in ``training_step`` it calls its Hugging Face causal LM
    with ``input_ids`` and ``labels`` and returns the loss. The callback stands in for that model's
    forward, and joins ``bag_size`` of the train loader's batches to one with longer sequences. A
    data module with a method ``superpose(bag_size, superposed)`` brings the longer sequences
    itself: for every optimizer step with ``superposed(step)`` its batches must be
    (B, bag_size L), else (B, L), also after a resume.

    It works under any strategy. Under a ColliderStrategy the loss is the mean over the pairs of
    all ranks and micro-batches, phase 1 is dense, and the selector begins with phase 2.
    Validation is ordinary in both phases.

    Args:
        bag_size: tokens of a bag, s.
        ratio: part of ``Trainer(max_steps=...)`` that is trained on bags, in [0, 1).
        weights: of a bag's tokens as targets: "uniform", "inverse" (1/i for the i-th), or s
            numbers.
        separator: id of the token that ends each document, if bags and their targets should not
            cross it. Packed documents with their own ``position_ids`` are known without it.
        contiguous: neighbouring rows of the loader continue each other's text. Otherwise no bag
            and no target crosses the seams between joined rows.
        skip_seen: on resume, read and throw away the batches that were used; False: the loader
            begins behind them. A data module with a ``load_state_dict`` of its own does.

    Raises:
        ValueError: a setting out of range; at the start of training, no ``max_steps``, too few
            data, manual optimization, or not exactly one trainable causal LM.
    """

    def __init__(
        self,
        bag_size: int = 6,
        ratio: float = 0.3,
        weights: str | Sequence[float] = "uniform",
        separator: int | None = None,
        contiguous: bool = False,
        skip_seen: bool = True,
    ) -> None:
        check_bag_size(bag_size)
        if not 0.0 <= ratio < 1.0:
            raise ValueError(
                f"ratio is the part of the steps that is trained on bags and must be in [0, 1), "
                f"got {ratio}"
            )
        self.bag_size = bag_size
        self.ratio = ratio
        self.weights = bag_weights(weights, bag_size)
        self.separator = separator
        self.contiguous = contiguous
        self.skip_seen = skip_seen
        self.steps: int | None = None  # optimizer steps of phase 1; set at the start of training
        self.row_length: int | None = None  # L, where rows are joined that do not continue
        self._restored: dict[str, int] = {}
        self._forward: BagForward | None = None
        self._meter = Meter()
        self._step = -1  # optimizer steps done when the current micro-batch began

    def superposed(self, step: int) -> bool:
        """Whether optimizer step ``step`` (0 is the first) is trained on bags."""
        assert self.steps is not None
        return step < self.steps

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Count the steps of phase 1, and see to it that its sequences are longer."""
        if stage != "fit":
            return
        if trainer.max_steps < 1:
            raise ValueError(
                "TokenSuperposition trains on bags for a part of all optimizer steps: say how "
                "many there are with Trainer(max_steps=...)"
            )
        if not pl_module.automatic_optimization:
            raise ValueError("TokenSuperposition needs automatic optimization")
        self.steps = int(self.ratio * trainer.max_steps + 0.5)
        if self.steps == 0:
            return
        superpose = getattr(trainer.datamodule, "superpose", None)  # type: ignore[attr-defined]
        if superpose is not None:
            superpose(self.bag_size, self.superposed)
            return
        # Called for each loader once it has the sampler of its rank.
        process = trainer.strategy.process_dataloader
        trainer.strategy.process_dataloader = partial(  # type: ignore[method-assign]
            self._process_dataloader, trainer, process
        )

    def _process_dataloader(self, trainer: Any, process: Any, loader: Iterable[Any]) -> Any:
        loader = process(loader)
        if not trainer.training:
            return loader
        passes = trainer.fit_loop.max_epochs
        window = trainer.accumulate_grad_batches
        batches = sized_len(loader)
        if batches is not None:
            assert self.steps is not None
            # The last window may be short, where the data end.
            ordinary = (trainer.max_steps - self.steps - 1) * window + 1
            check_enough(
                batches,
                self.bag_size,
                self.steps * window,
                ordinary,
                None if passes in (None, -1) else passes,
            )
        progress = trainer.fit_loop.epoch_loop.batch_progress
        epochs = trainer.fit_loop.epoch_progress
        own_position = trainer.datamodule is not None and is_overridden(
            "load_state_dict", trainer.datamodule, L.LightningDataModule
        )
        return FoldedLoader(
            loader,
            self.bag_size,
            self.superposed,
            accumulate=lambda: trainer.accumulate_grad_batches,
            done=lambda: (trainer.global_step, progress.current.processed),
            epoch=lambda: epochs.current.processed,
            skip_seen=self.skip_seen and not own_position,
        )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stand in for the model's forward, once it is converted, sharded and restored."""
        models = trainable_causal_lms(pl_module)
        if len(models) != 1:
            raise ValueError(
                f"{type(pl_module).__name__} holds {len(models)} trainable Hugging Face causal "
                "LMs: TokenSuperposition works on exactly one, kept as an attribute"
            )
        self._check_restored()
        self._meter.start(pl_module.device)
        self._forward = BagForward(models[0], self._meter.observe)
        if self.weights is not None:
            self.weights = self.weights.to(pl_module.device)
        loop = trainer.fit_loop
        if loop._combined_loader_states_to_load and loop._data_fetcher is not None:
            # The loader was asked for before the checkpoint was read, for example for
            # trainer.estimated_stepping_batches: Lightning leaves its state unread then.
            loop._load_combined_loader_states()
            iter(loop._data_fetcher)
        at_end, combined = loop.epoch_loop.batch_progress.is_last_batch, loop._combined_loader
        if at_end and combined is not None and isinstance(combined.flattened[0], FoldedLoader):
            begin_next_pass(loop)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the phase of this micro-batch."""
        assert self._forward is not None
        self._meter.clock.go_on()
        self._step = trainer.global_step
        before = self._forward.settings
        self._forward.settings = self._settings(trainer, batch)
        if before is not None and self._forward.settings is None:
            rank_zero_info(f"TokenSuperposition: step {self._step}, single tokens from here on")

    def _settings(self, trainer: Any, batch: Any) -> BagSettings | None:
        if not self.superposed(trainer.global_step):
            return None
        row_length = None
        loaders = trainer.fit_loop._combined_loader.flattened
        if not self.contiguous and isinstance(loaders[0], FoldedLoader):
            length = sequence_length(batch)
            row_length = None if length is None else length // self.bag_size
        return BagSettings(self.bag_size, self.weights, self.separator, row_length)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log a row each ``log_every_n_steps`` steps, and at the end of phase 1."""
        step, every = trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if step == self._step or not (step == self.steps or (every and step % every == 0)):
            return
        superposed = self.superposed(self._step)
        row = self._meter.flush(trainer.strategy, superposed)
        # Not through the module's log, which would repeat phase 1's last loss all through phase 2.
        for logger in trainer.loggers:
            logger.log_metrics({"tst/phase": 1.0 if superposed else 2.0, **row}, step=step - 1)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock until the next micro-batch."""
        self._meter.clock.stop()

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Stop the clock until the next micro-batch: whoever saves writes a file now."""
        self._meter.clock.stop()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the model its own forward back."""
        self._remove(trainer)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Give the model its own forward back."""
        self._remove(trainer)

    def _remove(self, trainer: L.Trainer) -> None:
        if self._forward is not None:
            self._forward.remove()
            self._forward = None
        trainer.strategy.__dict__.pop("process_dataloader", None)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: where the switch is."""
        return {"bag_size": self.bag_size, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember where the run that is resumed has its switch."""
        self._restored = state_dict

    def _check_restored(self) -> None:
        if not self._restored:
            return
        saved, steps = self._restored["bag_size"], self._restored["steps"]
        if saved != self.bag_size:
            raise ValueError(
                f"the checkpoint was trained with bag_size={saved} and cannot go on with "
                f"bag_size={self.bag_size}"
            )
        if steps != self.steps:
            rank_zero_warn(
                f"the checkpoint's superposed phase has {steps} steps, and ratio x max_steps is "
                f"now {self.steps}: the checkpoint's count stands"
            )
            self.steps = steps


def begin_next_pass(loop: Any) -> None:
    """Let a run that was saved behind the last batch of a pass over the data go on with the next.

    Lightning does so where a loader has a length. Without one its count of batches goes on, so that
    windows of gradient accumulation begin at other batches than in the uninterrupted run.

    Args:
        loop: the Trainer's fit loop, which has read the checkpoint and not yet begun.
    """
    steps, passes = loop.epoch_loop, loop.epoch_progress
    if steps.batch_progress.total.completed < steps.batch_progress.total.processed:
        steps.batch_progress.increment_completed()
        steps._batches_that_stepped += 1
    if passes.total.processed < passes.total.started:
        passes.increment_processed()
    if passes.total.completed < passes.total.processed:
        passes.increment_completed()
    steps.restarting = False
    loop._restarting = loop._resuming_from_checkpoint = False
    loop.reset_restart_stage()
    steps.reset_restart_stage()
