"""The stand-in for NVML in this very process, for tests whose backend runs here. The loader looks for libraries only as
LD_LIBRARY_PATH was when the process began; but what is loaded already under the same name is found."""

from __future__ import annotations

import _ctypes
import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pynvml

from tests.gpu.node import Node
from timeslice.backends.nvml import Nvml


@contextmanager
def nvml_of(node: Node) -> Iterator[None]:
    """Everything is unloaded again, so that other tests find no GPU here. STUB_GPU_DIR is the caller's to set."""
    _forget()
    loaded = ctypes.CDLL(str(node.libraries / "libnvidia-ml.so.1"))
    try:
        yield
    finally:
        _forget()
        _ctypes.dlclose(loaded._handle)


def _forget() -> None:
    """As if pynvml had never been asked."""
    Nvml._ready = False
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml._nvmlLib_refcount = 0
    if pynvml.nvmlLib is not None:
        _ctypes.dlclose(pynvml.nvmlLib._handle)
        pynvml.nvmlLib = None
