"""Builds the stand-ins of tests/gpu/stub with the machine's C compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent / "stub"

# what is built -> its source and how
PRODUCTS = {
    "libcuda.so.1": ("libcuda.c", ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")),
    "libnvidia-ml.so.1": ("nvml.c", ("-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1")),
    "cuda-checkpoint": ("cuda_checkpoint.c", ()),
}


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def build(folder: Path, cc: str) -> Path:
    """Everything there is a source for, in ``folder``: put it on LD_LIBRARY_PATH (and PATH) of a process."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (source, words) in PRODUCTS.items():
        if (SOURCES / source).exists():
            subprocess.run([cc, "-O1", "-Wall", "-Werror", *words, "-o", folder / name, SOURCES / source], check=True)
    return folder
