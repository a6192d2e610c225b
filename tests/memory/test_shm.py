"""Memory kind shm: where it lies, that it cannot be shrunk, and that nothing is left whatever fails."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from egmctl import steps
from egmctl.errors import EgmError, FailedError, PreflightError
from egmctl.memory import ChunkSpec, ReleaseError, Share, import_share, linux, provider_memory
from egmctl.memory import shm as shm_module
from egmctl.memory.shm import ShmProvider
from egmctl.units import MIB

UNIT = 16 * MIB


def nothing(_: int) -> None:
    pass


def open_descriptors() -> set[str]:
    return {f"{fd}:{os.readlink(f'/proc/self/fd/{fd}')}" for fd in os.listdir("/proc/self/fd") if _is_memory(fd)}


def _is_memory(fd: str) -> bool:
    try:
        return "memfd:egm" in os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False


def mapped(address: int) -> str | None:
    """The line of /proc/self/maps that covers an address."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= address < end:
                return line
    return None


@pytest.fixture
def pool() -> Iterator[ShmProvider]:
    provider = ShmProvider(4 * UNIT)
    yield provider
    for chunk in provider.chunks():
        provider.release(chunk)
    provider.close()


class Fail:
    """A watcher that lets one step fail, before or after its act, a number of times."""

    def __init__(self, site: str, error: BaseException, *, after: bool = False, times: int = 1) -> None:
        self.site, self.error, self.late, self.times = site, error, after, times
        self.seen: list[str] = []

    def before(self, site: str, detail: dict[str, Any]) -> None:
        self.seen.append(site)
        self._hit(site, late=False)

    def after(self, site: str, detail: dict[str, Any], error: BaseException | None) -> None:
        if error is None:
            self._hit(site, late=True)

    def _hit(self, site: str, *, late: bool) -> None:
        if site == self.site and late == self.late and self.times:
            self.times -= 1
            raise self.error


@pytest.fixture
def fail() -> Iterator[type[Fail]]:
    yield Fail
    steps.watch(None)


def test_a_chunk_is_writable_memory_on_its_node_at_an_aligned_address(pool: ShmProvider) -> None:
    done: list[int] = []
    chunk = pool.create(ChunkSpec(0, 0, 2 * UNIT), done.append)
    assert chunk.address % UNIT == 0
    assert done[-1] == 2 * UNIT
    view = chunk.host_view()
    assert len(view) == 2 * UNIT
    view[-3:] = b"end"
    assert bytes(view[-3:]) == b"end"
    pages = [chunk.address + offset for offset in range(0, 2 * UNIT, linux.page_size())]
    assert set(linux.page_nodes(pages)) == {0}, "every page, not only the sampled ones, is there and on node 0"


def test_progress_comes_piece_by_piece(pool: ShmProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_module, "POPULATE_PIECE", 4 * MIB)
    done: list[int] = []
    pool.create(ChunkSpec(0, 0, 10 * MIB), done.append)
    assert done == [4 * MIB, 8 * MIB, 10 * MIB]


def test_chunks_lie_one_after_the_other_in_one_range_away_from_the_heap(pool: ShmProvider) -> None:
    first = pool.create(ChunkSpec(0, 0, UNIT), nothing)
    second = pool.create(ChunkSpec(1, 0, UNIT), nothing)
    assert second.address == first.address + UNIT
    assert 1 << 44 <= first.address < 1 << 46


def test_two_pools_of_the_same_plan_get_different_addresses() -> None:
    addresses = set()
    for _ in range(4):
        provider = ShmProvider(UNIT)
        chunk = provider.create(ChunkSpec(0, 0, UNIT), nothing)
        addresses.add(chunk.address)
        provider.release(chunk)
        provider.close()
    assert len(addresses) == 4


def test_an_address_is_never_used_for_another_chunk_and_stays_reserved(pool: ShmProvider) -> None:
    chunk = pool.create(ChunkSpec(0, 0, UNIT), nothing)
    pool.release(chunk)
    line = mapped(chunk.address)
    assert line is not None
    assert "---p" in line, "the range is still ours, and touches nothing"
    seen = {chunk.address}
    for _ in range(8):  # twice the reserved range
        again = pool.create(ChunkSpec(0, 0, UNIT), nothing)
        assert again.address not in seen
        seen.add(again.address)
        pool.release(again)


