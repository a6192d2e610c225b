"""Who may read what egmctl leaves, who may ask it, what it never says, and what its source never does."""

from __future__ import annotations

import ast
import base64
import json
import os
import stat
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import egmctl
from egmctl.mooncake.handshake import fetch_descriptor
from egmctl.paths import Paths
from egmctl.provider.rescue import rescue, rescue_path
from tests.fabric.machines import Host, new_host
from tests.lifecycle.support import command, start_command, write_plan
from tests.provider.pools import small_plan, until
from tests.support.master import Master

SOURCE = Path(egmctl.__file__).parent


# Files and sockets


class Modes(threading.Thread):
    """Looks at everything in some folders, over and over: what appears for an instant is seen too, mostly."""

    def __init__(self, *folders: Path) -> None:
        super().__init__(daemon=True)
        self.folders = folders
        self.seen: dict[Path, set[tuple[str, int]]] = defaultdict(set)
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            self.look()

    def look(self) -> None:
        for folder in self.folders:
            for path in [folder, *self._inside(folder)]:
                try:
                    status = path.lstat()
                except OSError:
                    continue
                kind = "dir" if stat.S_ISDIR(status.st_mode) else "sock" if stat.S_ISSOCK(status.st_mode) else "file"
                self.seen[path].add((kind, stat.S_IMODE(status.st_mode)))

    @staticmethod
    def _inside(folder: Path) -> list[Path]:
        try:
            return [folder / name for name in os.listdir(folder)]
        except OSError:
            return []

    def __enter__(self) -> Modes:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self.join()

    def open_to_others(self) -> dict[str, list[str]]:
        return {
            str(path): sorted(f"{kind} {mode:o}" for kind, mode in modes if mode & 0o077)
            for path, modes in self.seen.items()
            if any(mode & 0o077 for _, mode in modes)
        }


def no_umask() -> None:
    os.umask(0)


@pytest.mark.parametrize("foreground", [False, True])
def test_everything_that_is_left_on_disk_is_the_owners_alone_whatever_the_umask(
    quick_master: Master, tmp_path: Path, state: Path, foreground: bool
) -> None:
    folder = state / "state"
    cli = Paths.resolve(folder)
    plan = str(write_plan(small_plan(quick_master), tmp_path))
    with Modes(folder, cli.runtime) as modes:
        if foreground:
            agent = start_command(cli, "provision", plan, "--mount", "--foreground", preexec_fn=no_umask)
            until(cli.ledger("dev").exists, 30)
            until(lambda: '"ready": true' in command(cli, "status", "--json", preexec_fn=no_umask)[1], 30)
        else:
            assert command(cli, "provision", plan, "--mount", preexec_fn=no_umask)[0] == 0
        assert command(cli, "verify", "dev", preexec_fn=no_umask)[0] == 0
        assert command(cli, "teardown", "dev", "--now", preexec_fn=no_umask)[0] == 0
        if foreground:
            agent.communicate(timeout=30)
    assert modes.open_to_others() == {}
    names = {path.name for path in modes.seen}
    assert {"dev.db", "dev.lock", folder.name, cli.socket("dev").name} <= names
    assert "dev.db-journal" in names
    assert foreground or "dev.log" in names


def test_a_rescue_file_is_the_owners_alone_whatever_the_umask_and_whatever_was_there(tmp_path: Path) -> None:
    path = rescue_path(tmp_path, "dev")
    before = os.umask(0)
    try:
        for _ in range(2):
            assert rescue(tmp_path, None, {"pool": "dev"}) == path
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            path.chmod(0o666)
    finally:
        os.umask(before)


def test_a_state_folder_that_others_may_write_is_refused(quick_master: Master, tmp_path: Path, state: Path) -> None:
    plan = str(write_plan(small_plan(quick_master), tmp_path))
    state.chmod(0o777)
    code, _, said = command(Paths.resolve(state), "provision", plan)
    assert code == 3
    assert "writable by others" in said
    assert "chmod 700" in said


