"""Write the manual pages: options and summaries from the commands themselves, the rest from below.

Usage: generate.py [FOLDER]   (this folder unless given)
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import typer

from egmctl import __version__
from egmctl.cli.groups import COMMANDS, EXAMPLES, SUMMARY, command_tree

EXITS = {
    0: "Done, or done already.",
    1: "Failed, and what had been done is undone.",
    2: "Wrong usage, an unreadable spec or plan, an unknown pool.",
    3: "The machine cannot do it. Nothing was touched.",
    4: "Cleanup is pending: the ledger holds what is left. Run B<egmctl teardown> again.",
    5: "Busy: another command or agent owns the pool. The message says who.",
    6: "The plan no longer fits this machine.",
    7: "Verification found wrong bytes or wrong state.",
    130: "Interrupted, with nothing to undo.",
}
EXITS_OF = {
    "topology": (0, 1, 2),
    "plan": (0, 1, 2, 3),
    "provision": (0, 1, 2, 3, 4, 5, 6),
    "mount": (0, 1, 2, 3, 4, 5),
    "verify": (0, 1, 2, 7),
    "bench": (0, 1, 2, 3),
    "teardown": (0, 1, 2, 4, 5),
    "status": (0, 1, 2),
    "doctor": (0, 2, 3),
    "demo": (0, 1, 3, 4, 7),
}

LISTENS = """
The Transfer Engine of the Mooncake wheel, which serves stock clients over TCP, listens on B<all network interfaces>,
whatever address it is told, and asks nobody who they are: whoever reaches its data port can read and write the pool.
Close that port to the outside with a firewall. It runs for pools of the kinds I<shm> and I<cuda-posix> while they are
mounted; B<egmctl status --json> tells the endpoint.
"""

OWN_OBJECTS = "The objects it puts are its own, under keys nobody else uses, and are removed again."
CALIBRATES = (
    "The first time on a kind of GPU, with a pool of CUDA memory, it measures for about a second below which block "
    "size a kernel copies faster than the copy engine. Every consumer of this user goes by that from then on."
)

MORE = {
    "topology": [
        "A node's role tells whether a pool can use it: I<pool>, I<gpu-memory> (a GPU's own memory shown as a node), "
        "I<no-cpus>, I<no-memory>, I<offline> or I<not-allowed> (by this process's cpuset).",
    ],
    "plan": [
        "The capacity is rounded down to the alignment, the least common multiple of 16 MiB and what the memory is "
        "allocated in. An object never spans chunks, so the largest chunk is the largest object.",
        "A saved plan names the topology it was made for; B<egmctl provision> refuses it on a machine that differs.",
    ],
    "provision": [
        "The agent goes on when the command has ended. It owns the memory: when it is killed the memory is gone, and "
        "B<egmctl teardown> cleans up what it left. With B<--foreground> the command itself is the agent and runs "
        "until the pool is torn down or a SIGTERM asks it to.",
        "Nothing of it survives a reboot but the ledger.",
        "How fast small entries are read depends on where they lie. A GPU keeps the address translation of some 512 "
        "MiB to 1 GiB of a pool at hand: entries of less than 2 KiB that are read together (the rows of one layer, or "
        "of one sequence) are best put into few large objects that together span no more than that. On H200, 656-byte "
        "entries at random over 4 GiB came at half the speed of those over 512 MiB. What is spread further is read "
        "in order of its pages, which brings nearly all of it back for large gathers, at some cost for each. Entries "
        "that are put singly into a reserved object (a scatter) are best a multiple of 64 bytes long and aligned to as "
        "much, so that no two of them share a line of memory.",
    ],
    "mount": [
        "The Master must have been started with the lease time that the spec names (I<lease_ttl>, 10 s unless given). "
        "When the Master restarts, the agent mounts again by itself, one lease time after the last contact.",
        "Copy and move tasks that the Master assigns to the owner of a chunk (a drain job does) are not carried out: "
        "the agent reports each failed within about a second, so that the job ends, and the objects stay where they "
        "are. To take a pool out of service, use B<egmctl teardown> with B<--grace>.",
    ],
    "verify": [OWN_OBJECTS, CALIBRATES],
    "bench": [OWN_OBJECTS, CALIBRATES],
    "teardown": [
        "What cannot be undone is kept and recorded. A Master that cannot be reached may still hand out addresses of "
        "the pool, so its memory stays until that Master says otherwise or its clients must have given up.",
        "B<--abandon> releases the memory nevertheless. A consumer that still trusts that Master then reads and writes "
        "memory that is no longer the pool's: only for a Master that is gone for good. The pool stays listed as "
        "I<abandoned> until B<egmctl status> I<POOL> B<--forget>.",
        "With B<--all> each pool is torn down in turn whatever happens to the others; the exit status is the highest.",
    ],
    "status": [
        "A pool's states are I<provisioning>, I<provisioned>, I<mounting>, I<ready>, I<degraded>, I<tearing-down>, "
        "I<cleanup-pending>, I<gone> and I<abandoned>. Only I<ready> means that every chunk is mounted.",
    ],
    "doctor": [
        "What could not be found out is shown as I<unknown>, what did not run as I<skip>; neither counts as good."
    ],
    "demo": ["Its Master, its pool and its files are in a temporary folder and on loopback ports; nothing is left."],
}
SECURITY = {"mount", "provision", "demo"}
USES_STATE = {"provision", "mount", "verify", "bench", "teardown", "status", "demo"}

FILES = {
    "/var/lib/egmctl/POOL.db": "The ledger of a pool: what exists of it, durably. For other users than root, "
    "$XDG_STATE_HOME/egmctl (by default ~/.local/state/egmctl); or the folder that B<--state-dir> names.",
    "/var/lib/egmctl/POOL.lock": "Held by the pool's owner; its text says who that is.",
    "/var/lib/egmctl/POOL.log": "The agent's log.",
    "~/.cache/egmctl/copy.json": "What B<egmctl verify> and B<egmctl bench> have measured of the GPUs. It may be "
    "removed at any time; it is then measured again.",
    "/run/egmctl/*.sock": "The agents' control sockets. For other users than root, $XDG_RUNTIME_DIR/egmctl.",
}
ENVIRONMENT = {
    "EGMCTL_STATE_DIR": "The state dir, where B<--state-dir> does not say otherwise.",
    "MC_MAX_MR_SIZE": "Mooncake's largest registered range: the default of I<max_mr_size> in a spec.",
    "CUDA_VISIBLE_DEVICES": "Restricts the GPUs that are seen, as everywhere.",
    "NO_COLOR": "If set, no colour and no progress bar, not even on a terminal.",
    "XDG_STATE_HOME, XDG_RUNTIME_DIR": "Where state and sockets of users other than root are.",
    "XDG_CACHE_HOME": "Where what was measured is kept, instead of ~/.cache.",
}


def escape(text: str) -> str:
    """Text for roff: nothing in it is a request or an escape, and a hyphen can be searched for and copied."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text[:1] in (".", "'") else text


