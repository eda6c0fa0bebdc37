"""What the recipes of all kinds check alike: pairs of a message and whether it is no mistake."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def positive(recipe: Any, sections: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Numbers that must be above 0 where they are not null; section -> its keys, in words."""
    for section, keys in sections.items():
        for key in keys.split():
            value = getattr(getattr(recipe, section), key)
            yield f"{section}.{key} must be above 0, not {value}", value is None or value > 0


def one_of(recipe: Any, choices: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, bool]]:
    """Keys "section.key" that have a list of values."""
    for key, allowed in choices.items():
        section, name = key.split(".")
        value = getattr(getattr(recipe, section), name)
        yield f"{key} must be one of {', '.join(allowed)}, not {value!r}", value in allowed


def decay_check(key: str, decay: float | None, warmup: float) -> tuple[str, bool]:
    """The fall of the learning rate must fit behind a warm-up over the part `warmup` of a run."""
    return (
        f"{key} must be in [0, {1 - warmup:g}], as the warm-up takes {warmup:g} of the steps, "
        f"not {decay}",
        decay is None or 0 <= decay <= 1 - warmup,
    )
