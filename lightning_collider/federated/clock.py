"""The clocks a server runs by: this one, or the simulator's."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since the start of the process or simulation."""

    def now(self) -> float:
        """Seconds since the start."""

    def wait(self, seconds: float) -> None:
        """Return when something may have happened, after `seconds` at the latest."""


class WallClock:
    """Real time."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._start

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)