def prose(text: str) -> str:
    """One paragraph, ``B<bold>`` and ``I<italic>`` in it."""
    words = escape(" ".join(text.split()))
    for mark, font in (("B<", "\\fB"), ("I<", "\\fI")):
        while mark in words:
            before, _, rest = words.partition(mark)
            inside, _, after = rest.partition(">")
            words = f"{before}{font}{inside}\\fR{after}"
    return words


def paragraphs(texts: list[str]) -> list[str]:
    return [line for text in texts for line in (".PP", prose(text))]


def tagged(entries: dict[str, str]) -> list[str]:
    return [line for tag, text in entries.items() for line in (".TP", f"\\fB{escape(tag)}\\fR", prose(text))]


def literal(text: str) -> list[str]:
    return [".PP", ".nf", ".RS 4", *(escape(line) for line in text.strip().splitlines()), ".RE", ".fi"]


def option(param: Any, context: Any) -> list[str]:
    names = ", ".join(f"\\fB{escape(name)}\\fR" for name in sorted(param.opts, key=len))
    record = param.get_help_record(context)
    value = "" if getattr(param, "is_flag", False) or param.count else record[0].split(" ", 1)[-1].split(" ", 1)[-1]
    if value and value not in param.opts:
        names += f" \\fI{escape(value)}\\fR"
    return [".TP", names, prose(record[1])]


def options(command: Any, context: Any, shared: set[str]) -> tuple[list[str], list[str]]:
    own, common = [], []
    for param in command.get_params(context):
        if param.param_type_name == "option":
            (common if param.name in shared else own).extend(option(param, context))
    return own, common


def section(title: str, lines: list[str]) -> list[str]:
    return [f".SH {title}", *lines] if lines else []


