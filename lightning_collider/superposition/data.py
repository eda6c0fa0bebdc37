"""Where sequences of s x L tokens come from: s batches of the user's loader become one.

In the superposed phase ``FoldedLoader`` takes s batches (B, L) at a time and lays their s B rows
out as B rows of s L tokens, s neighbouring rows in each. From a loader in order over packed text,
where neighbouring rows continue each other, that is the text itself. Behind the switch it hands
the loader's batches on as they are.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from torch import Tensor


def fold(batches: list[Any]) -> Any:
    """One batch of s times longer sequences from s batches.

    Args:
        batches: s batches of the same structure: tensors, or mappings, tuples and lists of them.
            Tensors (B, L, ...) with the sequence length of the first tensor of that kind become
            (B, s L, ...), others (B, ...) become (B, s, ...); what is no tensor becomes a list.

    Returns:
        The batch. Rows of unequal batches that do not fill a last long row are left out.

    Raises:
        ValueError: sequences of different lengths.
    """
    return _fold(batches, len(batches), sequence_length(batches[0]))


def sequence_length(batch: Any) -> int | None:
    """L of a batch: the second dimension of ``input_ids``, else of the first tensor with one."""
    if isinstance(batch, Tensor):
        return batch.shape[1] if batch.dim() >= 2 else None
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return sequence_length(batch["input_ids"])
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(batch, Mapping | list | tuple):
        return None
    return next((n for n in map(sequence_length, parts) if n is not None), None)


def _fold(parts: list[Any], count: int, length: int | None) -> Any:
    first = parts[0]
    if isinstance(first, Tensor) and first.dim() > 0:
        if any(part.shape[1:] != first.shape[1:] for part in parts):
            raise ValueError(
                "batches have different sequence lengths "
                f"({sorted({tuple(part.shape) for part in parts})}) and cannot be joined to longer "
                "sequences: pack or pad to one length"
            )
        rows = torch.cat(parts)
        n_long = rows.shape[0] // count
        rows = rows[: n_long * count]
        if first.dim() >= 2 and first.shape[1] == length:
            return rows.reshape(n_long, count * first.shape[1], *first.shape[2:])
        return rows.reshape(n_long, count, *first.shape[1:])
    if isinstance(first, Mapping):
        folded = {key: _fold([part[key] for part in parts], count, length) for key in first}
        return type(first)(folded)  # type: ignore[call-arg]
    if isinstance(first, list | tuple):
        folded_items = [_fold(list(items), count, length) for items in zip(*parts, strict=True)]
        return folded_items if isinstance(first, list) else tuple(folded_items)
    return list(parts)


class FoldedLoader:
    """A loader whose batches are s times longer in the superposed phase.

    Lightning fetches a batch before the step before it is done, so the phase of a batch follows
    from its number in the epoch, not from the step that is current. It has no length, for the
    length of an epoch depends on where in it the switch is.

    Its state in a checkpoint is the number of the loader's batches that trained steps have used. On
    resume these are read and thrown away, which is exact for any loader that gives the same
    batches in the same order again.

    Args:
        loader: the user's, already with a sampler for this rank.
        bag_size: s.
        superposed: whether an optimizer step, by its number, is in the superposed phase.
        accumulate: how many micro-batches make an optimizer step now.
        done: (optimizer steps done, micro-batches of this epoch done) now.
        epoch: number of the pass over the data now, for the loader's sampler.
        skip_seen: throw away what was used before a resume; False: the loader itself begins behind
            it.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        bag_size: int,
        superposed: Callable[[int], bool],
        accumulate: Callable[[], int],
        done: Callable[[], tuple[int, int]],
        epoch: Callable[[], int],
        skip_seen: bool = True,
    ) -> None:
        self.loader = loader
        self.bag_size = bag_size
        self.superposed = superposed
        self.accumulate = accumulate
        self.done = done
        self.epoch = epoch
        self.skip_seen = skip_seen
        self.resume = (0, 0)  # micro-batches and loader's batches of this epoch to begin behind
        self._used: deque[tuple[int, int]] = deque([(0, 0)])
        self._exhausted = False

    @property
    def sampler(self) -> Any:
        """The loader's, for Lightning to tell it the epoch."""
        return getattr(self.loader, "sampler", None)

    @property
    def batch_sampler(self) -> Any:
        """The loader's, for Lightning to tell it the epoch."""
        return getattr(self.loader, "batch_sampler", None)

    def __iter__(self) -> Iterator[Any]:
        number, used = self.resume
        self.resume = (0, 0)
        self._used, self._exhausted = deque([(number, used)], maxlen=4), False
        first_step = self.done()[0] - number // self.accumulate()
        # On resume Lightning fetches the first batch before it tells the sampler its epoch.
        _set_sampler_epoch(self.loader, self.epoch())
        batches = iter(self.loader)
        if self.skip_seen:
            for _ in islice(batches, used):
                pass
        while True:
            step = first_step + number // self.accumulate()
            count = self.bag_size if self.superposed(step) else 1
            parts = list(islice(batches, count))
            if len(parts) < count:
                self._exhausted = True
                return
            number, used = number + 1, used + count
            self._used.append((number, used))
            yield fold(parts) if self.superposed(step) else parts[0]

    def state_dict(self) -> dict[str, int]:
        """Micro-batches of this epoch that were trained on, and the loader's batches in them."""
        trained = self.done()[1]
        if self._exhausted and trained >= self._used[-1][0]:
            return {"micro_batches": 0, "batches": 0}  # the next epoch is to come
        used = dict(self._used)
        assert trained in used, (trained, used)
        return {"micro_batches": trained, "batches": used[trained]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next iteration behind a saved position."""
        self.resume = (state["micro_batches"], state["batches"])


def check_enough(
    batches: int, bag_size: int, superposed: int, ordinary: int, passes: int | None
) -> None:
    """Raise ValueError when a loader has too few batches for the run.

    Args:
        batches: of the loader in one pass.
        bag_size: s, the loader's batches in one micro-batch of the superposed phase.
        superposed, ordinary: micro-batches that the two phases need.
        passes: over the loader that the run may take, or None for any number.
    """
    needed = bag_size * superposed + ordinary
    too_few = batches < bag_size if passes is None else passes * batches < needed
    if superposed and too_few:
        raise ValueError(
            f"the data are too short for sequences of {bag_size} times the length: the run needs "
            f"{needed} of the loader's batches ({bag_size} x {superposed} superposed and "
            f"{ordinary} ordinary), and there are {batches} in a pass and "
            f"{'any number of' if passes is None else passes} passes. Use more data, fewer steps, "
            f"or a smaller bag_size or ratio"
        )
