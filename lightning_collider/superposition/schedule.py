"""The learning rate of a superposed run: one warm-up, stable, decay schedule over both phases."""

from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class WarmupStableDecay(LambdaLR):
    """Linear warm-up, then the full rate, then linear decay over the last part of the run.

    Step 0 has 1/warmup_steps of the rate, and a step numbered ``steps`` would have none. (That is
    why it is not transformers' ``get_wsd_schedule``, whose first step has a rate of 0.)
    The paper's is 2,000 steps of warm-up and a decay over the last 10 % (arXiv 2605.06546).

    Args:
        optimizer: whose rates are scaled.
        steps: optimizer steps of the whole run, both phases: ``Trainer(max_steps=...)``.
        warmup_steps: optimizer steps of the warm-up.
        decay: part of the steps over which the rate falls, in [0, 1].
        last_epoch: see torch's schedulers.

    Raises:
        ValueError: warm-up and decay do not fit into the steps.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        steps: int,
        warmup_steps: int = 2000,
        decay: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay is a part of all steps and must be in [0, 1], got {decay}")
        decay_steps = int(decay * steps + 0.5)
        if warmup_steps < 0 or warmup_steps + decay_steps > steps:
            raise ValueError(
                f"{warmup_steps} steps of warm-up and {decay_steps} of decay do not fit into "
                f"{steps} steps: use fewer of them"
            )
        # No attributes: a scheduler's state would bring an old run's length back on resume.
        factor = partial(
            rate_factor, steps=steps, warmup_steps=warmup_steps, decay_steps=decay_steps
        )
        super().__init__(optimizer, factor, last_epoch)


def rate_factor(step: int, steps: int, warmup_steps: int, decay_steps: int) -> float:
    """Rate of optimizer step ``step`` (0 is the first) as a part of the full rate."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    left = max(0, steps - step)
    return min(1.0, left / decay_steps) if decay_steps else 1.0
