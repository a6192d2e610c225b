"""Noticing, while nothing else happens, that an agent ended or is taking memory down."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable

from egmctl.consumer.agent_link import Watch
from egmctl.consumer.binding import Binding

__all__ = ["Watcher"]


class Watcher:
    """One thread that sleeps until an agent ends or says something, so that an idle consumer, too, lets go."""

    def __init__(self, noticed: Callable[[Binding], None]) -> None:
        self._noticed = noticed
        self._lock = threading.Lock()
        self._bindings: dict[int, Binding] = {}
        self._thread: threading.Thread | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self._closed = False

    def add(self, binding: Binding) -> None:
        assert binding.watch is not None
        with self._lock:
            number = binding.watch.fileno()
            if (
                number < 0 or self._closed
            ):  # ended meanwhile, and whoever saw it has closed it; or nobody looks any more
                return
            self._bindings[number] = binding
            if self._thread is None:
                self._wake = socket.socketpair()
                self._thread = threading.Thread(target=self._run, args=(self._wake[0],), name="egm-watch", daemon=True)
                self._thread.start()
            self._ring(b"+")

    def remove(self, watch: Watch) -> None:
        with self._lock:
            for fd, binding in list(self._bindings.items()):
                if binding.watch is watch:
                    del self._bindings[fd]
                    self._ring(b"+")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
            if thread is None or self._wake is None:
                return
            self._ring(b"x")
        if thread is not threading.current_thread():
            thread.join()
        for end in self._wake:
            end.close()

    def _ring(self, text: bytes) -> None:
        if self._wake is not None:
            self._wake[1].send(text)

    def _run(self, wake: socket.socket) -> None:
        while True:
            poller = select.poll()
            poller.register(wake, select.POLLIN)
            with self._lock:
                for fd in self._bindings:
                    poller.register(fd, select.POLLIN)
            for fd, _ in poller.poll():
                if fd == wake.fileno():
                    if b"x" in wake.recv(4096):
                        return
                    continue
                with self._lock:
                    binding = self._bindings.get(fd)
                    if binding is not None and (binding.watch is None or not binding.watch.alive()):
                        del self._bindings[fd]
                if binding is not None:
                    self._noticed(binding)
