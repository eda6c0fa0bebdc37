"""The folder of a run: it belongs to one recipe and to one process at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from lightning_collider.training.config import AnyRecipe, to_dict, to_yaml
from lightning_collider.training.files import write_text

LOCK, RECIPE = ".lock", "recipe.yaml"
# Keys with which a run may go on at other values: they change no number of a healthy run.
FREE_KEYS = (
    "out",
    "data.folder",
    "data.verify",
    *(
        f"{section}.{key}"  # a training recipe's and a comparison's
        for section in ("trainer", "train")
        for key in ("on_nan", "on_spike", "spike_factor", "log_every", "checkpoint_every")
    ),
    "trainer.keep_checkpoints",
    "trainer.validation_batches",
)


@contextmanager
def claimed(recipe: AnyRecipe) -> Iterator[Path]:
    """Hold the recipe's run folder for this process, making it if it is not there.

    A folder with nothing but a recipe, as a recipe with a mistake leaves it, is anyone's.

    Raises FileExistsError when the folder holds the run of another recipe (the keys that differ are
    named) or files that are no run at all, and RuntimeError while another process works in it.
    """
    folder = Path(recipe.out)
    recipe_file = folder / RECIPE
    if folder.exists() and not recipe_file.is_file():
        if not folder.is_dir() or any(path.name != LOCK for path in folder.iterdir()):
            raise FileExistsError(f"{folder} holds something else than a run: use out=OTHER")
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RuntimeError(f"another process works in {folder}: wait, or use out=OTHER") from error
    except OSError as error:
        raise OSError(
            f"cannot write to {folder} ({error.strerror}): use out=OTHER, or change its permissions"
        ) from error
    try:
        if any(path.name not in (LOCK, RECIPE) for path in folder.iterdir()):
            _refuse_other_recipe(recipe, recipe_file)
        else:
            write_text(recipe_file, to_yaml(recipe))
        yield folder
    finally:
        lock.release()


def _refuse_other_recipe(recipe: AnyRecipe, file: Path) -> None:
    """Raise FileExistsError with the differences if `file` is another recipe than this one."""
    wanted, found = _flat(to_dict(recipe)), _flat(OmegaConf.to_container(OmegaConf.load(file)))
    for keys in (wanted, found):
        for key in FREE_KEYS:
            keys.pop(key, None)
    different = [
        f"  {key}: {found.get(key, 'absent')} there, {wanted.get(key, 'absent')} here"
        for key in sorted(wanted.keys() | found.keys())
        if found.get(key) != wanted.get(key)
    ]
    if different:
        raise FileExistsError(
            f"{file.parent} holds a run of another recipe and is left as it is:\n"
            + "\n".join(different)
            + "\nGive this run a folder of its own with out=OTHER."
        )


def _flat(nested: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted keys."""
    if not isinstance(nested, dict):
        return {prefix[:-1]: nested}
    flat: dict[str, Any] = {}
    for name, child in nested.items():
        flat |= _flat(child, f"{prefix}{name}.")
    return flat
