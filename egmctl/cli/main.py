"""``egmctl``: read the arguments, run one command, and turn whatever comes of it into an exit code.

Commands return their exit code, or none for success, and raise `EgmError` for what a person should read.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence

from egmctl.cli.output import Output
from egmctl.errors import EgmError, FailedError, UsageError

__all__ = ["main"]

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C where nothing had to be undone; commands that undo exit as the table of exit codes says."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (without the program's name) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    output = Output()
    _tolerate_any_text()
    try:
        code = _guarded(arguments, output)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has seen enough. Python flushes once more at exit, and must not find the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        output.error(_from_os_error(error, "cannot write the output"))
        return 1
    return code


def _guarded(arguments: list[str], output: Output) -> int:
    try:
        return _run(arguments, output)
    except BrokenPipeError:
        raise
    except EgmError as error:
        failure = error
    except OSError as error:
        _trace(output, error)
        failure = _from_os_error(error, "the operating system refused")
    except KeyboardInterrupt:
        output.note("egmctl: interrupted")
        return INTERRUPTED
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python before 3.12 wraps what comes in a __set_name__
            output.note("egmctl: interrupted")
            return INTERRUPTED
        failure = _defect(output, error)
    output.error(failure)
    if output.json:
        output.document(failure.document())
    return failure.exit_code


def _run(arguments: list[str], output: Output) -> int:
    from egmctl import seams

    seams.load()
    import typer

    from egmctl.cli.groups import command_tree

    root = command_tree()
    try:
        if not arguments:
            with root.make_context("egmctl", ["--help"], obj=output, resilient_parsing=True) as context:
                print(context.get_help(), file=sys.stderr)
            return UsageError.exit_code
        with root.make_context("egmctl", arguments, obj=output) as context:
            result = root.invoke(context)
    except typer.Exit as request:
        return request.exit_code
    except _usage_errors() as error:
        # The parser stops at the first mistake, so a --json further on has not been seen yet.
        before_dashes = arguments[: arguments.index("--")] if "--" in arguments else arguments
        output.json = output.json or "--json" in before_dashes
        raise _from_usage(error) from error
    return result if isinstance(result, int) else 0


def _usage_errors() -> type[Exception]:
    """What the parser raises: click's exception, or that of the copy of click in typer 0.26 and later."""
    import typer

    return next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _from_usage(error: Exception) -> UsageError:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "egmctl"
    message = getattr(error, "format_message", error.__str__)()
    return UsageError(message[:1].lower() + message[1:].rstrip("."), where=path, hint=f"see {path} --help")


def _from_os_error(error: OSError, what: str) -> FailedError:
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    return FailedError(
        f"{what}: {error.strerror or error} ({name}{f' {error.errno}' if error.errno else ''})",
        where=os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else "",
        hint="mend that and run the command again; -vv shows where in egmctl it arose",
    )


def _defect(output: Output, error: Exception) -> FailedError:
    """An exception nobody foresaw: one clear line, and the traceback where it does not hide that line."""
    import tempfile
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    text = "".join(traceback.format_exception(error))
    hint = "the traceback stands above; please report it"
    if output.verbosity >= 2:
        print(text, file=sys.stderr)
    else:
        try:
            handle, path = tempfile.mkstemp(prefix="egmctl-defect-", suffix=".log")
            with os.fdopen(handle, "w", errors="backslashreplace") as file:
                file.write(text)
            hint = f"the traceback is in {path}; please report it"
        except OSError:
            hint = "run it again with -vv for the traceback, and please report it"
    summary = " ".join(str(error).split())[:300]
    return FailedError(
        f"this is a defect in egmctl: {type(error).__name__}{f': {summary}' if summary else ''}",
        where=place,
        hint=hint,
    )


def _trace(output: Output, error: Exception) -> None:
    if output.verbosity >= 2:
        import traceback

        print("".join(traceback.format_exception(error)), file=sys.stderr)


def _tolerate_any_text() -> None:
    """A name this terminal cannot show is escaped rather than fatal; a stream that was closed swallows what it gets."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process lives
            continue
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
