"""The folders of an installation, private from the start."""

from __future__ import annotations

from egmctl.paths import Paths, make_private_dir
from egmctl.steps import step

__all__ = ["prepare"]


def prepare(paths: Paths) -> None:
    """Make the state and runtime folders. Raises `PreflightError` when one cannot be had, or is not ours alone."""
    with step("provider.folders"):
        make_private_dir(paths.state)
        if paths.runtime.parent.name.startswith("egmctl"):
            # In /tmp anybody could have made the folder above before us, and would own what lies in it.
            make_private_dir(paths.runtime.parent)
        make_private_dir(paths.runtime)
