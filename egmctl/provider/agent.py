"""The agent: the long-lived process that owns a pool's memory.

``python -m egmctl.provider.agent`` is started by `egmctl.provider.launch`; `run_agent` is the same in the foreground.
The main thread takes signals; commands and tending run on the operator's thread, pings on the heartbeat's.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from egmctl.errors import CleanupPendingError, EgmError, FailedError
from egmctl.ledger import ChunkRow, Ledger, OwnerLock, boot_id, read_only, start_time
from egmctl.paths import Paths
from egmctl.planning import Plan
from egmctl.provider.access import group_id
from egmctl.provider.control import ALIVE_SECONDS, ControlServer
from egmctl.provider.folders import check_passable, network_file_system, prepare
from egmctl.provider.health import HealthServer, trouble
from egmctl.provider.log import lasting_streams
from egmctl.provider.messages import hung_up, line
from egmctl.provider.notify import Notifier
from egmctl.provider.operator import Job, Operator
from egmctl.provider.parts import Live
from egmctl.provider.pool import ENDED, Pool
from egmctl.provider.progress import Progress, ProgressEvent, silent
from egmctl.provider.report import live_report
from egmctl.provider.stop_signals import StopSignals
from egmctl.provider.task import Task
from egmctl.provider.tending import Tender

__all__ = ["DEFAULT_GRACE", "main", "run_agent"]

DEFAULT_GRACE = 10.0
"""Seconds for which objects stay readable when a signal ends the agent."""

RETRY_SECONDS = 5.0


class Agent:
    """One incarnation: from taking the pool's lock to the end of the process. Use as a context manager."""

    def __init__(self, plan: Plan, paths: Paths, *, who: str) -> None:
        self.plan = plan
        self.paths = paths
        self.who = who

    def __enter__(self) -> Agent:
        name, paths = self.plan.pool, self.paths
        group = group_id(self.plan.group)
        prepare(paths)
        if self.plan.group is not None and group is not None:
            check_passable(paths.runtime, self.plan.group, group)
        self.health: HealthServer | None = None
        with ExitStack() as undo:
            self.lock = OwnerLock.acquire(paths.lock(name), name, "the pool's agent", patience=2.0)
            undo.callback(self.lock.release)
            left = read_only(paths.ledger(name))
            if left is not None and left.state not in ENDED and not left.nothing_begun:
                raise CleanupPendingError(
                    f"an agent that is gone (pid {left.agent_pid}) left it {left.state}",
                    where=f"pool {name}",
                    hint=f"run `egmctl teardown {name}`, then provision again",
                )
            if self.plan.health_addr is not None:
                self.health = HealthServer(self.plan.health_addr)
                undo.callback(self.health.close)
            pid = os.getpid()
            self.ledger = Ledger.create(
                paths.ledger(name),
                who=f"agent {pid}",
                name=name,
                plan=self.plan.to_json(),
                chunks=[ChunkRow(c.index, c.numa_node, c.bytes, None, "planned") for c in self.plan.chunks],
                nonce=secrets.token_hex(16),
                client=(secrets.randbits(64), secrets.randbits(64)),
                agent_pid=pid,
                agent_started=start_time(pid) or 0,
                boot_id=boot_id(),
            )
            undo.callback(self.ledger.close)
            undo.callback(self._never_mind)
            self._start(group)
            undo.pop_all()
        return self

    def _start(self, group: int | None) -> None:
        name, paths = self.plan.pool, self.paths
        live = Live(engine_log=sys.stderr.fileno() if _has_fileno(sys.stderr) else None)
        self.pool = Pool(self.ledger, self.plan, paths, live)
        remote = network_file_system(paths.state)
        if remote is not None:
            self.pool.warn(
                f"the ledger lies on {remote}: locks and syncs over a network may not hold; use a local disk"
            )
        self._tender = Tender(self.pool, Task("tending", self.who, silent, lambda: self.operator.busy()))
        self.operator = Operator(self.pool, self._tender.tick)
        self.control = ControlServer(paths.socket(name), self.pool, self.operator, group)
        live.control = self.control
        if self.health is not None:
            live.health = self.health.url
            self.health.tell_of(self.pool, self.operator)
        try:
            self.operator.start()
        except RuntimeError as error:
            raise FailedError(
                f"no thread for the agent's worker: {error}",
                where=f"pool {name}",
                hint="raise the limit of processes (ulimit -u, or the container's pids limit)",
            ) from error

    def _never_mind(self) -> None:
        """Of a pool that has not come to its first stage the ledger says that it is gone; where that cannot be written,
        the next provision takes it over."""
        with suppress(EgmError):
            if self.ledger.pool().nothing_begun:
                with self.ledger.record("provision did not begin") as ledger:
                    ledger.set_pool(state="gone", goal="gone", agent_pid=0)

    def __exit__(self, *exc: object) -> None:
        self.control.drain(2.0)
        if self.health is not None:
            self.health.close()
        self.operator.end()
        if self.pool.live is not None and self.pool.live.heartbeat is not None:
            self.pool.live.heartbeat.stop()
        self.control.close()
        self._never_mind()
        self.pool.close()
        self.lock.release()

    @property
    def over(self) -> bool:
        """Whether the pool owns nothing any more, so that the process may end."""
        return self.pool.state in ENDED and not self.operator.busy()

    def status_line(self) -> str:
        """How it is, in one line for a supervisor."""
        pool = self.pool
        if pool.state == "provisioning" and pool.live is not None:
            return f"provisioning: {len(pool.live.chunks)} of {len(pool.plan.chunks)} chunks"
        return f"{pool.state}: {pool.reason}" if pool.reason else pool.state

    def command(
        self,
        name: str,
        run: Callable[[Task], Any],
        *,
        progress: Progress = silent,
        cancelled: Callable[[], bool] = lambda: False,
        hurried: Callable[[], bool] = lambda: False,
    ) -> Job:
        def result(task: Task) -> dict[str, Any]:
            run(task)
            return live_report(self.pool, None)

        return self.operator.submit(Job(Task(name, self.who, progress, cancelled, hurried), result))


