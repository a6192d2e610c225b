"""Where tests put stand-ins for what a machine without GPUs does not have.

``EGMCTL_SEAMS`` names functions (``module:function``, comma-separated) that every egmctl process calls once at its
start, before it touches anything: a model of the CUDA driver, a recorded NVML answer, a watcher of steps. It is for
tests alone, and gives nobody more than ``PYTHONPATH`` does.
"""

from __future__ import annotations

import importlib
import os

__all__ = ["load"]

_loaded = False


def load() -> None:
    """Call what ``EGMCTL_SEAMS`` names, once in this process."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    for name in filter(None, os.environ.get("EGMCTL_SEAMS", "").split(",")):
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function)()
