"""From YAML files and `key=value` words to a checked dataclass, whatever the recipe's kind.

A file takes keys from other recipes with `defaults: [NAME, ...]` at its top, later over earlier.
Every mistake is a ValueError that names the key; an unknown key is answered with the nearest one.
"""

import dataclasses
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import lightning_collider.recipes


def find_recipe(name_or_path: str) -> Path:
    """Path of a recipe given by name or by path; FileNotFoundError lists the names there are."""
    folder = Path(lightning_collider.recipes.__file__).parent
    for path in (folder / f"{name_or_path}.yaml", Path(name_or_path)):
        if path.is_file():
            return path
    names = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
    raise FileNotFoundError(
        f"no recipe {name_or_path!r}: give one of the names [{names}] or the path of a YAML file"
    )


def read_recipe(name_or_path: str, overrides: list[str]) -> DictConfig:
    """The keys of a recipe, of those it lists under `defaults`, and the overrides, unchecked."""
    given = _read_with_defaults(find_recipe(name_or_path), ())
    try:
        return OmegaConf.merge(given, *map(_parse_override, overrides))  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ValueError(f"recipe key {error.full_key!r}: {_first_line(error)}") from error


def to_object(kind: type, given: DictConfig, name: str) -> Any:
    """An instance of the dataclass `kind` with the given keys.

    Raises ValueError for a key that is unknown, missing or of the wrong type.
    """
    try:
        refuse_unknown_keys(kind, OmegaConf.to_container(given))
        merged = OmegaConf.merge(OmegaConf.structured(kind), given)
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise ValueError(
                f"recipe {name!r} lacks {', '.join(missing)}. Add the key, or start the "
                "recipe with `defaults: [quickstart]` to take what it lacks from there."
            )
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(f"recipe key {error.full_key!r}: {_first_line(error)}") from error


def refuse_unknown_keys(kind: type, given: Any) -> None:
    """Raise ValueError for the first key of nested dicts that the dataclass does not know."""
    known = list(_known_keys(kind, given))
    for key in _given_keys(given):
        if key not in known and not _inside_free_form(key, known):
            raise ValueError(f"unknown recipe key {key!r}; did you mean {nearest(key, known)!r}?")


def nearest(key: str, known: list[str]) -> str:
    """The known key most like `key`; the last part counts most, so a forgotten section is found."""

    def likeness(candidate: str) -> float:
        last = difflib.SequenceMatcher(None, key.split(".")[-1], candidate.split(".")[-1]).ratio()
        return 2 * last + difflib.SequenceMatcher(None, key, candidate).ratio()

    return max(known, key=likeness).removesuffix(FREE_FORM)


FREE_FORM = ".*"  # behind the name of a dict whose keys another library checks


def _inside_free_form(key: str, known: list[str]) -> bool:
    return any(k.endswith(FREE_FORM) and key.startswith(k.removesuffix("*")) for k in known)


def _known_keys(kind: Any, given: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys that `kind` allows; the keys of a dict come from `given`."""
    given = given if isinstance(given, dict) else {}
    kind = _without_none(kind)
    if dataclasses.is_dataclass(kind):
        children = get_type_hints(kind)
    elif getattr(kind, "__origin__", None) is dict:
        if get_args(kind)[1] is Any:
            yield prefix + "*"
            return
        children = {str(name): get_args(kind)[1] for name in given}
    else:
        return
    for name, child in children.items():
        yield prefix + name
        yield from _known_keys(child, given.get(name), f"{prefix}{name}.")


def _without_none(kind: Any) -> Any:
    """The dataclass of a section that may be null."""
    if type(None) not in get_args(kind):
        return kind
    return next((k for k in get_args(kind) if dataclasses.is_dataclass(k)), kind)


def _given_keys(given: Any, prefix: str = "") -> Iterator[str]:
    for name, value in given.items() if isinstance(given, dict) else ():
        yield f"{prefix}{name}"
        yield from _given_keys(value, f"{prefix}{name}.")


def _read_with_defaults(path: Path, seen: tuple[Path, ...]) -> DictConfig:
    """One YAML file merged over the recipes it lists under `defaults`, later over earlier."""
    if path.resolve() in seen:
        raise ValueError(f"{path}: its defaults lead back to itself")
    try:
        given = OmegaConf.load(path)
    except YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(given, DictConfig):
        raise ValueError(f"{path} must hold `key: value` lines")
    names = given.pop("defaults", ListConfig([]))
    if not isinstance(names, ListConfig):
        raise ValueError(
            f"{path}: defaults must be a list of recipes, as in defaults: [quickstart]"
        )
    parents = [_read_with_defaults(find_recipe(n), (*seen, path.resolve())) for n in names]
    merged = OmegaConf.merge(*parents, given)
    assert isinstance(merged, DictConfig)
    return merged


def _parse_override(override: str) -> DictConfig:
    key, equals, _ = override.partition("=")
    if not equals or not key:
        raise ValueError(f"override {override!r} must read key=value, for example train.steps=100")
    try:
        return OmegaConf.from_dotlist([override])
    except YAMLError as error:
        raise ValueError(f"override {override!r}: the value is not valid YAML") from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
