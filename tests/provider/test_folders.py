from __future__ import annotations

import os
from pathlib import Path

import pytest

from egmctl.errors import PreflightError
from egmctl.paths import Paths
from egmctl.provider.folders import network_file_system, prepare

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