# Another user


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_commands_of_another_user_do_nothing_to_a_pool_and_say_so(
    quick_master: Master, tmp_path: Path, state: Path
) -> None:
    plan = str(write_plan(small_plan(quick_master), tmp_path))
    cli = Paths.resolve(state)
    assert command(cli, "provision", plan, "--mount")[0] == 0

    # What this interpreter is made of has to be readable; the state folder stays closed.
    for arguments in (("status", "dev"), ("mount", "dev"), ("teardown", "dev", "--now"), ("verify", "dev")):
        process = subprocess.run(
            [sys.executable, "-c", BECOME_NOBODY, *arguments],
            env={**os.environ, "EGMCTL_STATE_DIR": str(state), "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert process.returncode in (1, 2, 3), (arguments, process.stdout, process.stderr)
        assert "Traceback" not in process.stderr
        assert "defect" not in process.stderr
        assert str(state) in process.stderr, process.stderr
    code, out, _ = command(cli, "status", "dev", "--json")
    assert (code, json.loads(out)["pools"][0]["state"]) == (0, "ready")
    assert command(cli, "teardown", "dev", "--now")[0] == 0


BECOME_NOBODY = """
import os, sys
import egmctl.cli.main, egmctl.cli.groups, egmctl.provider, egmctl.checks.verify, egmctl.planning, egmctl.topology
import egmctl.consumer, egmctl.provider.commands, egmctl.provider.recover
for name in ("mount", "status", "teardown", "verify"):
    __import__(f"egmctl.cli.commands.{name}")
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(egmctl.cli.main.main(sys.argv[1:]))
"""


# Handles


@contextmanager
def fabric_host(tmp_path: Path) -> Iterator[Host]:
    with new_host(tmp_path) as host:
        yield host


def spellings(handle: bytes) -> dict[str, bytes]:
    """How a handle could be written by mistake; a part of it is too much already."""
    part = handle[:16]
    return {
        "hex": part.hex().encode(),
        "HEX": part.hex().upper().encode(),
        "raw": part,
        "base64": base64.b64encode(handle)[:20],
        "repr": repr(part)[2:-1].encode(),
        "list": json.dumps(list(part))[1:-1].encode(),
    }


def test_no_handle_is_in_any_log_ledger_file_output_or_error(quick_master: Master, tmp_path: Path) -> None:
    with fabric_host(tmp_path) as host:
        said: list[bytes] = []

        def egmctl_says(*arguments: str, wanted: int | None = 0, env: dict[str, str] | None = None) -> None:
            for more in ((), ("--json",)):
                done = subprocess.run(
                    [sys.executable, "-m", "egmctl", "-vv", *more, *arguments],
                    env=env or host.env(),
                    capture_output=True,
                    timeout=120,
                )
                said.extend((done.stdout, done.stderr))
                assert wanted is None or done.returncode == wanted, done.stderr.decode()

        spec = str(host.spec(quick_master, "cuda-fabric"))
        egmctl_says("plan", spec)
        egmctl_says("provision", spec)
        egmctl_says("mount", "tray")
        endpoint = json.loads(
            subprocess.run(
                [sys.executable, "-m", "egmctl", "status", "tray", "--json"], env=host.env(), capture_output=True
            ).stdout
        )["pools"][0]["endpoint"]
        handles = [buffer.handle for buffer in fetch_descriptor(endpoint).buffers]
        assert len(handles) == 2
        assert all(len(handle) == 64 and len(set(handle)) > 8 for handle in handles)
        egmctl_says("status", "tray")
        egmctl_says("doctor", wanted=None)
        egmctl_says("verify", "tray", wanted=None)
        egmctl_says("bench", "tray", "--count", "2", "--block", "4KiB", wanted=None)
        egmctl_says("provision", str(host.spec(quick_master, "cuda-fabric", chunks=3)), wanted=5)
        quick_master.kill()
        egmctl_says("teardown", "tray", "--now", wanted=4)
        egmctl_says("status", "tray")
        quick_master.start()
        files: dict[str, bytes] = {
            str(path): path.read_bytes()
            for folder in (host.paths.state, host.paths.runtime)
            for path in folder.rglob("*")
            if path.is_file()
        }
        egmctl_says("teardown", "tray", "--now")
        files |= {f"{path} afterwards": path.read_bytes() for path in host.paths.state.rglob("*") if path.is_file()}
        assert any(name.endswith("tray.db") for name in files)
        assert any(name.endswith("tray.log") for name in files)
        files |= {f"output {number}": text for number, text in enumerate(said)}
        found = [
            f"{spelling} in {name}"
            for handle in handles
            for spelling, text in spellings(handle).items()
            for name, data in files.items()
            if text in data
        ]
        assert found == []


def test_the_search_for_handles_finds_them_however_they_are_written() -> None:
    handle = bytes(range(100, 164))
    for name, text in spellings(handle).items():
        written = {
            "hex": handle.hex(),
            "HEX": handle.hex().upper(),
            "raw": handle.decode("latin-1"),
            "base64": base64.b64encode(handle).decode(),
            "repr": repr(handle),
            "list": json.dumps(list(handle)),
        }[name]
        assert text in f"something {written} more".encode("latin-1"), name


# The source


def _calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def _modules() -> list[tuple[str, ast.Module]]:
    return [(str(path.relative_to(SOURCE)), ast.parse(path.read_text())) for path in SOURCE.rglob("*.py")]


def test_nothing_is_run_through_a_shell() -> None:
    found = []
    for name, tree in _modules():
        for call, function in _calls(tree):
            if function in ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"):
                found.append(f"{name}:{call.lineno} {function}")
            shell = next((word.value for word in call.keywords if word.arg == "shell"), None)
            if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
                found.append(f"{name}:{call.lineno} shell=")
            if function.startswith("subprocess.") and call.args:
                command = call.args[0]
                if isinstance(command, (ast.JoinedStr, ast.BinOp)) or (
                    isinstance(command, ast.Constant) and isinstance(command.value, str)
                ):
                    found.append(f"{name}:{call.lineno} a command in one string")
    assert found == []


def test_nothing_that_is_read_can_become_code() -> None:
    forbidden = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "runpy"}
    # The decoder of wire types writes functions; names and numbers in them are its own.
    allowed = {("mooncake/decoder.py", "exec")}
    found = set()
    for name, tree in _modules():
        for node in ast.walk(tree):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            found |= {(name, module) for module in modules if module.split(".")[0] in forbidden}
        for _, function in _calls(tree):
            if function in ("eval", "exec", "compile", "__import__", "numpy.load", "np.load"):
                found.add((name, function))
    assert found == allowed


def test_the_decoders_source_has_nothing_of_a_literal_in_it_but_structure() -> None:
    """A type that a peer sends decides which lines are written, never what stands in them."""
    from egmctl.mooncake import decoder as module

    seen: list[str] = []
    original: Callable[..., object] = exec

    def watch(source: str, scope: dict[str, object]) -> None:
        seen.append(source)
        original(source, scope)

    module.decoder.cache_clear()
    module.exec = watch  # type: ignore[attr-defined]
    try:
        for literal in ("87fd0301ff01", "8784fdfd04048989ff01800c0302ff01", "86800c0385840cff", "8104a0"):
            module.decoder(bytes.fromhex(literal), 0)
    finally:
        del module.exec  # type: ignore[attr-defined]
        module.decoder.cache_clear()
    assert seen
    names = {node.id for source in seen for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    known = {"b", "o", "n", "str", "range", "Failure", "too_long", "not_bool", "list", "len", "bytes", "_"}
    strange = {name for name in names - known if name.rstrip("0123456789") not in ("v", "read")}
    assert {name for name in strange if not name.startswith("u_")} == set()


def test_the_checks_of_the_source_see_all_of_it() -> None:
    assert len(_modules()) > 100
    assert {name for name, _ in _modules()} >= {"provider/agent.py", "cli/main.py", "mooncake/te_child.py"}