def run_agent(
    plan: Plan,
    paths: Paths,
    *,
    mount: bool = False,
    progress: Progress = silent,
    started: Callable[[dict[str, Any]], None] | None = None,
    failed: Callable[[EgmError], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    alive: Callable[[], None] = lambda: None,
    grace: float = DEFAULT_GRACE,
    interactive: bool = False,
) -> None:
    """Provision (and mount), then own the pool until it is torn down or a signal asks for that.

    ``started`` is called with the pool's status once it is provisioned (and mounted), ``alive`` every other second
    until then. A failure that was undone is raised; one that leaves something owned is given to ``failed`` (raised at
    the end when there is none) and the agent lives on to keep it. SIGTERM, SIGINT and SIGHUP (a terminal that was
    closed) tear down gracefully; a second one at once; with ``interactive`` a third SIGINT ends the process where it
    is.
    """
    signals = StopSignals(interactive=interactive)
    # A detached agent is not what its starter's supervisor supervises.
    notifier = Notifier(None if interactive else {})
    error: EgmError | None = None
    try:
        with (
            lasting_streams(),
            Agent(plan, paths, who=f"pid {os.getpid()}") as agent,
            notifier.watch(agent.status_line, agent.operator.busy, lambda: trouble(agent.pool, agent.operator)),
        ):
            stopping = lambda: cancelled() or signals.count > 0  # noqa: E731
            try:
                _carry_out(agent, "provision", agent.pool.provision, signals, progress, stopping, alive)
                if mount:
                    _carry_out(agent, "mount", agent.pool.mount, signals, progress, stopping, alive)
                if started is not None:
                    with suppress(OSError):  # whoever wanted to know has gone; the pool is there all the same
                        started(live_report(agent.pool, None))
                notifier.ready()
            except EgmError as met:
                error = met
                if agent.pool.state not in ENDED and failed is not None:
                    failed(met)
            _own(agent, signals, grace, notifier)
    finally:
        signals.restore()
    if error is not None:
        raise error


def _carry_out(
    agent: Agent,
    name: str,
    run: Callable[[Task], None],
    signals: StopSignals,
    progress: Progress,
    cancelled: Callable[[], bool],
    alive: Callable[[], None],
) -> None:
    job = agent.command(name, run, progress=progress, cancelled=cancelled)
    told = time.monotonic()
    while not job.done(0):
        signals.pause()
        if time.monotonic() >= told + ALIVE_SECONDS:
            told = time.monotonic()
            with suppress(OSError):
                alive()
    job.wait()


def _own(agent: Agent, signals: StopSignals, grace: float, notifier: Notifier) -> None:
    """Until nothing is owned any more. A teardown asked for by a signal, or left unfinished where nobody can ask for it
    again, is tried until it is done."""
    job: Job | None = None
    not_before = 0.0
    while not agent.over:
        signals.pause()
        if agent.pool.state == "tearing-down":  # on whoever's request
            notifier.stopping()
        if job is not None and job.done(0):
            try:
                job.wait()
            except EgmError as error:
                print(f"egmctl: {error}\n  do: {error.hint}", file=sys.stderr, flush=True)
                not_before = time.monotonic() + RETRY_SECONDS
            job = None
        # Its socket is the last thing a teardown removes: if that fails there, nobody can ask for the rest any more.
        alone = not agent.control.accepting and not agent.operator.busy()
        if (signals.count or alone) and job is None and not agent.over and time.monotonic() >= not_before:
            notifier.stopping()
            with suppress(EgmError):  # busy with a client's command: tried again
                job = agent.command(
                    "teardown",
                    lambda task: agent.pool.teardown(task, grace if signals.count == 1 else 0.0),
                    hurried=lambda: signals.count > 1,
                )


def _has_fileno(stream: Any) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True


class _Launcher:
    """The other end of the progress socket: told what happens, and listened to, since its end means stop and undo."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock: socket.socket | None = sock
        self._mutex = threading.Lock()
        sock.settimeout(5.0)

    def send(self, document: dict[str, Any]) -> None:
        with self._mutex:
            if self._sock is not None:
                self._sock.sendall(line(document))

    def progress(self, event: ProgressEvent) -> None:
        self.send(event.document())

    def finish(self, document: dict[str, Any]) -> None:
        """The last word; afterwards nobody is listened to."""
        with suppress(OSError):
            self.send(document)
        with self._mutex:
            sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def left(self) -> bool:
        with self._mutex:
            if self._sock is None:
                return False
            return hung_up(self._sock)


def main(arguments: list[str] | None = None) -> int:
    """The detached agent's program."""
    parser = argparse.ArgumentParser(prog="egmctl.provider.agent", allow_abbrev=False)
    parser.add_argument("--plan-fd", type=int, required=True)
    parser.add_argument("--progress-fd", type=int, required=True)
    parser.add_argument("--state", required=True)
    parser.add_argument("--runtime", required=True)
    parser.add_argument("--mount", action="store_true")
    options = parser.parse_args(arguments)
    if os.fork():
        os._exit(0)  # whoever started us waits for this one only, and is never our parent
    from egmctl import seams

    os.umask(0o077)
    seams.load()
    launcher = _Launcher(socket.socket(fileno=options.progress_fd))
    os.set_inheritable(options.progress_fd, False)
    with lasting_streams():
        return _be_agent(options, launcher)


def _be_agent(options: argparse.Namespace, launcher: _Launcher) -> int:
    try:
        with os.fdopen(options.plan_fd, "rb") as file:
            import json

            plan = Plan.from_json(json.load(file))
        launcher.send({"event": "started", "pid": os.getpid()})
        run_agent(
            plan,
            Paths(Path(options.state), Path(options.runtime)),
            mount=options.mount,
            progress=launcher.progress,
            started=lambda report: launcher.finish({"ok": True, "result": report}),
            failed=lambda error: launcher.finish({"ok": False, "error": error.document()}),
            cancelled=launcher.left,
            alive=lambda: launcher.send({"event": "alive"}),
        )
    except EgmError as error:
        print(f"egmctl: {error}\n  do: {error.hint}", file=sys.stderr, flush=True)
        launcher.finish({"ok": False, "error": error.document(), "ends": True})
        return error.exit_code
    except Exception as error:
        import traceback

        traceback.print_exc(file=sys.stderr)
        unexpected = FailedError(f"the agent: {type(error).__name__}: {error}", hint="see the agent's log")
        launcher.finish({"ok": False, "error": unexpected.document(), "ends": True})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
