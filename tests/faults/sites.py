"""All steps there are, read from the source, and those that the harness need not exercise, each with its reason."""

from __future__ import annotations

import ast
from pathlib import Path

import egmctl

__all__ = ["EXEMPT", "NO_HANG", "all_sites", "unexercised"]

EXEMPT: dict[str, str] = {
    "checks.imex.ask": "asked by doctor only, which changes nothing",
    "mooncake.admin.health": "asked by doctor only, which changes nothing",
    "mooncake.admin.keys": "asked by verify only, which changes nothing",
    "memory.shm.register": "a consumer's registration with CUDA",
    "memory.shm.unregister": "a consumer's registration with CUDA",
    "memory.shm.import_unmap": "a consumer's mapping; the Transfer Engine child ends without unmapping",
    "memory.cuda.import_unmap": "a consumer's mapping; the Transfer Engine child ends without unmapping",
    "memory.cuda.import_release": "a consumer's mapping; the Transfer Engine child ends without unmapping",
    "memory.cuda.import_free": "a consumer's mapping; the Transfer Engine child ends without unmapping",
    "memory.cuda.reserve_elsewhere": "fabric memory on a fixed port that had a pool before: tests/fabric, tests/memory",
    "memory.cuda.unreserve_offer": "a driver that offers what is to be avoided: tests/memory",
    "provider.remember": "before fabric memory is published on a fixed port: tests/fabric, tests/provider",
}

NO_HANG: dict[str, str] = {
    "provider.master.knock": "a host that drops packets cannot be had on loopback; the call has a limit of 2 s",
    "handshake.resolve": "the resolver's own time limit",
}


def all_sites(root: Path | None = None) -> dict[str, str]:
    """``{site: file:line}`` of every ``step("...")`` under ``egmctl``. A step whose site is no literal is an error,
    and so is a site that stands in two places."""
    found: dict[str, str] = {}
    root = root or Path(egmctl.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "step"):
                continue
            where = f"{path.relative_to(root.parent)}:{node.lineno}"
            first = node.args[0] if node.args else None
            if not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
                raise ValueError(f"{where}: the site of a step is no literal")
            if first.value in found:
                raise ValueError(f"{where}: {first.value} stands at {found[first.value]} already")
            found[first.value] = where
    return found


def unexercised(seen: set[str]) -> dict[str, str]:
    """Sites that no traced run has passed and no reason excuses, with their places."""
    return {site: where for site, where in all_sites().items() if site not in seen and site not in EXEMPT}
