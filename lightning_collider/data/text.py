"""Documents of a source: local text, JSON lines or Parquet, a hub data set, or built-in text.

`datasets` reads the files and streams from the hub: it knows every format and compression in use,
and has to be installed for lm-eval anyway.
"""

import itertools
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

from pyarrow import ArrowInvalid

from lightning_collider.eval.asked import without_asked
from lightning_collider.training.hub import fetching
from lightning_collider.training.settings import SourceConfig
from lightning_collider.training.sources import (
    general_documents,
    generate_problems,
    noise_documents,
)

READERS = {"txt": "text", "md": "text", "jsonl": "json", "json": "json", "parquet": "parquet"}
BUILTIN = "builtin:"


def documents(source: SourceConfig, seed: int, skip: int = 0) -> Iterator[str]:
    """Texts of a source in a fixed order, without the first `skip`.

    Raises FileNotFoundError when a path matches nothing, ValueError for a file of unknown format or
    a column that the template names and the data lacks.
    """
    texts = _builtin(source, seed) if source.path.startswith(BUILTIN) else None
    if texts is not None:
        yield from itertools.islice(without_asked(texts), skip, source.max_documents)
        return
    files = local_files(source.path)
    records = _records(source, files)
    if source.max_documents is not None:
        records = records.take(source.max_documents)
    try:
        for record in records.skip(skip):
            yield _text(record, source)
    except ArrowInvalid as error:
        raise ValueError(f"{source.path} cannot be read ({error}): correct the file") from error


def local_files(path: str) -> list[str]:
    """Files that a path or pattern names, sorted; [] when it looks like the name of a hub data set.

    Raises FileNotFoundError for what looks like a local path and is none.
    """
    if Path(path).is_dir():
        found = [str(p) for p in Path(path).rglob("*") if p.suffix[1:] in READERS]
        if not found:
            raise FileNotFoundError(f"{path} holds no .{', .'.join(READERS)} file")
        return sorted(found)
    found = sorted(glob(path, recursive=True))
    is_name = path.count("/") <= 1 and not path.startswith((".", "/", "~"))
    if not found and (not is_name or Path(path).suffix[1:] in READERS):
        raise FileNotFoundError(f"no file matches {path}: correct data.sources.*.path")
    return found


def _records(source: SourceConfig, files: list[str]) -> Any:
    from datasets import load_dataset  # takes a second to import

    if not files:
        with fetching("data.sources.*.path", source.path, "local files"):
            return load_dataset(source.path, source.subset, split=source.split, streaming=True)
    kinds = {Path(f).suffix[1:] for f in files}
    if len(kinds) > 1 or not kinds <= READERS.keys():
        raise ValueError(
            f"{source.path} matches files ending in {sorted(kinds)}: name files of one kind out of "
            f"{', '.join(READERS)}"
        )
    reader = READERS[kinds.pop()]
    # A text file is one document; its lines are not.
    options = {"sample_by": "document"} if reader == "text" else {}
    return load_dataset(reader, data_files=files, split="train", streaming=True, **options)


def _text(record: dict[str, Any], source: SourceConfig) -> str:
    present = {name: "" if value is None else value for name, value in record.items()}
    try:
        return source.template.format(**present)
    except KeyError as error:
        raise ValueError(
            f"{source.path} has no column {error}: its columns are {sorted(record)}; correct "
            f"data.sources.*.template={source.template!r}"
        ) from error


def _builtin(source: SourceConfig, seed: int) -> Iterator[str]:
    name = source.path.removeprefix(BUILTIN)
    if name == "general":
        return iter(general_documents(seed))
    if name not in ("target", "noise"):
        raise ValueError(f"{source.path}: there are builtin:target, builtin:general, builtin:noise")
    if source.max_documents is None:
        raise ValueError(f"{source.path} is endless: set data.sources.*.max_documents")
    if name == "noise":
        return noise_documents(seed)
    return (problem.text for problem in generate_problems(seed))