def test_a_forced_address_is_taken_and_one_in_use_is_refused() -> None:
    first = ShmProvider(UNIT, address_hint=0x2A0000000000)
    with pytest.raises(FailedError, match="File exists"):
        ShmProvider(UNIT, address_hint=0x2A0000000000)
    assert first.create(ChunkSpec(0, 0, UNIT), nothing).address == 0x2A0000000000
    first.release(first.chunks()[0])
    first.close()
    second = ShmProvider(UNIT, address_hint=0x2A0000000000)
    second.close()


def test_released_memory_is_gone_and_releasing_twice_is_success(pool: ShmProvider) -> None:
    before = open_descriptors()
    chunk = pool.create(ChunkSpec(0, 0, UNIT), nothing)
    assert pool.owned() == [ChunkSpec(0, 0, UNIT)]
    pool.release(chunk)
    pool.release(chunk)
    assert pool.owned() == []
    assert open_descriptors() == before
    with pytest.raises(FailedError, match="released"):
        chunk.share()
    with pytest.raises(FailedError, match="released"):
        chunk.host_view()


def test_a_share_never_shows_its_descriptor(pool: ShmProvider) -> None:
    share = pool.create(ChunkSpec(0, 0, UNIT), nothing).share()
    assert share.fd is not None
    assert "redacted" in repr(share)
    assert f"{share.fd}" not in repr(share).replace("16777216", "")
    assert fcntl.fcntl(share.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(share.fd)


def test_a_peer_can_neither_shrink_nor_grow_nor_unseal_the_file(pool: ShmProvider) -> None:
    share = pool.create(ChunkSpec(0, 0, UNIT), nothing).share()
    assert share.fd is not None
    try:
        for size in (0, 2 * UNIT):
            with pytest.raises(PermissionError):
                os.ftruncate(share.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(share.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(share.fd)


def test_importer_and_provider_see_the_same_bytes(pool: ShmProvider) -> None:
    chunk = pool.create(ChunkSpec(0, 0, UNIT), nothing)
    share = chunk.share()
    assert share.fd is not None
    mapping = import_share(share, devices=[])
    os.close(share.fd)
    chunk.host_view()[:5] = b"hello"
    assert bytes(mapping.host_view()[:5]) == b"hello"
    assert mapping.address != chunk.address
    assert mapping.nbytes == UNIT
    assert mapping.device_address is None
    mapping.close()
    mapping.close()
    with pytest.raises(FailedError, match="closed"):
        _ = mapping.address


def _reader(connection: socket.socket, address: int) -> None:
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    share = Share("shm", 0, UNIT, fd=descriptors[0])
    mapping = import_share(share, devices=[], address=address)
    mapping.host_view()[UNIT - 4 :] = b"back"
    connection.sendall(bytes(mapping.host_view()[:4]) + mapping.address.to_bytes(8, "little"))


def test_another_process_maps_the_chunk_at_the_providers_own_address(pool: ShmProvider) -> None:
    chunk = pool.create(ChunkSpec(0, 0, UNIT), nothing)
    chunk.host_view()[:4] = b"forw"
    ours, theirs = socket.socketpair()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_reader, args=(theirs, chunk.address))
    child.start()
    share = chunk.share()
    assert share.fd is not None
    socket.send_fds(ours, [b"x"], [share.fd])
    os.close(share.fd)
    ours.settimeout(30)
    answer = ours.recv(12)
    child.join(30)
    ours.close()
    theirs.close()
    assert child.exitcode == 0
    assert answer[:4] == b"forw"
    assert int.from_bytes(answer[4:], "little") == chunk.address
    assert bytes(chunk.host_view()[UNIT - 4 :]) == b"back"


def test_an_import_keeps_the_bytes_when_the_provider_releases(pool: ShmProvider) -> None:
    chunk = pool.create(ChunkSpec(0, 0, UNIT), nothing)
    chunk.host_view()[:3] = b"old"
    share = chunk.share()
    assert share.fd is not None
    mapping = import_share(share, devices=[])
    os.close(share.fd)
    pool.release(chunk)
    assert bytes(mapping.host_view()[:3]) == b"old"
    mapping.close()


def test_an_import_at_a_used_address_is_refused_and_leaves_nothing(pool: ShmProvider) -> None:
    chunk = pool.create(ChunkSpec(0, 0, UNIT), nothing)
    share = chunk.share()
    assert share.fd is not None
    with pytest.raises(FailedError, match="File exists") as caught:
        import_share(share, devices=[], address=chunk.address)
    assert "in use" in caught.value.hint
    os.close(share.fd)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW])
