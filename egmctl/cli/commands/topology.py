"""``egmctl topology``: this machine's NUMA nodes and GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from egmctl.errors import UsageError
from egmctl.units import format_size

if TYPE_CHECKING:
    from egmctl.cli.output import Output
    from egmctl.topology import Topology

__all__ = ["EXAMPLES", "load", "run"]

EXAMPLES = """
egmctl topology
egmctl topology --save tray.json       save it, to plan for this machine elsewhere
egmctl topology --from tray.json       show a saved one
egmctl topology --json | jq .gpus
"""


def run(
    context: typer.Context,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write what was found to FILE.", show_default=False)
    ] = None,
    saved: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Show a saved topology instead of this machine's."),
    ] = None,
    sysfs_root: Annotated[
        Path | None,
        typer.Option("--sysfs-root", metavar="DIR", help="Read DIR as if it were /sys, and nothing else."),
    ] = None,
) -> None:
    """Show this machine's NUMA nodes and GPUs, or save them.

    Lists every NUMA node with its CPUs, its memory and whether a pool can use it, and every visible GPU with its PCI
    address, the CPU NUMA node nearest to it and which source said so.
    """
    output: Output = context.obj
    topology = load(saved, sysfs_root)
    if save is not None:
        from egmctl.topology import save_topology

        save_topology(topology, save)
        output.note(f"saved to {save}")
    for warning in topology.warnings:
        output.warn(warning)
    output.emit("topology", topology.to_json(), lambda: _show(output, topology))


def load(saved: Path | None, sysfs_root: Path | None) -> Topology:
    """The topology meant by ``--from``/``--topology`` and ``--sysfs-root``; this machine's without either."""
    from egmctl.topology import load_topology, read_topology

    if saved is not None and sysfs_root is not None:
        raise UsageError(
            "a saved topology and --sysfs-root exclude each other",
            hint="give the one that describes the machine you mean",
        )
    return load_topology(saved) if saved is not None else read_topology(sysfs_root)


def _show(output: Output, topology: Topology) -> None:
    name = topology.hostname or "unknown host"
    room = "" if topology.headroom is None else f", {format_size(topology.headroom)} to be had in all"
    output.line(f"{name} ({topology.origin}){room}")
    output.line()
    output.table(
        ("node", "role", "cpus", "memory", "free", "huge pages free"),
        [
            (
                node.id,
                node.role,
                node.cpu_list or "-",
                format_size(node.memory_total),
                format_size(node.memory_free),
                ", ".join(f"{count} x {format_size(size)}" for size, count in sorted(node.huge_pages.items()) if count)
                or "-",
            )
            for node in topology.nodes
        ],
        right=(0, 3, 4),
    )
    output.line()
    if not topology.gpus:
        output.line("no GPU is visible")
        return
    output.table(
        ("gpu", "name", "pci address", "node", "said by"),
        [
            (gpu.index, gpu.name, gpu.bdf, "?" if gpu.numa_node is None else gpu.numa_node, gpu.source)
            for gpu in topology.gpus
        ],
        right=(0, 3),
    )
    for gpu in topology.gpus:
        if gpu.note:
            output.line(f"gpu {gpu.index}: {gpu.note}")
