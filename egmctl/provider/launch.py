"""Starting an agent that outlives its starter, following it until the pool is there, and cleaning up if it dies."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import egmctl
from egmctl.errors import EgmError, FailedError, PreflightError
from egmctl.ledger import await_end, read_only, start_time
from egmctl.paths import Paths
from egmctl.planning import Plan
from egmctl.provider import messages, recover
from egmctl.provider.control_client import SILENCE, AgentSilent
from egmctl.provider.folders import prepare
from egmctl.provider.pool import ENDED
from egmctl.provider.progress import Progress, ProgressEvent, silent
from egmctl.steps import step

__all__ = ["start_agent"]

LOG_TAIL = 2000
START_SECONDS = 60.0


def start_agent(plan: Plan, paths: Paths, *, mount: bool = False, progress: Progress = silent) -> dict[str, Any]:
    """Start the pool's agent and wait until it has provisioned (and mounted); the pool's status.

    Raises what the agent met. An agent that dies on the way is cleaned up after, from its ledger, and reported as
    `FailedError` (or as `CleanupPendingError` when that cannot be finished); one that stands still is given up
    (`AgentSilent`), and undoes what it has done should it go on. The first Ctrl-C asks the agent to undo
    and waits for it.
    """
    prepare(paths)
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            interrupted = _spawn(plan, paths, theirs, mount)
        return _follow(plan.pool, paths, ours, progress, interrupted)
    finally:
        ours.close()


def _spawn(plan: Plan, paths: Paths, progress: socket.socket, mount: bool) -> bool:
    """Start it; whether Ctrl-C came meanwhile, which the agent is to be told."""
    log = paths.log(plan.pool)
    try:
        with step("provider.launch.log", path=str(log)):
            log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PreflightError(
            f"cannot write the agent's log: {error.strerror}",
            where=str(log),
            hint="make the state folder writable for this user, or give another with --state-dir",
        ) from error
    plan_fd = os.memfd_create("egmctl-plan")
    try:
        os.fchmod(log_fd, 0o600)
        os.write(plan_fd, json.dumps(plan.to_json()).encode())
        os.lseek(plan_fd, 0, os.SEEK_SET)
        command = [sys.executable, "-m", "egmctl.provider.agent"]
        command += ["--plan-fd", str(plan_fd), "--progress-fd", str(progress.fileno())]
        command += ["--state", str(paths.state.absolute()), "--runtime", str(paths.runtime.absolute())]
        if mount:
            command.append("--mount")
        environment = dict(os.environ)
        # Wherever this egmctl was found, the agent finds the same one from another working folder.
        home = str(Path(egmctl.__file__).resolve().parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [home, environment.get("PYTHONPATH")]))
        try:
            with step("provider.launch.spawn", pool=plan.pool):
                first = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log_fd,
                    stderr=log_fd,
                    pass_fds=(plan_fd, progress.fileno()),
                    start_new_session=True,
                    cwd=paths.state,
                    env=environment,
                )
        except OSError as error:
            raise FailedError(f"cannot start {sys.executable}: {error.strerror}", where=f"pool {plan.pool}") from error
        return _await_fork(first, plan.pool)
    finally:
        os.close(plan_fd)
        os.close(log_fd)


def _await_fork(first: subprocess.Popen[bytes], pool: str) -> bool:
    """It only forks the agent and ends; whether Ctrl-C came meanwhile."""
    try:
        try:
            first.wait(START_SECONDS)
            return False
        except KeyboardInterrupt:
            first.wait(START_SECONDS)
            return True
    except subprocess.TimeoutExpired:
        first.kill()
        first.wait()
        raise FailedError(
            f"the agent did not start within {START_SECONDS:g} s",
            where=f"pool {pool}",
            hint=f"see whether `{sys.executable} -c 'import egmctl.provider.agent'` comes back",
        ) from None


def _follow(pool: str, paths: Paths, sock: socket.socket, progress: Progress, asked_to_stop: bool) -> dict[str, Any]:
    reader = messages.LineReader(sock)
    if asked_to_stop:
        sock.shutdown(socket.SHUT_WR)
    pid = started = 0
    while True:
        try:
            message = reader.read(SILENCE)
            if message is not None and message.get("event") == "progress":
                progress(ProgressEvent.from_document(message))
                continue
        except KeyboardInterrupt:
            if asked_to_stop:
                raise
            asked_to_stop = True
            sock.shutdown(socket.SHUT_WR)
            continue
        except TimeoutError:
            raise AgentSilent(
                f"the agent (pid {pid or 'unknown'}) has said nothing for {SILENCE:g} s",
                where=f"pool {pool}",
                hint=f"it stands still, or is stopped: see its log, {paths.log(pool)}; should it go on, it undoes what "
                "it has done. After `kill -KILL` of the agent, teardown works from the ledger",
            ) from None
        except (OSError, ValueError):
            message = None
        if message is None:
            raise _died(pool, paths, progress)
        if message.get("event") == "started":
            pid = int(message.get("pid", 0))
            started = start_time(pid) or 0
        if message.get("ok") is True:
            result = message.get("result")
            return result if isinstance(result, dict) else {}
        if "ok" in message:
            if message.get("ends"):
                await_end(pid, started)
            raise messages.error_from_document(message.get("error"))


def _died(pool: str, paths: Paths, progress: Progress) -> EgmError:
    """The agent is gone without a last word: clean up after it, and say what is known."""
    tail = ""
    try:
        with open(paths.log(pool), "rb") as file:
            file.seek(max(0, os.path.getsize(paths.log(pool)) - LOG_TAIL))
            tail = file.read().decode(errors="replace").strip().rpartition("\n")[2]
    except OSError:
        pass
    record = read_only(paths.ledger(pool))
    if record is not None and record.state not in ENDED:
        recover.teardown_from_ledger(pool, paths, progress=progress, patience=5.0)
    return FailedError(
        "the agent died before the pool was there; what it had done is undone"
        + (f" (its last words: {tail})" if tail else ""),
        where=f"pool {pool}",
        hint=f"see its log, {paths.log(pool)}; out of memory shows in `dmesg`",
    )
