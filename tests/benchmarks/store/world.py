"""What is measured on: a real Master, a pool of a real agent, sizes for a GPU and for a rehearsal without one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from egmctl.errors import EgmError
from egmctl.ledger import is_running, read_only
from egmctl.paths import Paths

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "REAL",
    "REHEARSAL",
    "Pool",
    "Rows",
    "Scale",
    "World",
    "give_a_cpu_of_its_own",
    "on_a_cpu_of_its_own",
    "rehearse_on_the_model",
]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Scale:
    """Sizes in bytes, and how often."""

    pool: int
    chunk: int
    hbm: int  # of each GPU
    raw: int
    large: tuple[tuple[int, int], ...]  # (bytes of one object, objects of one pass)
    batch: tuple[int, int]  # (objects, bytes of each)
    near: int  # the span that address translation reaches
    far: int  # and one that it does not
    gathered: int  # bytes that one gather brings
    top_k: int
    small: int  # calls of which the median is taken
    stock: int
    repeats: int
    restart_chunk: int
    restart_object: int
    soak: int  # puts and gets, of the threads and of the processes together
    soak_largest: int


REAL = Scale(
    pool=16 * GIB,
    chunk=8 * GIB,
    hbm=4 * GIB,
    raw=GIB,
    large=((64 * MIB, 64), (256 * MIB, 16), (GIB, 4)),
    batch=(256, MIB),
    near=512 * MIB,
    far=4 * GIB,
    gathered=512 * MIB,
    top_k=2048,
    small=2000,
    stock=512 * MIB,
    repeats=7,
    restart_chunk=64 * MIB,
    restart_object=256 * KIB,
    soak=100_000,
    soak_largest=256 * KIB,
)
REHEARSAL = Scale(
    pool=128 * MIB,
    chunk=64 * MIB,
    hbm=32 * MIB,
    raw=8 * MIB,
    large=((2 * MIB, 8),),
    batch=(256, 4 * KIB),
    near=4 * MIB,
    far=16 * MIB,
    gathered=2 * MIB,
    top_k=64,
    small=50,
    stock=4 * MIB,
    repeats=2,
    restart_chunk=16 * MIB,
    restart_object=16 * KIB,
    soak=2_000,
    soak_largest=64 * KIB,
)


@dataclass
class World:
    """What a part of the benchmark has to know, as JSON on its command line."""

    master: str
    admin: str
    rehearsal: bool
    rows: str  # the file that its rows are appended to
    master_pid: int = 0  # of a Master that has a CPU of its own

    @property
    def scale(self) -> Scale:
        return REHEARSAL if self.rehearsal else REAL

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Rows:
    """Figures, each written down as soon as it is known: a part that dies later does not take them along."""

    def __init__(self, world: World, part: int) -> None:
        self._path = world.rows
        self._part = part
        self._judged = not world.rehearsal  # speeds of a model mean nothing

    def add(
        self,
        name: str,
        *,
        target: float | None = None,
        ratio: float | None = None,
        good: bool | None = None,
        **more: Any,
    ) -> None:
        """``ratio`` is judged by ``target``, unless ``good`` says how it is."""
        if good is None and target is not None and ratio is not None and self._judged:
            good = ratio >= target
        row = {
            "part": self._part,
            "name": name,
            "ratio": None if ratio is None else round(ratio, 3 if ratio < 10 else 1),
            "target": target,
            "good": good,
            **more,
        }
        with open(self._path, "a") as file:
            file.write(json.dumps(row) + "\n")


def _quickest(cpus: set[int]) -> list[int]:
    """The quickest first, by a loop of a millisecond on each: on a shared host a neighbour halves the speed of single
    CPUs, for seconds."""
    mine = os.sched_getaffinity(0)
    seconds: dict[int, float] = {}
    try:
        for cpu in sorted(cpus):
            os.sched_setaffinity(0, {cpu})
            for _ in range(3):
                begin = time.perf_counter()
                sum(number * number for number in range(5_000))
                took = time.perf_counter() - begin
                seconds[cpu] = min(took, seconds.get(cpu, took))
    finally:
        os.sched_setaffinity(0, mine)
    return sorted(seconds, key=lambda cpu: seconds[cpu])


@contextmanager
def on_a_cpu_of_its_own(world: World) -> Iterator[Callable[[], None]]:
    """This thread, and what it starts meanwhile, on one CPU: one that moves about finds cold caches, and on a virtual
    machine CPUs that have to be woken. What is yielded chooses anew, for the Master as well when that has one: the two
    that are quickest now, which are not next to each other (that may be the other half of the same core). Nothing is
    done where there are fewer than four."""
    mine = os.sched_getaffinity(0)
    masters = _cpus_of(world.master_pid) if world.master_pid else set()

    def choose() -> None:
        if len(mine | masters) < 4:
            return
        order = _quickest(mine | masters)
        if world.master_pid:
            _run_on(world.master_pid, next(cpu for cpu in order if cpu // 2 != order[0] // 2))
        os.sched_setaffinity(0, {order[0]})

    choose()
    try:
        yield choose
    finally:
        os.sched_setaffinity(0, mine)


def _cpus_of(pid: int) -> set[int]:
    return set(os.sched_getaffinity(pid))


def _run_on(pid: int, cpu: int) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), {cpu})


def rehearse_on_the_model() -> None:
    """Let this process and those it starts see a model of the driver: one node, two GPUs."""
    from tests.model.config import Config, Device

    folder = Path(tempfile.mkdtemp(prefix="egm-rehearsal-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    devices = (Device("0008:01:00.0", 0, total_bytes=4 * GIB), Device("0009:01:00.0", 0, total_bytes=4 * GIB))
    os.environ.update(Config(directory=folder, nodes=(0,), devices=devices).to_env())
    os.environ["EGMCTL_SEAMS"] = "tests.model.driver:install,tests.model.kernels:install"
    newer = Path(__file__).resolve().parents[3] / ".cache/mooncake-0.3.14/mooncake/mooncake_master"
    if newer.exists():
        os.environ.setdefault("EGMCTL_MOONCAKE_MASTER", str(newer))
    import atexit

    atexit.register(shutil.rmtree, folder, True)


def give_a_cpu_of_its_own(pid: int) -> bool:
    """Have all threads of a process run on one CPU, the quickest. False, and nothing done, where there are fewer than
    four."""
    mine = os.sched_getaffinity(0)
    if len(mine) < 4:
        return False
    _run_on(pid, _quickest(mine)[0])
    return True


@dataclass
class Pool:
    """``with Pool(...) as pool``: provisioned and mounted by an agent of its own; torn down when left."""

    name: str
    master: str
    admin: str
    nbytes: int
    chunk: int
    kind: str = "cuda-posix"
    hostname: str = "127.0.0.1"
    lease_ttl: float = 10.0
    client_expiry: float = 40.0
    environment: dict[str, str] = field(default_factory=dict)
    log: Callable[[str], None] = lambda text: None

    def __enter__(self) -> Pool:
        self.folder = Path(tempfile.mkdtemp(prefix="egm", dir="/tmp"))
        self.paths = Paths(self.folder / "state", self.folder / "run")
        try:
            self.status = self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> dict[str, Any]:
        from egmctl.planning import assumed_granularity, make_plan, parse_spec
        from egmctl.provider import provision
        from egmctl.topology import read_topology

        spec = parse_spec(
            {
                "pool": {
                    "name": self.name,
                    "memory": self.kind,
                    "enable_egm_store_pool": True,
                    "global_segment_size": self.nbytes,
                    "max_chunk_size": self.chunk,
                    "lease_ttl": self.lease_ttl,
                    "client_expiry": self.client_expiry,
                },
                "mooncake": {
                    "local_hostname": self.hostname,
                    "master_server_addr": self.master,
                    "master_admin_addr": self.admin,
                },
            }
        )
        plan = make_plan(spec, read_topology(), granularity=assumed_granularity(spec.pool.memory))
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        try:
            return provision(plan, self.paths, mount=True, progress=lambda event: self.log(str(event)))
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    @property
    def agent(self) -> int:
        """Its process id; 0 when it does not run."""
        record = read_only(self.paths.ledger(self.name))
        if record is None or not is_running(record.agent_pid, record.agent_started):
            return 0
        return int(record.agent_pid)

    def kill(self) -> None:
        """As a crash."""
        from egmctl.ledger import await_end

        record = read_only(self.paths.ledger(self.name))
        if record is not None and self.agent:
            os.kill(record.agent_pid, signal.SIGKILL)
            await_end(record.agent_pid, record.agent_started)

    def __exit__(self, *_: object) -> None:
        from egmctl.provider import teardown_pool

        with suppress(EgmError):
            teardown_pool(self.name, self.paths, now=True)
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