def heading(name: str) -> list[str]:
    note = '.\\" Written by man/generate.py from the command itself: change that, and run make man.'
    return [note, f'.TH {name.upper().replace("-", chr(92) + "-")} 1 "" "egmctl {__version__}" "egmctl manual"', ".nh"]


def root_page(root: Any) -> str:
    context = typer.Context(root, info_name="egmctl")
    own, common = options(root, context, {param.name for param in root.shared})
    commands = {f"egmctl-{name}(1)": text for name, text in COMMANDS.items()}
    lines = [
        *heading("egmctl"),
        *section("NAME", [prose("egmctl - CPU DRAM of GPU hosts as a Mooncake Store pool")]),
        *section("SYNOPSIS", ["\\fBegmctl\\fR [\\fIOPTIONS\\fR] \\fICOMMAND\\fR [\\fIARGUMENTS\\fR]"]),
        *section(
            "DESCRIPTION",
            [
                *paragraphs([SUMMARY]),
                *paragraphs(
                    [
                        "A spec says what a pool should be. B<egmctl plan> resolves it for one machine, B<egmctl "
                        "provision> allocates the memory under an agent, B<egmctl mount> publishes it at the Mooncake "
                        "Master, and B<egmctl teardown> takes it all back. What exists is recorded in a ledger before "
                        "and after every step, so that a command that was interrupted can be run again.",
                        "An error says what failed, where, and what to do next.",
                    ]
                ),
            ],
        ),
        *section("COMMANDS", tagged(commands)),
        *section("OPTIONS", [*paragraphs(["Before or after the command:"]), *common, *own]),
        *section("EXIT STATUS", tagged({str(code): text for code, text in EXITS.items()})),
        *section(
            "JSON",
            paragraphs(
                [
                    "With B<--json> stdout carries one document, and everything meant for a person goes to stderr. The "
                    "member I<schema> is egmctl/COMMAND/1; an error is egmctl/error/1 with I<code>, I<message>, "
                    "I<where>, I<hint> and I<exit>. Sizes are bytes, as integers. A document never changes its meaning "
                    "within a number."
                ]
            ),
        ),
        *section("FILES", tagged(FILES)),
        *section("ENVIRONMENT", tagged(ENVIRONMENT)),
        *section("SECURITY", paragraphs([LISTENS])),
        *section("EXAMPLES", literal(EXAMPLES)),
        *section("SEE ALSO", [", ".join(f"\\fB{escape(f'egmctl-{name}')}\\fR(1)" for name in COMMANDS)]),
    ]
    return "\n".join(lines) + "\n"


def command_page(root: Any, name: str) -> str:
    parent = typer.Context(root, info_name="egmctl")
    command = root.get_command(parent, name)
    context = typer.Context(command, info_name=name, parent=parent)
    own, common = options(command, context, {param.name for param in root.shared})
    summary, *rest = inspect.cleandoc(command.help).split("\n\n")
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    operands = "".join(f" \\fI{escape(param.metavar)}\\fR" for param in arguments)
    said = {param.metavar.strip("[]"): param.help for param in arguments}
    title = f"egmctl-{name}"
    short = summary[0].lower() + summary[1:].rstrip(".")
    files = FILES if name in USES_STATE else {}
    lines = [
        *heading(title),
        *section("NAME", [prose(f"{title} - {short}")]),
        *section("SYNOPSIS", [f"\\fBegmctl {name}\\fR [\\fIOPTIONS\\fR]{operands}"]),
        *section("DESCRIPTION", paragraphs([*rest, *MORE.get(name, [])])),
        *section("OPERANDS", tagged(said)),
        *section("OPTIONS", own),
        *section("GLOBAL OPTIONS", common),
        *section("EXIT STATUS", tagged({str(code): EXITS[code] for code in (*EXITS_OF[name], 130)})),
        *section("FILES", tagged(files)),
        *section("ENVIRONMENT", tagged(ENVIRONMENT)),
        *section("SECURITY", paragraphs([LISTENS]) if name in SECURITY else []),
        *section("EXAMPLES", literal(command.epilog)),
        *section("SEE ALSO", ["\\fBegmctl\\fR(1)"]),
    ]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """File name to content, for all pages."""
    root = command_tree()
    return {"egmctl.1": root_page(root)} | {f"egmctl-{name}.1": command_page(root, name) for name in COMMANDS}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, content in pages().items():
        (folder / name).write_text(content)
