"""Quieting other libraries ends with its block."""

import logging
import warnings

import pytest

from lightning_collider.training.quiet import logger_level, quiet

LIGHTNING = logging.getLogger("lightning.pytorch")


def test_lightning_is_as_loud_as_before_even_after_an_error():
    before, filters = LIGHTNING.level, list(warnings.filters)
    with pytest.raises(RuntimeError), quiet():
        assert not LIGHTNING.isEnabledFor(logging.INFO)
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("The 'train_dataloader' does not have many workers", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
        assert [str(w.message) for w in caught] == ["something else"]
        raise RuntimeError
    assert LIGHTNING.level == before and warnings.filters == filters


def test_a_loggers_level_comes_back():
    logger = logging.getLogger("some.library")
    logger.setLevel(logging.INFO)
    with logger_level("some.library", logging.ERROR):
        assert not logger.isEnabledFor(logging.WARNING)
    assert logger.level == logging.INFO


def test_notes_are_hidden_also_through_the_older_packages_logger(caplog):
    older = logging.getLogger("pytorch_lightning.utilities.rank_zero")
    with caplog.at_level(logging.INFO, "pytorch_lightning"):
        with quiet():
            older.info("hidden")
        older.info("shown")
    assert caplog.messages == ["shown"]
