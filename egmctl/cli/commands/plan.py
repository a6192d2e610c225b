"""``egmctl plan``: what a spec asks of a machine, in bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from egmctl.errors import UsageError
from egmctl.units import format_size

if TYPE_CHECKING:
    from egmctl.cli.output import Output
    from egmctl.planning import Plan

__all__ = ["EXAMPLES", "run", "show"]

EXAMPLES = """
egmctl plan plans/dev-shm.toml
egmctl plan plans/gb200-nvl72.toml --topology tray.json --out tray.plan.json
egmctl plan plans/hgx-h200.toml --gpu 0000:1b:00.0 --gpu 0000:43:00.0 --capacity 256GiB
"""


def run(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="The spec, a TOML file.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PLAN", help="Save the plan, to be provisioned as it is.")
    ] = None,
    topology: Annotated[
        Path | None, typer.Option("--topology", metavar="FILE", help="Plan for the machine saved in FILE.")
    ] = None,
    sysfs_root: Annotated[
        Path | None,
        typer.Option("--sysfs-root", metavar="DIR", help="Read DIR as if it were /sys, and nothing else."),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu", metavar="BDF", help="Only the nodes of this GPU; may be given again.", show_default=False
        ),
    ] = None,
    numa: Annotated[
        str | None, typer.Option("--numa", metavar="LIST", help='In place of egm_numa_nodes: "auto" or "0,1".')
    ] = None,
    capacity: Annotated[
        str | None, typer.Option("--capacity", metavar="SIZE", help="In place of global_segment_size.")
    ] = None,
) -> None:
    """Resolve a spec into the chunks it asks of a machine.

    Chooses the NUMA nodes, spreads the capacity evenly over them and cuts each node's share into chunks. Touches
    nothing: the result can be looked at, saved with --out and provisioned later on the machine it was made for.
    """
    from egmctl.cli.commands.topology import load
    from egmctl.planning import Plan, assumed_granularity, load_document, make_plan, save_plan

    output: Output = context.obj
    wanted = load_document(spec)
    if isinstance(wanted, Plan):
        raise UsageError(
            "this is a plan already, not a spec", where=str(spec), hint=f"egmctl provision {spec} carries it out"
        )
    machine = load(topology, sysfs_root)
    plan = make_plan(
        wanted,
        machine,
        gpus=gpu or None,
        numa=numa,
        capacity=capacity,
        granularity=assumed_granularity(wanted.pool.memory),
    )
    if out is not None:
        save_plan(plan, out)
        output.note(f"saved to {out}; egmctl provision {out} carries it out")
    for warning in plan.warnings:
        output.warn(warning)
    output.emit("plan", plan.to_json(), lambda: show(output, plan))


def show(output: Output, plan: Plan) -> None:
    """The plan for a person."""
    pool = f"{plan.pool}: {format_size(plan.effective_bytes)} of {plan.memory_kind} memory"
    nodes = _count(len(plan.nodes), "NUMA node")
    output.line(f"{pool} in {_count(len(plan.chunks), 'chunk')} on {nodes}, over {plan.mooncake.protocol}")
    if plan.requested_bytes != plan.effective_bytes:
        unit = format_size(plan.alignment_bytes)
        output.line(f"asked for {format_size(plan.requested_bytes)}, rounded down to a multiple of {unit}")
    output.line()
    rows = []
    for node in plan.nodes:
        sizes = [chunk.bytes for chunk in plan.chunks if chunk.numa_node == node.numa_node]
        groups = {size: sizes.count(size) for size in sorted(set(sizes), reverse=True)}
        cut = " + ".join(f"{count} x {format_size(size)}" for size, count in groups.items())
        rows.append((node.numa_node, format_size(node.bytes), len(sizes), cut, ", ".join(node.gpus) or "-"))
    output.table(("node", "memory", "chunks", "cut into", "gpus"), rows, right=(0, 1, 2))
    output.line()
    output.line(f"largest object: {format_size(plan.largest_object_bytes)} (an object never spans chunks)")
    if plan.huge_page_bytes:
        output.line(f"huge pages of {format_size(plan.huge_page_bytes)}")
    if plan.local_buffer_bytes:
        output.line(f"workspace, not published: {format_size(plan.local_buffer_bytes)}")
    output.line(f"master: {plan.mooncake.master_server_addr}")
    for source in plan.sources:
        output.line(f"source: {source}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
