"""Where a command writes: checked before its work, which may take minutes or hours."""

from pathlib import Path


def check_output(path: Path, replaces: str | None = None) -> None:
    """Make the folder of a file that a command will write.

    Args:
        replaces: suffix of the files that it makes anew each time, and so may overwrite.

    Raises:
        FileExistsError: there is something of that name which is not to be overwritten.
        OSError: the folder cannot be made.
    """
    if path.is_dir() or (path.exists() and path.suffix != replaces):
        raise FileExistsError(
            f"{path} exists and is not overwritten: name another file"
            + (f", or one that ends in {replaces}" if replaces else "")
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot write to {path.parent} ({error.strerror})") from error
