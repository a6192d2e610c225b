"""Who is accused of holding memory that did not come back, and who is acquitted."""

from __future__ import annotations

import mmap
import os

from egmctl.provider.holders import has_let_go, mappers


def test_who_maps_a_chunk_or_holds_it_open_has_not_let_go_of_it() -> None:
    fd = os.memfd_create("egm-chunk-of-a-test")
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        inodes = {os.fstat(fd).st_ino: 3}
        assert not has_let_go(os.getpid(), inodes)  # open
        view = mmap.mmap(fd, mmap.PAGESIZE)
    finally:
        os.close(fd)
    assert not has_let_go(os.getpid(), inodes)  # mapped (and mmap keeps a descriptor of its own)
    view.close()
    assert has_let_go(os.getpid(), inodes)
    assert mappers(inodes) == {}


def test_a_process_that_cannot_be_looked_into_is_not_acquitted() -> None:
    assert not has_let_go(2**22 + 1, {1: 0})
