"""``egmctl doctor``: what this machine can and cannot do."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from egmctl.errors import PreflightError

if TYPE_CHECKING:
    from egmctl.cli.output import Output

__all__ = ["EXAMPLES", "run"]

EXAMPLES = """
egmctl doctor
egmctl doctor --for cuda-fabric
egmctl doctor --json | jq '.checks[] | select(.status == "fail") | .hint'
"""


class Kind(str, Enum):
    cuda_fabric = "cuda-fabric"
    cuda_posix = "cuda-posix"
    shm = "shm"


def run(
    context: typer.Context,
    kind: Annotated[Kind | None, typer.Option("--for", help="Only what this memory kind needs.")] = None,
) -> int:
    """Check what this machine can and cannot do.

    Every check says what it saw, what it expected and the remedy. Exit 3 when one fails that the memory kind needs.
    """
    from egmctl.checks.doctor import run_doctor
    from egmctl.cli.checklist import show_checks

    output: Output = context.obj
    document = run_doctor(kind.value if kind is not None else None, output.paths)
    output.emit("doctor", document, lambda: show_checks(output, document))
    return 0 if document["ok"] else PreflightError.exit_code
