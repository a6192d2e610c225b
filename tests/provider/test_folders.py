from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from egmctl.errors import PreflightError
from egmctl.paths import Paths
from egmctl.provider.folders import check_passable, network_file_system, prepare

MOUNTS = """\
22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw shared:2 - nfs4 server:/home rw
31 30 0:41 / /home/local\\040disk rw - xfs /dev/sdb rw
32 22 0:42 / /var rw - ceph mon:/ rw
33 32 0:43 / /var rw - ext4 /dev/sdc rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me/state", "nfs4"),
        ("/home", "nfs4"),
        ("/homework", None),
        ("/home/local disk/state", None),
        ("/var/lib/egmctl", None),  # the later mount hides the first
        ("/opt", None),
    ],
)
def test_a_state_folder_on_a_network_file_system_is_noticed(path: str, kind: str | None) -> None:
    assert network_file_system(Path(path), MOUNTS) == kind


@pytest.fixture
def open_tmp() -> Iterator[Path]:
    """A folder that everybody gets to."""
    with tempfile.TemporaryDirectory(prefix="egm", dir="/tmp") as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)


def test_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        paths = Paths(tmp_path / "state", tmp_path / "egmctl-0" / "run")
        prepare(paths)
    finally:
        os.umask(before)
    for folder in (paths.state, paths.runtime, paths.runtime.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    prepare(paths)


def test_a_runtime_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "state", tmp_path / "egmctl-0" / "run")
    paths.runtime.parent.mkdir()
    paths.runtime.parent.chmod(0o777)
    with pytest.raises(PreflightError, match="writable by others"):
        prepare(paths)


@pytest.mark.parametrize(
    ("mode", "own_group", "passable"),
    [
        (0o700, True, False),
        (0o710, True, True),
        (0o710, False, False),
        (0o711, False, True),
        (0o701, True, False),  # the bits of the folder's group come first
    ],
)
def test_a_group_passes_a_folder_above_by_its_permission_bits(
    mode: int, own_group: bool, passable: bool, open_tmp: Path
) -> None:
    folder = open_tmp / "above"
    folder.mkdir()
    folder.chmod(mode)
    gid = folder.stat().st_gid + (0 if own_group else 1)
    for runtime in (folder / "egmctl", folder / "egmctl-0" / "run"):
        with nullcontext() if passable else pytest.raises(PreflightError, match=f"{folder} is closed"):
            check_passable(runtime, "kv", gid)


def test_a_group_has_to_pass_what_a_link_leads_through_as_well(open_tmp: Path) -> None:
    (open_tmp / "closed").mkdir(mode=0o700)
    (open_tmp / "closed" / "real").mkdir()
    (open_tmp / "egmctl-0").symlink_to(open_tmp / "closed" / "real")
    with pytest.raises(PreflightError, match="closed is closed"):
        check_passable(open_tmp / "egmctl-0" / "run", "kv", os.getegid())


def test_a_link_is_followed_unless_it_is_somebody_elses(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "state", tmp_path / "egmctl-0" / "run")
    (tmp_path / "own").mkdir(mode=0o700)
    paths.runtime.parent.symlink_to(tmp_path / "own")
    prepare(paths)
    if os.geteuid() != 0:
        pytest.skip("only root can give a link away")
    os.lchown(paths.runtime.parent, 12345, 12345)
    with pytest.raises(PreflightError, match="a link that belongs to uid 12345"):
        prepare(paths)