def test_a_file_that_could_still_be_shrunk_or_unsealed_is_refused(seals: int) -> None:
    fd = linux.memfd("egm-test", UNIT)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(FailedError, match="not sealed"):
            import_share(Share("shm", 0, UNIT, fd=fd), devices=[])
    finally:
        os.close(fd)


def test_a_file_on_disk_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    with path.open("r+b") as file, pytest.raises(FailedError, match="not sealed"):
        import_share(Share("shm", 0, 4096, fd=file.fileno()), devices=[])


def test_a_file_shorter_than_the_chunk_is_refused() -> None:
    fd = linux.memfd("egm-test", UNIT)
    try:
        linux.seal(fd)
        with pytest.raises(FailedError, match="16777216 bytes, the chunk should have 33554432"):
            import_share(Share("shm", 0, 2 * UNIT, fd=fd), devices=[])
    finally:
        os.close(fd)


def test_an_unknown_node_is_refused_in_preflight_and_in_create(pool: ShmProvider) -> None:
    with pytest.raises(PreflightError, match="node 900"):
        pool.preflight([ChunkSpec(0, 900, UNIT)])
    with pytest.raises(PreflightError, match="node 900"):
        pool.create(ChunkSpec(0, 900, UNIT), nothing)
    assert pool.owned() == []


def test_a_size_that_is_no_multiple_of_the_page_is_refused(pool: ShmProvider) -> None:
    with pytest.raises(FailedError, match="multiple"):
        pool.create(ChunkSpec(0, 0, UNIT + 1), nothing)


def denied(*_: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_mbind_denied_is_a_warning_with_one_node(pool: ShmProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "set_node", denied)
    monkeypatch.setattr(linux, "online_nodes", lambda: [0])
    pool.preflight([ChunkSpec(0, 0, UNIT)])
    pool.create(ChunkSpec(0, 0, UNIT), nothing)
    pool.create(ChunkSpec(1, 0, UNIT), nothing)
    assert len(pool.warnings) == 1
    assert "mbind is denied" in pool.warnings[0]


def test_mbind_denied_is_refused_with_several_nodes(pool: ShmProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "set_node", denied)
    monkeypatch.setattr(linux, "online_nodes", lambda: [0, 1])
    for act in (lambda: pool.preflight([ChunkSpec(0, 1, UNIT)]), lambda: pool.create(ChunkSpec(0, 1, UNIT), nothing)):
        with pytest.raises(PreflightError) as caught:
            act()
        assert "SYS_NICE" in caught.value.hint
    assert pool.owned() == []


def test_pages_on_the_wrong_node_are_found_and_told_in_numbers(
    pool: ShmProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()
    monkeypatch.setattr(linux, "page_nodes", lambda pages: [1] * 3 + [0] * (len(pages) - 3))
    with pytest.raises(FailedError, match="3 of 1024 sampled pages are not on NUMA node 0: 3 on node 1"):
        pool.create(ChunkSpec(0, 0, UNIT), nothing)
    assert pool.owned() == []
    assert open_descriptors() == before


def test_a_kernel_without_populate_write_allocates_through_the_file(
    pool: ShmProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linux, "_populate_write", False)
    chunk = pool.create(ChunkSpec(0, 0, UNIT), nothing)
    share = chunk.share()
    assert share.fd is not None
    assert os.fstat(share.fd).st_blocks * 512 == UNIT, "fully allocated"
    os.close(share.fd)


def test_huge_pages_that_are_not_there_are_refused_with_the_command_that_reserves_them() -> None:
    size = 2 * MIB
    if size not in linux.huge_page_sizes():
        pytest.skip("this kernel has no 2 MiB pages")
    provider = ShmProvider(UNIT, huge_page_bytes=size)
    wanted = (linux.free_huge_pages(size, 0) + 8) * size
    with pytest.raises(PreflightError, match="huge pages of 2 MiB are wanted") as caught:
        provider.preflight([ChunkSpec(0, 0, wanted)])
    assert f"echo {linux.reserved_huge_pages(size, 0) + 8} > " in caught.value.hint
    if linux.free_huge_pages(size, 0) * size < UNIT:
        with pytest.raises(FailedError, match="not enough free huge pages"):
            provider.create(ChunkSpec(0, 0, UNIT), nothing)
    assert provider.owned() == []
    provider.close()


def test_a_huge_page_size_the_kernel_lacks_is_refused() -> None:
    with pytest.raises(PreflightError, match="no huge pages of 3 MiB"):
        provider_memory("shm", total_bytes=UNIT, huge_page_bytes=3 * MIB)


SETUP_SITES = [
    "memory.shm.file",
    "memory.shm.map",
    "memory.shm.bind",
    "memory.shm.populate",
    "memory.shm.seal",
    "memory.shm.placement",
]


def test_the_list_of_setup_steps_is_complete(pool: ShmProvider, fail: type[Fail]) -> None:
    watcher = fail("", RuntimeError())
    steps.watch(watcher)
    pool.create(ChunkSpec(0, 0, UNIT), nothing)
    assert list(dict.fromkeys(watcher.seen)) == SETUP_SITES


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("site", SETUP_SITES)
def test_whatever_step_of_setup_fails_nothing_is_left(
    pool: ShmProvider, fail: type[Fail], site: str, late: bool
) -> None:
    kept = pool.create(ChunkSpec(0, 0, UNIT), nothing)
    before = open_descriptors()
    steps.watch(fail(site, RuntimeError("told to fail"), after=late))
    with pytest.raises(RuntimeError, match="told to fail"):
        pool.create(ChunkSpec(1, 0, UNIT), nothing)
    steps.watch(None)
    assert pool.owned() == [kept.spec]
    assert open_descriptors() == before
    line = mapped(kept.address + UNIT)
    assert line is not None
    assert "---p" in line


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EFAULT, errno.ENOSPC])
def test_no_memory_while_populating_is_an_error_with_a_hint(pool: ShmProvider, fail: type[Fail], number: int) -> None:
    steps.watch(fail("memory.shm.populate", OSError(number, os.strerror(number))))
    with pytest.raises(FailedError) as caught:
        pool.create(ChunkSpec(0, 0, UNIT), nothing)
    assert errno.errorcode[number] in caught.value.message
    assert "smaller capacity" in caught.value.hint
    assert caught.value.where == "chunk 0, NUMA node 0"


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("site", ["memory.shm.unmap", "memory.shm.close"])
def test_a_release_that_fails_keeps_what_is_left_and_succeeds_later(
    pool: ShmProvider, fail: type[Fail], site: str, late: bool
) -> None:
    before = open_descriptors()
    chunk = pool.create(ChunkSpec(0, 0, UNIT), nothing)
    steps.watch(fail(site, OSError(errno.EBUSY, "busy"), after=late))
    with pytest.raises(ReleaseError):
        pool.release(chunk)
    steps.watch(None)
    assert pool.owned() == [chunk.spec]
    with pytest.raises(ReleaseError, match="still exist"):
        pool.close()
    watcher = fail("", RuntimeError())
    steps.watch(watcher)
    pool.release(chunk)
    done_already = {"memory.shm.unmap"} if site == "memory.shm.close" or late else set()
    assert not done_already & set(watcher.seen), "a step that was done is not repeated"
    assert pool.owned() == []
    assert open_descriptors() == before


