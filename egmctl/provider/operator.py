"""The agent's one worker thread: commands on the pool one after the other, and the pool's own tending in between."""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from egmctl.errors import EgmError, FailedError
from egmctl.provider.pool import Pool
from egmctl.provider.task import Cancelled, Task

__all__ = ["Job", "Operator"]

TICK = 0.2


class Job:
    """A command handed to the worker; `wait` gives what it returned or raises what it raised."""

    def __init__(self, task: Task, run: Callable[[Task], dict[str, Any]]) -> None:
        self.task = task
        self._run = run
        self._done = threading.Event()
        self._result: dict[str, Any] = {}
        self._error: BaseException | None = None

    def carry_out(self) -> None:
        """Run it; nobody is told before `finish`."""
        try:
            self._result = self._run(self.task)
        except EgmError as error:
            self._error = error
        except Exception as error:
            traceback.print_exc(file=sys.stderr)  # the agent's log; people get the sentence
            self._error = FailedError(f"{self.task.name}: {type(error).__name__}: {error}", hint="see the agent's log")

    def finish(self) -> None:
        """Let whoever waits have what came of it."""
        self._done.set()

    def done(self, timeout: float) -> bool:
        return self._done.wait(timeout)

    def wait(self) -> dict[str, Any]:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class Operator(threading.Thread):
    """``tend`` is called about five times a second while no command is at work; it stops for one that comes."""

    def __init__(self, pool: Pool, tend: Callable[[], None]) -> None:
        super().__init__(name="operator", daemon=True)
        self._pool = pool
        self._tend = tend
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._job: Job | None = None
        self.last_turn = time.monotonic()
        """When the worker last took up something (monotonic clock); between turns a task's ``last_sign`` tells."""

    def submit(self, job: Job) -> Job:
        """Raises `BusyError`, which says what is under way, unless the worker is free (tending gives way)."""
        with self._mutex:
            if self._job is not None:
                raise self._pool.refuse_busy(
                    f"{self._job.task.name} (asked by {self._job.task.who})", self._job.task.since
                )
            self._job = job
        self._queue.put(job)
        return job

    def busy(self) -> bool:
        """Whether a command waits or works."""
        return self._job is not None

    def current(self) -> Task | None:
        job = self._job
        return None if job is None else job.task

    def end(self) -> None:
        self._queue.put(None)
        if threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        failed = 0.0
        while True:
            self.last_turn = time.monotonic()
            try:
                job = self._queue.get(timeout=TICK)
            except queue.Empty:
                try:
                    if time.monotonic() >= failed:
                        self._tend()
                except Cancelled:
                    pass
                except Exception as error:  # tending goes on, whatever one look has met
                    failed = time.monotonic() + 1.0
                    print(f"tending: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                continue
            if job is None:
                return
            try:
                job.carry_out()
            finally:
                # Free first, told then: whoever waited may ask for the next thing at once.
                with self._mutex:
                    self._job = None
                job.finish()
