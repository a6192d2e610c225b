"""The whole life of a pool, on real parts: what ``egmctl demo`` does, each claim looked up where it can be seen."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from egmctl.errors import EgmError, PreflightError, VerificationError
from egmctl.units import KIB, MIB, format_size

if TYPE_CHECKING:
    from egmctl.bench.stock import StockClient
    from egmctl.cli.output import Output
    from egmctl.consumer import EgmStore
    from egmctl.ledger import ChunkRow, PoolRecord
    from egmctl.memory.base import Share
    from egmctl.mooncake.local_master import LocalMaster
    from egmctl.paths import Paths
    from egmctl.planning import Plan

__all__ = ["run_demo"]

_SIZES = (4 * KIB, 64 * KIB + 1, MIB, 8 * MIB)


def run_demo(output: Output, paths: Paths) -> int:
    """Plan, provision, mount, use, verify, measure, tear down; 0 when every claim held.

    State goes to a folder of its own, removed at the end. Raises `PreflightError` without a Mooncake wheel and
    `VerificationError` when what was seen is not what was claimed.
    """
    from egmctl.mooncake.local_master import LocalMaster
    from egmctl.mooncake.wheel import require_transfer_engine
    from egmctl.paths import Paths as AnyPaths

    require_transfer_engine()
    began = time.monotonic()
    folder = tempfile.mkdtemp(prefix="egmctl-demo-")
    own = AnyPaths.resolve(Path(folder) / "state")
    try:
        with LocalMaster() as master:
            demo = _Demo(output, own, master)
            try:
                demo.run()
            finally:
                demo.leave()
        demo.facts["seconds"] = round(time.monotonic() - began, 1)
        demo.say("", f"All of it in {demo.facts['seconds']:.0f} s. Every line above was looked up, not assumed.")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            own.runtime.rmdir()
    output.emit("demo", demo.facts, lambda: None)
    return 0


class _Demo:
    """One run: the pool, and what has been seen of it so far."""

    def __init__(self, output: Output, paths: Paths, master: LocalMaster) -> None:
        self.output = output
        self.paths = paths
        self.master = master
        self.facts: dict[str, Any] = {"ok": False, "steps": []}
        self.plan: Plan | None = None

    def run(self) -> None:
        from egmctl.bench.stock import StockClient
        from egmctl.consumer import EgmStore

        self.title("A Master", "a real mooncake_master, on loopback")
        self.say(f"mooncake_master {self.master.pid} serves at {self.master.address}")
        plan = self.resolve()
        self.provision(plan)
        self.mount(plan)
        with ExitStack() as stack:
            stock = stack.enter_context(StockClient(self.master.address, "P2PHANDSHAKE"))
            store = stack.enter_context(EgmStore.connect(self.master.address))
            self.stock_alone(stock)
            self.direct(stock, store)
        self.verify(plan)
        self.bench(plan)
        self.teardown(plan)
        self.facts["ok"] = True

    # What a person reads

    def title(self, name: str, about: str) -> None:
        self.output.note("")
        self.output.note(f"== {name}: {about}")

    def say(self, *lines: str) -> None:
        for line in lines:
            self.output.note(line)

    def claim(self, what: str, holds: bool) -> None:
        """Say it when it is so, and stop when it is not."""
        self.facts["steps"].append({"claim": what, "holds": holds})
        if not holds:
            raise VerificationError(
                f"this did not hold: {what}", where="egmctl demo", hint="please report it, with the output above"
            )
        self.say(f"  ok  {what}")

    # The stages

    def resolve(self) -> Plan:
        from egmctl.planning import Spec, assumed_granularity, load_document, make_plan
        from egmctl.topology import read_topology

        path = _spec_file()
        self.title("Plan", f"{path.parent.name}/{path.name} on this machine's topology")
        spec = load_document(path)
        if not isinstance(spec, Spec):
            raise PreflightError("is not a spec", where=str(path), hint="install egmctl again")
        mooncake = replace(
            spec.mooncake, master_server_addr=self.master.address, master_admin_addr=self.master.admin_address
        )
        spec = replace(spec, mooncake=mooncake)
        plan = make_plan(spec, read_topology(), granularity=assumed_granularity(spec.pool.memory))
        for node in plan.nodes:
            chunks = [chunk for chunk in plan.chunks if chunk.numa_node == node.numa_node]
            self.say(
                f"NUMA node {node.numa_node}: {format_size(node.bytes)} in {len(chunks)} chunks of at most "
                f"{format_size(plan.max_chunk_bytes)}"
            )
        self.plan = plan
        self.facts["pool"] = {"name": plan.pool, "bytes": plan.effective_bytes, "chunks": len(plan.chunks)}
        return plan

    def provision(self, plan: Plan) -> None:
        from egmctl.cli.progress import Progress
        from egmctl.provider import provision

        self.title("Provision", "an agent allocates sealed memory, bound to its NUMA node")
        with Progress(self.output) as progress:
            pool = provision(plan, self.paths, progress=progress)
        self.claim(f"agent {pool['agent_pid']} owns {format_size(pool['bytes'])}", pool["state"] == "provisioned")
        self.claim("the Master lists no segment yet", not self.listed())

    def mount(self, plan: Plan) -> None:
        from egmctl.cli.progress import Progress
        from egmctl.provider import mount_pool

        self.title("Mount", "the complete descriptor first, then every chunk a segment")
        with Progress(self.output) as progress:
            pool = mount_pool(plan.pool, self.paths, progress=progress)
        self.claim(f"the pool is ready at {pool['endpoint']}", pool["ready"])
        names = [row.name for row in self.listed()]
        self.claim(f"the Master lists {len(names)} segments, {names[0]} and on", len(names) == len(plan.chunks))

    def stock_alone(self, stock: StockClient) -> None:
        from egmctl.bench.pattern import digest, pattern

        self.title("A stock client", f"Mooncake's own, unmodified, process {stock.pid}: put and get through the Master")
        for size in _SIZES:
            key = f"demo/stock/{size}"
            _, codes = stock.put([key], size)
            _, lengths, digests = stock.get([key], size, check=True)
            equal = codes == [0] and lengths == [size] and digests == [digest(pattern(key, size))]
            self.claim(f"{format_size(size)} put and got by the stock client, byte-equal", equal)
        key = f"demo/stock/{_SIZES[-1]}"
        chunk, found = self.bytes_in_chunk(key)
        self.claim(
            f"its {format_size(len(found))} lie in our chunk {chunk}: read there through its file descriptor",
            found == pattern(key, _SIZES[-1]),
        )

    def direct(self, stock: StockClient, store: EgmStore) -> None:
        from egmctl.bench.pattern import digest, pattern

        self.title(
            "Direct", "reserve at the Master, copy straight into the mapped chunk, publish; no socket carries it"
        )
        for size in _SIZES:
            key = f"demo/direct/{size}"
            store.put(key, pattern(key, size))
            _, lengths, digests = stock.get([key], size, check=True)
            equal = lengths == [size] and digests == [digest(pattern(key, size))]
            self.claim(f"{format_size(size)} put directly, read back by the stock client, byte-equal", equal)
        for size in _SIZES:
            key = f"demo/stock/{size}"
            self.claim(
                f"{format_size(size)} of the stock client's read directly, byte-equal",
                store.get(key) == pattern(key, size),
            )
        for size in _SIZES:
            for key in (f"demo/stock/{size}", f"demo/direct/{size}"):
                store.remove(key, force=True)

    def verify(self, plan: Plan) -> None:
        from egmctl.checks.verify import run_verify

        self.title("Verify", "records compared, an object through every chunk")
        document = run_verify(plan.pool, self.paths)
        for check in document["checks"]:
            self.say(f"  {check['status']}  {check['id']}: {check['observed']}")
        self.claim(f"{format_size(document['bytes_checked'])} checked", document["ok"])

    def bench(self, plan: Plan) -> None:
        from egmctl.bench import run_bench

        self.title("Bench", "the same objects over both paths, in this run")
        document = run_bench(plan.pool, self.paths, blocks=(4 * KIB, MIB, 8 * MIB), count=16)
        for result in document["results"]:
            self.say(
                f"  {result['operation']} {format_size(result['block_bytes']):>6} {result['path']:6} "
                f"{result['gbps']['p50']:6.2f} GB/s, {result['latency_us']['p50']:7.0f} us p50"
            )
        self.facts["ratios"] = document["ratios"]
        for ratio in document["ratios"]:
            self.say(
                f"  {ratio['operation']} of {format_size(ratio['block_bytes'])}: "
                f"{ratio['direct_over_stock']:.1f} times as fast direct as stock"
            )
        self.claim("no operation failed", not any(result["errors"] for result in document["results"]))

    def teardown(self, plan: Plan) -> None:
        from egmctl.cli.progress import Progress
        from egmctl.ledger.processes import is_running
        from egmctl.provider import pool_status, teardown_pool

        self.title("Teardown", "in reverse, and nothing is left")
        before = pool_status(self.paths, plan.pool)[0]
        processes = [before["agent_pid"], before["te_child"]["pid"]]
        files = self.chunk_files()
        with Progress(self.output) as progress:
            ended = teardown_pool(plan.pool, self.paths, progress=progress)
        self.claim("the Master lists no segment", not self.listed())
        self.claim(f"no process is left (of {processes})", not any(is_running(pid, None) for pid in processes))
        self.claim(f"no socket is left at {before['socket']}", not os.path.exists(before["socket"]))
        self.claim(f"none of the {len(files)} chunks' files is open or mapped in any process", not _holders(files))
        after = pool_status(self.paths, plan.pool)[0]
        self.claim(
            f"the ledger says {after['state']}", ended["state"] == after["state"] == "gone" and after["bytes"] == 0
        )

    def leave(self) -> None:
        """Whatever happened, no pool stays behind the demonstration."""
        if self.plan is not None and not self.facts["ok"]:
            from egmctl.provider import teardown_pool

            # Its state dir goes next: nobody could finish this later.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            with suppress(EgmError):
                teardown_pool(self.plan.pool, self.paths, grace=0, now=True)

    # What is looked up

    def listed(self) -> list[Any]:
        """The segments in the Master's own listing."""
        from egmctl.mooncake.admin import AdminClient

        return list(AdminClient(self.master.admin_address).segments_detail())

    def bytes_in_chunk(self, key: str) -> tuple[int, bytes]:
        """The chunk an object lies in and its bytes there, read through the chunk's own file, not through Mooncake."""
        from egmctl.memory import import_share
        from egmctl.mooncake.master import MasterClient

        with MasterClient(self.master.address) as client:
            place = client.get_replica_list(key).replicas[0]
        for row in self.record().live_chunks:
            if row.address is not None and row.address <= place.address < row.address + row.nbytes:
                share = self.share(row)
                try:
                    mapping = import_share(share, devices=[])
                finally:
                    _close(share)
                try:
                    return row.index, ctypes.string_at(mapping.address + place.address - row.address, place.size)
                finally:
                    mapping.close()
        return -1, b""

    def chunk_files(self) -> set[int]:
        """The inode numbers of the chunks' files."""
        found = set()
        for row in self.record().live_chunks:
            share = self.share(row)
            if share.fd is not None:
                found.add(os.fstat(share.fd).st_ino)
            _close(share)
        return found

    def record(self) -> PoolRecord:
        from egmctl.bench.target import Target

        return Target.find(self.plan.pool if self.plan else "", self.paths).record

    def share(self, row: ChunkRow) -> Share:
        from egmctl.consumer.agent_link import export

        record = self.record()
        return export(record.socket, row.index, record.nonce, row.address or 0, row.nbytes, 5.0)


def _close(share: Share) -> None:
    if share.fd is not None:
        os.close(share.fd)


def _spec_file() -> Path:
    """``dev-shm.toml``, beside the package in a clone and inside it when installed."""
    import egmctl

    package = Path(egmctl.__file__).parent
    for folder in (package.parent / "plans", package / "plans"):
        if (folder / "dev-shm.toml").is_file():
            return folder / "dev-shm.toml"
    raise PreflightError("plans/dev-shm.toml is not installed", where=str(package), hint="install egmctl again")


def _holders(files: set[int]) -> list[int]:
    """Processes in which one of these files is open or mapped, of those that this user may look into."""
    holders = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with suppress(OSError):
            mapped = {
                int(fields[4])
                for line in Path(entry.path, "maps").read_text(errors="replace").splitlines()
                if len(fields := line.split()) > 5 and fields[5].startswith("/memfd:egm-chunk")
            }
            opened = {os.stat(link.path).st_ino for link in os.scandir(Path(entry.path, "fd")) if _is_chunk(link.path)}
            if files & (mapped | opened):
                holders.append(int(entry.name))
    return holders


def _is_chunk(link: str) -> bool:
    try:
        return os.readlink(link).startswith("/memfd:egm-chunk")
    except OSError:
        return False