def test_an_undo_that_fails_too_leaves_the_chunk_owned_and_releasable(pool: ShmProvider, fail: type[Fail]) -> None:
    before = open_descriptors()

    class Both(Fail):
        def before(self, site: str, detail: dict[str, Any]) -> None:
            if site in ("memory.shm.seal", "memory.shm.unmap"):
                raise OSError(errno.ENOMEM, "no")

    steps.watch(Both("", RuntimeError()))
    with pytest.raises(ReleaseError) as caught:
        pool.create(ChunkSpec(0, 0, UNIT), nothing)
    assert isinstance(caught.value.__context__, (EgmError, OSError))
    steps.watch(None)
    assert pool.owned() == [ChunkSpec(0, 0, UNIT)]
    pool.release(pool.chunks()[0])
    assert open_descriptors() == before


def test_closing_gives_the_addresses_back() -> None:
    provider = ShmProvider(UNIT)
    address = provider.create(ChunkSpec(0, 0, UNIT), nothing).address
    provider.release(provider.chunks()[0])
    provider.close()
    provider.close()
    assert mapped(address) is None


def test_a_core_dump_leaves_the_chunks_out(pool: ShmProvider) -> None:
    chunk = pool.create(ChunkSpec(0, 0, UNIT), nothing)
    with open("/proc/self/smaps", encoding="ascii") as smaps:
        text = smaps.read()
    entry = text[text.index(f"{chunk.address:x}-") :]
    flags = next(line for line in entry.splitlines() if line.startswith("VmFlags:"))
    assert "dd" in flags.split()
