"""A clock for speeds: it stands still while something else than training goes on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds that went by while it ran; it runs from the start."""

    def __init__(self) -> None:
        self._before = 0.0  # up to the newest stop
        self._since: float | None = time.perf_counter()  # None while it stands

    @property
    def seconds(self) -> float:
        """Time so far, without the stops."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._before + running

    def restart(self) -> None:
        """Count from zero; a clock that stands goes on standing."""
        self._before = 0.0
        if self._since is not None:
            self._since = time.perf_counter()

    def stop(self) -> None:
        """Stand still until `go_on`."""
        self._before, self._since = self.seconds, None

    def go_on(self) -> None:
        """Run again, where it stood."""
        if self._since is None:
            self._since = time.perf_counter()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stand still inside, also if it is restarted there; then as before."""
        running = self._since is not None
        self.stop()
        try:
            yield
        finally:
            if running:
                self.go_on()
