"""Loads what PyTorch's CPU wheel lacks to carry CUDA tensors; import this before torch, in a process of its
own."""

import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

TORCH = "2.13"  # whose private names tests/cuda leans on
HERE = Path(__file__).parent


def why_not() -> str | None:
    """Why the pretended device cannot be had here, None where it can."""
    version = importlib.metadata.version("torch")
    if not version.startswith(TORCH + "."):
        return f"the pretended CUDA device is written for torch {TORCH}, and this is {version}"
    return None if shutil.which("g++") else "the pretended CUDA device needs g++"


def load_hooks(folder: Path) -> ctypes.CDLL:
    """Builds cuda_guard.cpp into `folder`, unless it is there, and loads it before torch asks for CUDA's
    hooks."""
    torch = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    built = folder / "libcudaguard.so"
    if not built.exists():
        aside = folder / f"libcudaguard.{os.getpid()}.so"
        options = [
            "-O0",
            "-shared",
            "-fPIC",
            "-std=c++20",
            f"-I{torch}/include",
            f"-L{torch}/lib",
            "-lc10",
            "-ltorch_cpu",
        ]
        subprocess.run(["g++", str(HERE / "cuda_guard.cpp"), "-o", str(aside), *options], check=True)
        aside.replace(built)
    ctypes.CDLL(str(torch / "lib" / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(torch / "lib" / "libtorch_cpu.so"))
    return ctypes.CDLL(str(built))
