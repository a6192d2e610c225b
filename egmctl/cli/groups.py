"""The command tree: global options anywhere, commands imported when they run, help as plain text.

The global options are parameters of the group and of every command, so the parser itself knows which word is an
option and which is another option's value; nothing is searched for in the raw arguments.
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from egmctl.cli.starting import command_begins

if TYPE_CHECKING:
    # For types only: typer 0.26 and later carry a copy of click instead of requiring it.
    from click import Context, HelpFormatter, Parameter

    from egmctl.cli.output import Output

__all__ = ["COMMANDS", "EXAMPLES", "SUMMARY", "command_tree"]

COMMANDS = {
    "topology": "Show this machine's NUMA nodes and GPUs, or save them.",
    "plan": "Resolve a spec into the chunks it asks of a machine.",
    "provision": "Allocate a pool's memory under an agent of its own.",
    "mount": "Publish a pool's chunks at the Mooncake Master.",
    "verify": "Write and read back through a pool, and compare its records.",
    "bench": "Measure a pool: direct copies beside the stock TCP path.",
    "teardown": "Unmount a pool and give its memory back.",
    "status": "Show the pools of this host and what they are doing.",
    "doctor": "Check what this machine can and cannot do.",
    "demo": "Show the whole life of a pool on this machine, on real parts.",
}
"""Every command and what it is for: the root's help is written from this, so that it imports none of them."""

SUMMARY = """
Lend the CPU DRAM of GPU hosts to a Mooncake Store pool that GPUs read and write directly.
"""
EXAMPLES = """
egmctl plan plans/dev-shm.toml          what a pool would be on this machine
egmctl provision plans/dev-shm.toml     allocate it
egmctl mount dev                        publish it at the Mooncake Master
egmctl status                           see it
egmctl teardown dev                     take it back
"""
_EXITS = """
0 done    1 failed, and undone    2 wrong usage, spec or plan    3 the machine cannot do it
4 cleanup pending, run teardown again    5 busy    6 the plan no longer fits    7 verification failed
"""


def _global_options(
    state_dir: Annotated[
        str,
        typer.Option("--state-dir", metavar="DIR", help="Where ledgers live (environment: EGMCTL_STATE_DIR)."),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, the rest on stderr.")] = False,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Say more; -vv all.", show_default=False)
    ] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but results and errors.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    """Read by `_globals` for its parameters; never called."""


def _take(context: Context, option: Parameter, value: Any) -> Any:
    """Note a global option's value in the command's `Output`, wherever on the line it stood."""
    output: Output = context.obj
    if not value or context.resilient_parsing:
        return value
    if option.name == "verbose":
        output.verbosity += value
    elif option.name == "version":
        from egmctl import __version__

        # --json may stand behind --version, which the parser reads first.
        print(f"egmctl {__version__}")
        raise typer.Exit
    elif option.name is not None:
        setattr(output, option.name, value)
    return value


def _globals() -> list[Parameter]:
    app = typer.Typer(add_completion=False)
    app.command()(_global_options)
    options = typer.main.get_command(app).params
    for option in options:
        option.expose_value = False
        option.callback = _take
    return options


class _Help:
    """Help for both: own options, then the global ones, then examples as they are written."""

    shared: list[Parameter]

    def write_options(self, params: list[Parameter], context: Context, formatter: HelpFormatter) -> None:
        shared = {option.name for option in self.shared}
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], "Global options": []}
        for param in params:
            record = param.get_help_record(context)
            if record is None:
                continue
            if param.param_type_name == "argument":
                sections["Arguments"].append(record)
            else:
                sections["Global options" if param.name in shared else "Options"].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _write_literal(formatter: HelpFormatter, title: str, text: str) -> None:
    formatter.write_paragraph()
    formatter.write_heading(title)
    for line in text.strip().splitlines():
        formatter.write(f"  {line}\n" if line else "\n")


class Command(TyperCommand, _Help):
    """A command with the global options among its own."""

    def invoke(self, ctx: Context) -> Any:
        command_begins()
        return super().invoke(ctx)

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        self.write_options(self.get_params(ctx), ctx, formatter)

    def format_epilog(self, ctx: Context, formatter: HelpFormatter) -> None:
        if self.epilog:
            _write_literal(formatter, "Examples", self.epilog)


class Root(TyperGroup, _Help):
    """The commands of `COMMANDS`, each imported when it is asked for."""

    def list_commands(self, ctx: Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = self._load(cmd_name)
        command = self.commands[cmd_name]
        return command if isinstance(command, Command) else None

    def _load(self, name: str) -> Command:
        module = importlib.import_module(f"egmctl.cli.commands.{name}")
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(name, cls=Command, epilog=module.EXAMPLES, short_help=COMMANDS[name])(module.run)
        command = typer.main.get_command(app)
        if not isinstance(command, Command):
            raise TypeError(f"{name} is not a command")
        command.shared = self.shared
        command.params = [*command.params, *self.shared]
        return command

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            close = get_close_matches(args[0], COMMANDS, 1)
            ctx.fail(f"there is no command {args[0]!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))
        self.write_options(self.get_params(ctx), ctx, formatter)

    def format_epilog(self, ctx: Context, formatter: HelpFormatter) -> None:
        _write_literal(formatter, "Exit status", _EXITS)
        _write_literal(formatter, "Examples", EXAMPLES)


def command_tree() -> Root:
    """The root of the command tree; call it with an `Output` as the context's object."""
    root = Root(name="egmctl", help=SUMMARY, rich_markup_mode=None, options_metavar="[OPTIONS]")
    root.shared = _globals()
    root.params = list(root.shared)
    return root
