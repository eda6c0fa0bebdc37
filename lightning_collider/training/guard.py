"""What to do about a step whose gradient is not to be trusted: not finite, or a spike."""

import math
import statistics
from collections import deque
from collections.abc import Iterable

REMEMBERED = 64  # norms that a spike is compared with
NOT_FINITE = "is not finite"
FEWEST = 16  # before so many steps nothing counts as a spike


class GradientGuard:
    """Judges the norm of each optimizer step's gradient.

    Args:
        on_nan: "stop" or "skip" for a norm that is not finite.
        on_spike: "warn", "stop" or "skip" for a norm above `spike_factor` times the median of the
            last REMEMBERED steps.
        spike_factor: None: nothing is a spike.
    """

    def __init__(self, on_nan: str, on_spike: str, spike_factor: float | None):
        self.on_nan, self.on_spike, self.factor = on_nan, on_spike, spike_factor
        self._norms: deque[float] = deque(maxlen=REMEMBERED)

    def judge(self, norm: float) -> tuple[str, str] | None:
        """What is wrong with a step of this norm, and the policy for it; None: nothing.

        Spikes are remembered too, so that a new level is soon the normal one.
        """
        if not math.isfinite(norm):
            return NOT_FINITE, self.on_nan
        usual = statistics.median(self._norms) if len(self._norms) >= FEWEST else None
        self._norms.append(norm)
        if self.factor is None or usual is None or norm <= self.factor * usual:
            return None
        return (
            f"has a norm of {norm:.3g}, and the last {len(self._norms) - 1} had a median of "
            f"{usual:.3g}",
            self.on_spike,
        )

    def state(self) -> list[float]:
        """For a checkpoint."""
        return list(self._norms)

    def restore(self, norms: Iterable[float]) -> None:
        self._norms = deque(norms, maxlen=REMEMBERED)
