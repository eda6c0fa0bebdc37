"""Writes the Flower app of a recipe: a folder for `flwr run`, on one machine or on real sites."""

from pathlib import Path

from lightning_collider.federated.settings import FederatedRecipe
from lightning_collider.training.config import to_yaml

PROJECT = """\
# A Flower app, written by `collider federate`. Run it with `flwr run .`

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "Asynchronous federated training with lightning-collider"
license = "Apache-2.0"
dependencies = ["flwr>=1.42,<2", "lightning-collider[federated]"]

[tool.flwr.app]
publisher = "local"

[tool.flwr.app.components]
serverapp = "federation:server_app"
clientapp = "federation:client_app"

[tool.flwr.app.config]
"""
MODULE = '''\
"""The two apps; what they do is in recipe.yaml, which all sites must share."""

from pathlib import Path

from lightning_collider.federated.flower import apps

both = apps(Path(__file__).with_name("recipe.yaml").read_text())
server_app = both[0]  # Flower looks for these names without running this file
client_app = both[1]
'''


def write_app(recipe: FederatedRecipe, folder: Path) -> Path:
    """Write pyproject.toml, federation.py and recipe.yaml into a new folder, and return it.

    Raises FileExistsError for a folder that is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty and is left as it is: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(c if c.isalnum() else "-" for c in recipe.name.lower()).strip("-")
    files = {
        "pyproject.toml": PROJECT.format(name=name),
        "federation.py": MODULE,
        "recipe.yaml": to_yaml(recipe),
    }
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    return folder
