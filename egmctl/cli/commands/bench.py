"""``egmctl bench``: how fast a pool is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from egmctl.errors import UsageError
from egmctl.units import format_size, parse_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from egmctl.cli.output import Output

__all__ = ["EXAMPLES", "run"]

EXAMPLES = """
egmctl bench dev
egmctl bench dev --op get --block 64KiB,1MiB,8MiB
egmctl bench dev --json > today.json; egmctl bench dev --baseline today.json
"""

OPERATIONS = ("put", "get")


def run(
    context: typer.Context,
    pool: Annotated[str, typer.Argument(metavar="POOL", help="A mounted pool.")],
    op: Annotated[
        list[str] | None, typer.Option("--op", metavar="OP", help="put or get; may be given again.  [default: both]")
    ] = None,
    block: Annotated[
        list[str] | None,
        typer.Option("--block", metavar="SIZES", help="Block sizes with commas between them, such as 4KiB,1MiB."),
    ] = None,
    path: Annotated[
        list[str] | None,
        typer.Option("--path", metavar="PATH", help="direct or stock; may be given again.  [default: both]"),
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", metavar="N", min=1, help="Objects a result.  [default: 8 to 256, by size]")
    ] = None,
    device: Annotated[
        int | None,
        typer.Option("--device", metavar="INDEX", min=0, help="Direct copies from and to this GPU's memory."),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="FILE", help="Compare with this run, saved with --json.")
    ] = None,
) -> None:
    """Measure a pool: direct copies beside the stock TCP path.

    Each operation runs over each path with the same objects in the same run; warm-up is left out and reported as
    first use. Latencies are percentiles of single operations; the environment is part of the result.
    """
    operations = _words(op) or list(OPERATIONS)
    for word in operations:
        if word not in OPERATIONS:
            raise UsageError(f"--op {word!r} is unknown", where="egmctl bench", hint=" or ".join(OPERATIONS))
    blocks = [parse_size(word, name="--block") for word in _words(block)]
    if 0 in blocks:
        raise UsageError("--block 0 measures nothing", where="egmctl bench", hint="give sizes above zero")
    from egmctl.bench import run_bench
    from egmctl.cli.pools import known_name
    from egmctl.cli.progress import Progress

    output: Output = context.obj
    with Progress(output) as progress:
        document = run_bench(
            known_name(pool),
            output.paths,
            operations=operations,
            blocks=blocks,
            routes=_words(path),
            device=device,
            count=count,
            baseline=baseline,
            progress=progress,
        )
    output.emit("bench", document, lambda: _show(output, document))


def _words(values: Sequence[str] | None) -> list[str]:
    return [word.strip() for value in values or () for word in value.split(",")]


def _show(output: Output, document: Mapping[str, Any]) -> None:
    results = document["results"]
    compared = any("against_baseline" in result for result in results)
    rows = []
    for result in results:
        latency = result["latency_us"]
        row = [result["operation"], result["path"], format_size(result["block_bytes"]), result["blocks"]]
        row += [f"{result['gbps']['p50']:.2f}", *(f"{latency[name]:.0f}" for name in ("p50", "p99", "max"))]
        row += ["-" if result["first_use_us"] is None else f"{result['first_use_us']:.0f}", result["errors"]]
        if compared:
            row.append(f"{result['against_baseline']:.2f}x" if "against_baseline" in result else "-")
        rows.append(row)
    headings = ["op", "path", "block", "count", "GB/s p50", "us p50", "us p99", "us max", "us first", "errors"]
    if compared:
        headings.append("to baseline")
    output.table(headings, rows, right=range(2, len(headings)))
    output.line()
    for ratio in document["ratios"]:
        times = f"{ratio['direct_over_stock']:.2f} times as fast direct as stock"
        output.line(f"{ratio['operation']} of {format_size(ratio['block_bytes'])}: {times}")
    for skipped in document["skipped"]:
        output.line(f"{skipped['path']}: skipped, {skipped['reason']}")
