"""Hiding other libraries' notes and warnings, for as long as a block runs and no longer."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Warnings that would mislead, or that are for Lightning's own developers.
MISLEADING = (
    ".*does not have many workers",  # reading a memory-mapped array needs none
    ".*your dataloader is not resumable",  # PackedData is
    ".*exists and is not empty",  # the checkpoints that this run goes on from
    ".*no `val_dataloader`",  # an arm is scored behind its last step
    ".*LeafSpec.* is deprecated",
)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide Lightning's notes on devices, its advertisements, and warnings that would mislead."""
    with (
        warnings.catch_warnings(),
        logger_level("lightning.pytorch", logging.WARNING),
        # Where the package under its older name is imported, too, notes go through its logger.
        logger_level("pytorch_lightning", logging.WARNING),
    ):
        for message in MISLEADING:
            warnings.filterwarnings("ignore", message)
        yield


@contextmanager
def logger_level(name: str, level: int) -> Iterator[None]:
    """Give a logger another level; it has its own back at the end."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
