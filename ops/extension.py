"""Compiles the C++ extension with ninja, once per torch version and source, and loads it.

The shared object lives in a cache folder named by what it depends on, so a new torch or an edited
source never meets an old binary. A file lock lets one process compile while other ranks wait; the
finished folder appears by one rename, so a killed build leaves nothing half made.
"""

import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock

NAME = "lightning_collider_ops"
SOURCE_DIR = Path(__file__).parent
# ATen's vector headers, by the instruction set that torch itself found on this machine.
VECTOR_FLAGS = {
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
    "AVX512": ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mf16c"],
}


def compiler_flags() -> list[str]:
    """Compiler flags for this machine."""
    found = ["-O3"]
    if sys.platform == "linux":
        found.append("-fopenmp")  # without it at::parallel_for runs on one thread
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in VECTOR_FLAGS:
        found += [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]
        found += VECTOR_FLAGS[capability]
    return found


FLAGS = compiler_flags()
_loaded: ModuleType | None = None  # what this process computes with


def cache_dir() -> Path:
    """Folder of compiled extensions: ``$LIGHTNING_COLLIDER_CACHE``, else the user's cache."""
    override = os.environ.get("LIGHTNING_COLLIDER_CACHE")
    if override:
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lightning_collider"


def source_files() -> list[Path]:
    """C++ sources and headers, in a fixed order."""
    return sorted([*SOURCE_DIR.glob("*.cpp"), *SOURCE_DIR.glob("*.h")])


def build_key() -> str:
    """Names a binary: torch version, Python ABI, machine, and a hash of flags and sources."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in source_files():
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    abi = f"cp{sys.version_info.major}{sys.version_info.minor}-{platform.machine()}"
    return f"torch{torch.__version__}-{abi}-{digest.hexdigest()[:16]}"


def binary_path() -> Path:
    """Where the extension of this torch and these sources is, or will be."""
    return cache_dir() / build_key() / f"{NAME}.so"


def build(verbose: bool = False) -> Path:
    """Compile the extension unless the cache already holds it.

    Safe when several ranks call it at once: one compiles, the others wait for it. A process that
    has loaded it keeps what it loaded, also when the sources have changed since.

    Returns:
        Path of the shared object.

    Raises:
        RuntimeError: no C++ compiler, or the compiler failed; says what to do.
    """
    if _loaded is not None:
        return Path(str(_loaded.__file__))
    binary = binary_path()
    if binary.exists():
        return binary
    binary.parent.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{binary.parent}.lock"):
        if not binary.exists():
            _compile_into(binary.parent, verbose)
    return binary


def write_units(folder: Path) -> list[str]:
    """Write the files to compile: each includes a part of the sources.

    Nearly all of the compile time is torch's headers, so few units are several times faster than
    one a source; two keep two cores busy.
    """
    sources = [path for path in source_files() if path.suffix == ".cpp"]
    units = []
    for i in range(2):
        unit = folder / f"unit{i}.cpp"
        unit.write_text("".join(f'#include "{path}"\n' for path in sources[i::2]))
        units.append(str(unit))
    return units


def _compile_into(folder: Path, verbose: bool) -> None:
    # Imported here: cpp_extension takes half a second that a cached start need not pay.
    from torch.utils import cpp_extension

    _check_tools(cpp_extension.get_cxx_compiler())
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        cpp_extension.load(
            NAME,
            write_units(scratch),
            extra_cflags=FLAGS,
            extra_ldflags=["-fopenmp"] if "-fopenmp" in FLAGS else [],
            build_directory=str(scratch),
            verbose=verbose,
        )
        scratch.rename(folder)
    except (RuntimeError, OSError) as error:
        raise RuntimeError(
            f"lightning-collider could not compile its C++ operators: {error}\n"
            "They need a C++17 compiler, Python's headers and ninja. To train without them, slowly "
            "and exactly, use engine='oracle'."
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_tools(compiler: str) -> None:
    if shutil.which(compiler) is None:
        raise RuntimeError(
            "lightning-collider compiles its C++ operators on first use and found no compiler "
            f"named {compiler!r}. Install one (Debian, Ubuntu: apt install g++; Fedora: dnf "
            "install gcc-c++; macOS: xcode-select --install), or name yours in the environment "
            "variable CXX. To train without it, slowly and exactly, use engine='oracle'."
        )
    # pip puts ninja beside the interpreter, which need not be on PATH.
    scripts = str(Path(sys.executable).parent)
    if shutil.which("ninja") is None and scripts not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = f"{scripts}{os.pathsep}{os.environ['PATH']}"


def loaded() -> ModuleType | None:
    """The compiled module, where this process has imported it."""
    return _loaded


def load() -> ModuleType:
    """Build if needed, and import the compiled module."""
    global _loaded
    if _loaded is not None:
        return _loaded
    binary = build()
    spec = importlib.util.spec_from_file_location(NAME, binary)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.__dict__["triton_library"] = _register_triton()
    module.__file__ = str(binary)  # the scratch folder's, where this process has compiled it
    sys.modules[NAME] = _loaded = module
    return module


def _register_triton() -> torch.library.Library | None:
    """Give CUDA the Triton kernels, where there is a GPU and Triton (torch for CUDA brings it).

    ``LIGHTNING_COLLIDER_TRITON=0`` leaves them out. They are registered while the result lives.
    """
    wanted = os.environ.get("LIGHTNING_COLLIDER_TRITON", "1") != "0"
    if not (wanted and torch.cuda.is_available() and importlib.util.find_spec("triton")):
        return None
    from lightning_collider.ops import triton_kernels

    library = torch.library.Library("lightning_collider", "IMPL")
    triton_kernels.register(library, "CUDA")
    return library
