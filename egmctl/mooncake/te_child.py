"""The program that serves stock clients over TCP: the wheel's Transfer Engine over the agent's chunks.

The agent starts it with one end of a socket pair and its own pid. It starts an engine, says its data port, maps and
registers the chunks that arrive as descriptors, and then waits until the socket ends. Whatever happens in here, the
agent and its memory do not notice more than the end of a child; and it never outlives the agent, because the socket
ends with it and the kernel sends SIGKILL.

Messages are JSON, one a packet; each request carries ``n``, and so does its one answer. A refusal's ``again`` says
whether another process might do better: ``"port"`` when it may hit the data port, ``"process"`` for anything else.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
from typing import Any, NoReturn

__all__ = ["MAX_DESCRIPTORS", "MAX_PACKET", "main"]

MAX_DESCRIPTORS = 64
"""Descriptors in one packet; the kernel's own limit is 253."""

MAX_PACKET = 64 << 10

_PR_SET_PDEATHSIG = 1
_MADV_DONTDUMP = 16
_ENGINE_ERRORS = {-1: "ERR_INVALID_ARGUMENT", -3: "ERR_ADDRESS_NOT_REGISTERED", -7: "ERR_ADDRESS_OVERLAPPED"}

_kept: list[Any] = []
"""Engines and mappings, so that none is destroyed before the process ends: a destructor can take a second."""


def main() -> NoReturn:
    """``te_child SOCKET_FD PARENT_PID HOST [DATA_PORT]``; ends without running destructors or exit handlers."""
    code = 1
    try:
        code = _serve(sys.argv[1:])
    except BaseException as error:
        print(f"te_child: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _serve(arguments: list[str]) -> int:
    _die_with(int(arguments[1]))
    # Ctrl-C at a terminal and a supervisor's SIGTERM go to every process of the group; the agent decides when its
    # objects stop being served, and ends this process by closing the socket.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A core dump would hold the whole pool.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    from egmctl import seams

    seams.load()
    agent = socket.socket(fileno=int(arguments[0]))
    wanted = int(arguments[3]) if len(arguments) > 3 else None
    engine, data_port, trouble = _start_engine(arguments[2], wanted)
    if engine is None:
        _send(agent, {"n": 0, "ok": False, **trouble})
        return 2
    _send(agent, {"n": 0, "ok": True, "data_port": data_port})
    while True:
        data, ancillary, flags, _ = agent.recvmsg(MAX_PACKET, socket.CMSG_SPACE(MAX_DESCRIPTORS * 4))
        if not data:
            return 0
        descriptors = _descriptors(ancillary)
        request = json.loads(data)
        answer = {"n": request["n"], "ok": True}
        try:
            if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
                raise RuntimeError("a packet of chunks was cut off: too many open files?")
            if request["op"] == "chunks":
                for chunk, descriptor in zip(request["chunks"], descriptors, strict=True):
                    _kept.append(_take(engine, chunk, descriptor))
        except Exception as error:
            answer |= _explain(error)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        _send(agent, answer)


def _die_with(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the signal was asked for
        os._exit(0)


def _start_engine(host: str, wanted: int | None) -> tuple[Any, int, dict[str, Any]]:
    """(engine, data port, nothing), or (None, 0, what to answer)."""
    try:
        from mooncake.engine import TransferEngine
    except Exception as error:
        return None, 0, {"message": f"importing mooncake.engine: {error}", "again": False}
    engine = TransferEngine()
    _kept.append(engine)
    # Names and endpoints of this engine are never published: the agent's own endpoint answers for it.
    code = engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
    if code != 0:
        reason = f"TransferEngine.initialize: {_ENGINE_ERRORS.get(code, 'error')} ({code})"
        return None, 0, {"message": reason, "again": "process" if wanted is None else "port"}
    handshake_port = engine.get_rpc_port()
    listeners = [each for each in _listening_sockets() if each.getsockname()[1] != handshake_port]
    try:
        if len(listeners) != 1:
            ports = [each.getsockname()[1] for each in listeners]
            return None, 0, {"message": f"the engine's data port is not to be told among {ports}", "again": "process"}
        port: int = listeners[0].getsockname()[1]
        if wanted is not None and port != wanted:
            return None, 0, {"message": f"the engine took data port {port}, not {wanted}", "again": "port"}
        # Inherited by the connections accepted from it: after a SIGKILL here, a connection that a client leaves idle
        # is forgotten once its end is acknowledged, and the port can be bound again at once instead of a minute later.
        with contextlib.suppress(OSError):
            listeners[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, -1)
    finally:
        for each in listeners:
            each.close()
    return engine, port, {}


def _listening_sockets() -> list[socket.socket]:
    """Duplicates of this process's own listening TCP sockets."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            found.append(duplicate)
        else:
            duplicate.close()
    return found


def _take(engine: Any, chunk: dict[str, Any], descriptor: int) -> Any:
    from egmctl.memory import Share, import_share

    address, nbytes = chunk["address"], chunk["nbytes"]
    share = Share(chunk["kind"], chunk["numa_node"], nbytes, fd=descriptor)
    mapping = import_share(share, devices=[], address=address)
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_DONTDUMP)
    code = engine.register_memory(address, nbytes)
    if code != 0:
        name = _ENGINE_ERRORS.get(code, "error")
        raise RuntimeError(f"register_memory of {nbytes} bytes at {address:#x}: {name} ({code})")
    return mapping


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    for descriptor in found:
        os.set_inheritable(descriptor, False)
    return list(found)


def _explain(error: Exception) -> dict[str, Any]:
    # A place that is taken in this process may be free in the next one: libraries land elsewhere each time.
    message, where, hint = (getattr(error, name, "") for name in ("message", "where", "hint"))
    return {"ok": False, "message": message or str(error), "where": where, "hint": hint, "again": "process"}


def _send(agent: socket.socket, answer: dict[str, Any]) -> None:
    agent.send(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
