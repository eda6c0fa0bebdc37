"""What is fetched from the Hugging Face hub by its name, and what to do when that fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def fetching(key: str, name: str, instead: str) -> Iterator[None]:
    """Raise OSError that says what to do when a name is neither local nor to be had from the hub.

    Args:
        key: of the recipe, for the message.
        name: what the libraries are asked for; errors about local folders pass as they are.
        instead: what to give instead.
    """
    try:
        yield
    except OSError as error:
        if Path(name).exists():
            raise
        reason = str(error).strip().split("\n")[0]
        raise OSError(
            f"{key}={name} is no local folder, and the hub did not give it ({reason}). Check the "
            f"name and the network, or give {instead}"
        ) from error
