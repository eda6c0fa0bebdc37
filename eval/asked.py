"""The items that `collider eval` asks a model without a corpus of its own (eval/tasks/heldout.py).

They are built-in text of a fixed seed, and the built-in sources of training recipes are built-in
text of another: unless these leave the items out, a model is scored on what it has learned.
"""

import functools
from collections.abc import Iterable, Iterator


def without_asked(texts: Iterable[str]) -> Iterator[str]:
    """Texts of a built-in source that are none of the items, in their order."""
    apart = asked_items()
    return (text for text in texts if text not in apart)


@functools.cache
def asked_items() -> frozenset[str]:
    """Problems with their answers, general documents and noise, each as a source has it whole.

    A question has one answer, so that no question of a problem here stands in another text.
    """
    # Takes a second, for datasets is imported with it.
    from lightning_collider.eval.tasks.heldout import general_texts, noise_texts, texts

    items = [kind(None)["test"]["text"] for kind in (texts, general_texts, noise_texts)]
    return frozenset(text for some in items for text in some)
