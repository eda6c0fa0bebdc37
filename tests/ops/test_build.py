"""Building the extension: cached, safe for several ranks, and clear where it cannot work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_collider.ops import extension

RACE = """
import sys
from pathlib import Path
import lightning_collider.ops.extension as b
b.FLAGS = ["-O0"]
b.source_files = lambda: sorted(Path(sys.argv[1]).glob("*.cpp"))
b.build()
module = b.load()
assert module.triton_library is None and b.load() is module  # not what torch imported to compile it
b.source_files = list
assert str(b.build()) == module.__file__ and b.build().is_file()
print(module.answer())
"""

TINY = """
#include <pybind11/pybind11.h>
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("answer", [] { return 42; }); }
"""


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "tiny.cpp").write_text(TINY)
    return tmp_path / "src"


def start(sources: Path, cache: Path, **environment) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", RACE, str(sources)],
        env={**os.environ, "LIGHTNING_COLLIDER_CACHE": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ranks_that_start_at_once_build_once(sources, tmp_path):
    ranks = [start(sources, tmp_path / "cache") for _ in range(3)]
    for rank in ranks:
        out, err = rank.communicate(timeout=300)
        assert rank.returncode == 0 and out.strip() == "42", err
    folders = [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]
    assert len(folders) == 1  # no half-made folder is left beside it
    # A binary that is there is used: no compiler is needed any more.
    again = start(sources, tmp_path / "cache", CXX="no-such-compiler")
    assert again.communicate(timeout=120)[0].strip() == "42"


def test_a_process_keeps_what_it_has_loaded(monkeypatch, tmp_path):
    """A long run calls build() again for each of its parts: edited sources must not stop it."""
    loaded = Path(extension.load().__file__)
    edited = tmp_path / "linear.cpp"
    edited.write_text("this is no C++")
    monkeypatch.setattr(extension, "source_files", lambda: [edited])
    assert extension.build() == loaded and extension.load().__file__ == str(loaded)


def test_no_compiler_says_what_to_install(sources, tmp_path):
    rank = start(sources, tmp_path / "cache", CXX="no-such-compiler")
    _, err = rank.communicate(timeout=120)
    assert rank.returncode != 0
    for advice in ("no-such-compiler", "apt install g++", "engine='oracle'"):
        assert advice in err


def test_a_compiler_error_is_reported(sources, tmp_path):
    (sources / "tiny.cpp").write_text("this is no C++")
    rank = start(sources, tmp_path / "cache")
    _, err = rank.communicate(timeout=300)
    assert rank.returncode != 0 and "could not compile" in err and "engine='oracle'" in err
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]


def test_the_key_names_torch_and_follows_the_sources(monkeypatch, tmp_path):
    import torch

    key = extension.build_key()
    assert key.startswith(f"torch{torch.__version__}-") and key == extension.build_key()
    edited = tmp_path / "linear.cpp"
    edited.write_text("// edited")
    monkeypatch.setattr(extension, "source_files", lambda: [edited])
    assert extension.build_key() != key
    monkeypatch.setattr(extension, "FLAGS", ["-O0"])
    assert extension.build_key() != key
