"""The control socket as the consumer uses it: against peers that are not what they should be."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from egmctl.consumer import agent_link
from egmctl.consumer.agent_link import Watch, export
from egmctl.consumer.binding import Binding
from egmctl.consumer.errors import ProviderGone, StaleAllocation, Unreachable
from egmctl.consumer.watcher import Watcher
from egmctl.mooncake.descriptor import SegmentDescriptor
from tests.consumer.support import open_files, until

NONCE = "ab" * 16


@contextmanager
def peer(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="egm", dir="/tmp") as folder:
        path = f"{folder}/s"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()

        def run() -> None:
            with suppress(OSError):
                while True:
                    link, _ = listener.accept()
                    with link, suppress(OSError):
                        serve(link)

        threading.Thread(target=run, daemon=True).start()
        yield path
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def row(**changes: object) -> dict[str, object]:
    return {"index": 0, "numa_node": 0, "address": 4096, "nbytes": 8192, "kind": "shm", **changes}


def answering(document: object, fds: int = 1) -> Callable[[socket.socket], None]:
    def serve(link: socket.socket) -> None:
        link.recv(4096)
        given = [os.open("/dev/null", os.O_RDONLY) for _ in range(fds)]
        data = document if isinstance(document, bytes) else json.dumps(document).encode() + b"\n"
        socket.send_fds(link, [data], given) if given else link.sendall(data)
        for fd in given:
            os.close(fd)
        time.sleep(0.2)

    return serve


def ask(path: str) -> object:
    return export(path, 0, NONCE, 4096, 8192, 1.0)


def good(**changes: object) -> dict[str, object]:
    return {"ok": True, "result": {"nonce": NONCE, "chunks": [row(**changes)]}}


def test_a_chunk_is_handed_over_with_its_descriptor() -> None:
    with peer(answering(good())) as path:
        share = export(path, 0, NONCE, 4096, 8192, 1.0)
        assert (share.kind, share.nbytes, share.numa_node) == ("shm", 8192, 0)
        assert share.fd is not None
        assert not os.get_inheritable(share.fd)
        os.close(share.fd)


@pytest.mark.parametrize(
    ("document", "fds", "kind"),
    [
        (good(), 0, ProviderGone),
        (good(), 2, ProviderGone),
        (good(index=1), 1, StaleAllocation),
        (good(address=8192), 1, StaleAllocation),
        (good(nbytes=4096), 1, StaleAllocation),
        (good(kind="cuda-fabric"), 1, StaleAllocation),
        ({"ok": True, "result": {"nonce": "other", "chunks": [row()]}}, 1, StaleAllocation),
        ({"ok": True, "result": {"nonce": NONCE, "chunks": []}}, 1, ProviderGone),
        ({"ok": True, "result": {"nonce": NONCE, "chunks": "x"}}, 1, ProviderGone),
        ({"ok": True, "result": 5}, 1, StaleAllocation),
        ({"ok": False, "error": {"message": "no such chunk"}}, 1, StaleAllocation),
        ({"ok": False, "error": {"code": "usage", "message": "uid 5 may not use this pool"}}, 1, Unreachable),
        ({"ok": False, "error": 7}, 1, StaleAllocation),
        (b"not json\n", 1, ProviderGone),
        (b"[1]\n", 1, ProviderGone),
        (b"half a line", 1, ProviderGone),
        (b"x" * (3 << 20), 1, ProviderGone),
    ],
)
def test_any_other_answer_is_refused_and_no_descriptor_is_left_open(
    document: object, fds: int, kind: type[Exception]
) -> None:
    with peer(answering(document, fds)) as path:
        before = open_files()
        with pytest.raises(kind):
            ask(path)
        until(lambda: open_files() <= before)


def test_a_full_backlog_is_waited_for_and_given_up_in_time() -> None:
    with tempfile.TemporaryDirectory(prefix="egm", dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = f"{folder}/s"
        listener.bind(path)
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(path)  # nobody accepts it, and there is room for no other
            began = time.monotonic()
            with pytest.raises(ProviderGone):
                export(path, 0, NONCE, 4096, 8192, 0.3)
            assert 0.3 <= time.monotonic() - began < 3

            def accept_late() -> None:
                time.sleep(0.3)
                listener.accept()[0].close()
                link, _ = listener.accept()
                with link:
                    answering({"ok": True, "result": {"nonce": NONCE, "chunks": [row()]}})(link)

            late = threading.Thread(target=accept_late, daemon=True)
            late.start()
            share = export(path, 0, NONCE, 4096, 8192, 5.0)
            assert share.fd is not None
            os.close(share.fd)
            late.join()


@pytest.mark.parametrize("fds", [0, 1])
def test_an_answer_that_is_nested_too_deeply_is_refused(fds: int) -> None:
    nested = b'{"a":' * 100_000 + b"\n"
    before = open_files()
    with peer(answering(nested, fds)) as path, pytest.raises(ProviderGone):
        export(path, 0, NONCE, 4096, 8192, 5.0)
    until(lambda: open_files() == before)


def test_a_peer_that_does_not_answer_is_given_up_in_time() -> None:
    with peer(lambda link: time.sleep(5)) as path:
        started = time.monotonic()
        with pytest.raises(ProviderGone, match="timed out"):
            export(path, 0, NONCE, 4096, 8192, 0.3)
        assert time.monotonic() - started < 2
    with pytest.raises(ProviderGone):
        ask("/tmp/egm-no-such-socket")


def test_progress_before_the_answer_is_skipped() -> None:
    lines = [{"event": "progress", "done": 1}, good()]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    with peer(answering(data)) as path:
        share = export(path, 0, NONCE, 4096, 8192, 1.0)
        assert share.fd is not None
        os.close(share.fd)


def test_a_peer_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with peer(answering(good())) as path:
        real = os.geteuid()
        link = socket.socket(socket.AF_UNIX)
        link.connect(path)
        with link:
            agent_link.check_peer(link, path)
            # As another user, whose folder it is not: the peer (this process) is a stranger, unless it is root.
            monkeypatch.setattr(os, "geteuid", lambda: real + 1000)
            monkeypatch.setattr(os, "stat", lambda path: os.stat_result([0o40700, 0, 0, 0, real + 1, 0, 0, 0, 0, 0]))
            monkeypatch.setattr(agent_link, "_ROOT", -1)
            with pytest.raises(Unreachable, match=f"uid {real}"):
                agent_link.check_peer(link, path)


def test_a_watch_sees_withdrawals_and_the_end_without_waiting() -> None:
    links: list[socket.socket] = []
    go = threading.Event()

    def serve(link: socket.socket) -> None:
        link.recv(4096)
        link.sendall(json.dumps({"ok": True, "result": {"nonce": NONCE, "pool": "p"}}).encode() + b"\n")
        links.append(link)
        go.wait(10)

    with peer(serve) as path:
        watch = Watch(path, 1.0)
        assert watch.nonce == NONCE
        assert watch.alive()
        until(lambda: bool(links))
        event = json.dumps({"event": "withdrawn", "chunks": [3, 4]}).encode() + b"\n"
        links[0].sendall(event[:10])
        time.sleep(0.05)
        assert watch.alive()
        assert watch.withdrawn == set()
        links[0].sendall(event[10:])
        until(lambda: watch.alive() and watch.withdrawn == {3, 4})
        go.set()
        until(lambda: not watch.alive())
        assert not watch.alive()
        watch.close()


def test_a_watch_that_says_nonsense_is_over() -> None:
    def serve(link: socket.socket) -> None:
        link.recv(4096)
        link.sendall(json.dumps({"ok": True, "result": {"nonce": NONCE}}).encode() + b"\nnonsense\n")
        time.sleep(1)

    with peer(serve) as path:
        watch = Watch(path, 1.0)
        until(lambda: not watch.alive(), 0.9)
        watch.close()


def test_a_watch_that_has_ended_before_it_is_added_does_not_end_the_watching() -> None:
    links: list[socket.socket] = []

    def serve(link: socket.socket) -> None:
        link.recv(4096)
        links.append(link.dup())
        link.sendall(json.dumps({"ok": True, "result": {"nonce": NONCE, "pool": "p"}}).encode() + b"\n")

    noticed: list[Binding] = []
    watcher = Watcher(noticed.append)
    empty = SegmentDescriptor("p", "tcp", ())
    with peer(serve) as path:
        first, second, third = (Binding("e", empty, Watch(path, 2.0), 0.0) for _ in range(3))
        assert first.watch is not None
        assert second.watch is not None
        assert third.watch is not None
        watcher.add(first)
        second.watch.close()  # as the watching thread itself does when the agent dies just now
        watcher.add(second)
        watcher.add(third)
        until(lambda: len(links) == 3)
        links[2].close()
        until(lambda: noticed == [third])
        watcher.close()
        first.watch.close()
        third.watch.close()
    for link in links:
        link.close()
