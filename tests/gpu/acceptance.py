"""Acceptance on a real GPU host: ``python -m tests.gpu.acceptance --out DIR [--bytes 32GiB] [--chunk 8GiB]``.

The real command line, Master and stock client; every phase stands alone, with a time limit, and one that fails does
not stop the others. Writes ``acceptance.json``: what each phase saw, and the claims with whether they hold. ``--model``
runs it on the model of the driver (with a small pool): a rehearsal, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from egmctl.ledger import read_events
from egmctl.paths import Paths
from egmctl.units import parse_size
from tests.fabric.consumer import Consumer, ConsumerError
from tests.provider.pools import end_agents
from tests.support.master import REPOSITORY, Master
from tests.support.stock import StockClient

__all__ = ["main"]

SIZES = (1, 4096, 100_001, 1 << 20, 5 << 20)


class Acceptance:
    """One run on one machine."""

    def __init__(self, out: Path, nbytes: int, chunk: int, env: dict[str, str], limit: float, master: str) -> None:
        self.out = out
        self.nbytes = nbytes
        self.chunk = chunk
        self.master_version = master
        self.folder = Path(tempfile.mkdtemp(prefix="egm", dir="/tmp"))
        self.paths = Paths.resolve(self.folder / "state")
        self.env = {
            **os.environ,
            **env,
            "EGMCTL_STATE_DIR": str(self.paths.state),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        }
        self.deadline = time.monotonic() + limit
        self.phases: dict[str, Any] = {}
        self.claims: list[dict[str, Any]] = []
        self.second: tuple[int, ...] = (_gpus(self.env) - 1,)

    # Writing down

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        document = {"bytes": self.nbytes, "chunk": self.chunk, "claims": self.claims, "phases": self.phases}
        (self.out / "acceptance.json").write_text(json.dumps(document, indent=1))

    def claim(self, text: str, holds: bool, observed: Any) -> None:
        self.claims.append({"claim": text, "holds": bool(holds), "observed": observed})

    def phase(self, name: str, act: Callable[[], Any]) -> Any:
        """Run one phase; its result, or None with the failure written down."""
        began = time.monotonic()
        entry: dict[str, Any] = {}
        result = None
        try:
            if began > self.deadline:
                raise TimeoutError("no time left")
            result = entry["result"] = act()
        except BaseException as error:
            entry["error"] = f"{type(error).__name__}: {error}"
            entry["trace"] = traceback.format_exc()[-3000:]
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            entry["seconds"] = round(time.monotonic() - began, 3)
            self.phases[name] = entry
            print(f"{name}: {entry['seconds']} s {entry.get('error', 'ok')}", flush=True)
            self.save()
        return result

    # Tools

    def python(self, *arguments: str, limit: float = 60) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            env=self.env,
            cwd=REPOSITORY,
            capture_output=True,
            timeout=limit,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        text = done.stdout.decode(errors="replace")
        try:
            document = json.loads(text)
        except ValueError:
            document = text[-100_000:]
        return {"exit": done.returncode, "stdout": document, "stderr": done.stderr.decode(errors="replace")[-4000:]}

    def egmctl(self, *arguments: str, limit: float = 90) -> tuple[int, Any]:
        answer = self.python("egmctl", "--json", *arguments, limit=limit)
        if isinstance(answer["stdout"], str):
            raise RuntimeError(f"{arguments}: {answer}")
        return answer["exit"], answer["stdout"]

    @staticmethod
    def free() -> int:
        """Free bytes of node 0."""
        for line in Path("/sys/devices/system/node/node0/meminfo").read_text().splitlines():
            if line.split()[2] == "MemFree:":
                return int(line.split()[3]) * 1024
        raise RuntimeError("node 0 tells no MemFree")

    def free_again(self, wanted: int, patience: float = 8.0) -> int:
        """Free bytes of node 0, once they are ``wanted`` or the patience is over."""
        deadline = time.monotonic() + patience
        while True:
            found = self.free()
            if found >= wanted or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def spec(self, kind: str, master: Master | None, name: str) -> str:
        path = self.folder / f"{name}.toml"
        lines = [
            "[pool]",
            f'name = "{name}"',
            f'memory = "{kind}"',
            "enable_egm_store_pool = true",
            f"global_segment_size = {self.nbytes}",
            f"max_chunk_size = {self.chunk}",
            "lease_ttl = 2",
            "[mooncake]",
            f'protocol = "{"nvlink" if kind == "cuda-fabric" else "tcp"}"',
            'local_hostname = "127.0.0.1"',
            f'master_server_addr = "{master.address if master else "127.0.0.1:1"}"',
        ]
        if master:
            lines.append(f'master_admin_addr = "{master.admin_address}"')
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    def memory_seconds(self, name: str) -> float:
        """From "allocation begins" to "allocated" in the pool's ledger."""
        at = {event.what: event.at for event in read_events(self.paths.ledger(name))}
        return at["allocated"] - at["allocation begins"]

    # Phases

    def environment(self) -> dict[str, Any]:
        commands = (("nvidia-smi", "-L"), ("nvidia-smi", "--query-gpu=driver_version,memory.used", "--format=csv"))
        return {
            "python": platform.python_version(),
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "meminfo": Path("/proc/meminfo").read_text().splitlines()[:3],
            **{" ".join(command): _output(command) for command in commands},
        }

    def contract(self) -> Any:
        options = ["-q", "-n", "8", "-p", "no:cacheprovider", "-p", "no:benchmark"]
        answer = self.python("pytest", "tests/memory", *options, limit=120)
        (self.out / "contract.txt").write_text(f"{answer['stdout']}\n{answer['stderr']}")
        last = str(answer["stdout"]).strip().splitlines()[-1:]
        self.claim("the contract suite passes on the model and on the real driver", answer["exit"] == 0, last)
        return {"exit": answer["exit"], "last": last}

    def documents(self) -> Any:
        """topology and doctor."""
        topology = self.egmctl("topology")
        gpus = topology[1].get("gpus", [])
        self.claim(
            "topology says where each GPU's node comes from",
            bool(gpus) and all(gpu["source"] and gpu["numa_node"] is not None for gpu in gpus),
            [(gpu["bdf"], gpu["numa_node"], gpu["source"], gpu["note"]) for gpu in gpus],
        )
        found: dict[str, Any] = {"topology": topology, "doctor": self.egmctl("doctor")}
        for kind in ("cuda-fabric", "cuda-posix"):
            found[f"doctor --for {kind}"] = self.egmctl("doctor", "--for", kind)
        return found

    def fabric(self) -> Any:
        before, began = self.free(), time.monotonic()
        code, document = self.egmctl("provision", self.spec("cuda-fabric", None, "fabric"))
        took = time.monotonic() - began
        text = json.dumps(document)
        plain = subprocess.run(
            [sys.executable, "-m", "egmctl", "provision", self.spec("cuda-fabric", None, "fabric")],
            env=self.env,
            cwd=REPOSITORY,
            capture_output=True,
            timeout=60,
            check=False,
        )
        said = plain.stderr.decode()
        self.claim("cuda-fabric is refused with exit 3", (code, plain.returncode) == (3, 3), [code, plain.returncode])
        self.claim(
            "the refusal names the IMEX channel and attribute 143, with what to do",
            "IMEX" in said and "143" in said and bool(document.get("hint")),
            said,
        )
        checks = document.get("facts", {}).get("checks", [])
        facts = {check["id"]: check["status"] for check in checks}
        self.claim(
            "with --json the same facts are data",
            any(key.endswith("/143") and value == "fail" for key, value in facts.items())
            and facts.get("imex-channel") == "fail",
            facts,
        )
        ledgers = [path.name for path in self.paths.state.glob("*.db")] if self.paths.state.exists() else []
        self.claim("nothing was allocated for it, no ledger was written", not ledgers, [ledgers, before, self.free()])
        return {"seconds": took, "document": document, "stderr": said, "bytes": len(text)}

    def warm(self) -> Any:
        """Memory of a virtual machine grows with its first use."""
        total = self.nbytes + self.nbytes // 4 // self.chunk * self.chunk
        answer = self.python("tests.gpu.bare", str(total), str(self.chunk), limit=120)
        return {**answer, "free": self.free()}

    def bare(self) -> Any:
        answer = self.python("tests.gpu.bare", str(self.nbytes), str(self.chunk), limit=90)
        if answer["exit"]:
            raise RuntimeError(str(answer))
        return answer["stdout"]

    @contextmanager
    def pool(self, name: str, master: Master | None = None) -> Iterator[dict[str, Any]]:
        """A cuda-posix pool by the command line, torn down when left if it is there still."""
        told: dict[str, Any] = {"free_before": self.free()}
        began = time.monotonic()
        mount = ["--mount"] if master else []
        code, document = self.egmctl("provision", self.spec("cuda-posix", master, name), *mount, limit=120)
        told |= {"provision_s": time.monotonic() - began, "provision": document, "exit": code, "free": self.free()}
        if code:
            raise RuntimeError(json.dumps(document))
        told["memory_s"] = self.memory_seconds(name)
        try:
            yield told
        finally:
            if "teardown" not in told:
                self.down(name, told)

    def down(self, name: str, told: dict[str, Any]) -> None:
        began = time.monotonic()
        code, told["teardown"] = self.egmctl("teardown", name, "--now")
        told |= {"teardown_s": time.monotonic() - began, "teardown_exit": code}

    def life(self) -> Any:
        """Provisioned, mounted, used by a stock client and by two importers, torn down, memory back."""
        with (
            Master(self.master_version, lease_ttl=2) as master,
            self.pool("life", master) as told,
        ):
            told["status"] = self.egmctl("status", "life")[1]
            pool = told["provision"]["pool"]
            self.claim(
                f"a cuda-posix pool of {self.nbytes} bytes is provisioned and mounted",
                pool["ready"] and pool["bytes"] == self.nbytes and pool["mounted"] == pool["chunks"],
                {key: pool[key] for key in ("state", "bytes", "chunks", "mounted", "warnings")},
            )
            told["stock"], values = self.stock(master)
            try:
                told["importers"] = self.importers(master, values)
            except ConsumerError as error:
                told["second GPU alone"] = str(error)
                self.second = (0, *self.second)
                told["importers"] = self.importers(master, values)
            with suppress(Exception):
                told["verify"] = self.egmctl("verify", "life", limit=40)
            self.down("life", told)
            told["free_after"] = self.free_again(told["free_before"] - (1 << 30))
            result = told["teardown"]["pools"][0]
            self.claim(
                "after teardown the pool is gone without a warning",
                told["teardown_exit"] == 0 and result["state"] == "gone" and not result["warnings"],
                result,
            )
            taken, back = told["free_before"] - told["free"], told["free_after"] - told["free"]
            self.claim(
                "free memory is back to where it was",
                taken > 0 and back > taken - (1 << 30),
                {"before": told["free_before"], "provisioned": told["free"], "after": told["free_after"]},
            )
            return told

    def stock(self, master: Master) -> tuple[Any, dict[str, bytes]]:
        values = {f"stock-{size}": _payload(f"stock-{size}", size) for size in SIZES}
        equal: dict[str, bool] = {}
        values["stock-16M"] = _payload("stock-16M", min(16 << 20, self.chunk // 4))
        with StockClient(master.address, local_buffer=256 << 20) as stock:
            for key, value in values.items():
                code = stock.put(key, value)
                equal[key] = code == 0 and stock.get(key) == value
        self.claim("a stock client puts and gets over TCP", all(equal.values()), equal)
        del values["stock-16M"]  # larger than the importers' buffers
        return equal, values

    def importers(self, master: Master, values: dict[str, bytes]) -> Any:
        """Two further processes, one on each GPU, import the same chunks."""
        gpus = _gpus(self.env)
        last = gpus - 1
        found: dict[str, Any] = {"gpus": gpus}
        with (
            Consumer(master.address, self.env, devices=(0,)) as first,
            Consumer(master.address, self.env, devices=self.second) as second,
            StockClient(master.address, local_buffer=64 << 20) as stock,
        ):
            found["devices"] = [(0,), self.second]
            for key, value in values.items():
                reads = {
                    "first, GPU 0": first.get(key, "device0") == value,
                    f"second, GPU {last}": second.get(key, f"device{last}") == value,
                    "second, pinned": second.get(key, "pinned") == value,
                    "second, CPU": second.get(key, "pageable") == value,
                }
                found[key] = reads
            direct = _payload("direct", 3 << 20)
            second.put("direct", direct, f"device{last}")
            found["put by the second"] = {
                "first reads it": first.get("direct", "device0") == direct,
                "the stock client reads it": stock.get("direct") == direct,
            }
            found["mapped"] = [first.call("mapped"), second.call("mapped")]
        good = all(all(reads.values()) for reads in found.values() if isinstance(reads, dict))
        self.claim(
            "a second process and the second GPU import the same chunk and see the same bytes",
            good and (gpus > 1 or bool(self.env.get("EGMCTL_MODEL"))),
            found,
        )
        return found

    def held(self) -> Any:
        """Torn down while a foreign importer lives."""
        with Master(self.master_version, lease_ttl=2) as master, self.pool("held", master) as told:
            endpoint = told["provision"]["pool"]["endpoint"]
            with subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.hold", endpoint, "0"],
                env=self.env,
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            ) as holder:
                assert holder.stdout is not None
                assert holder.stdin is not None
                try:
                    held = told["holder"] = json.loads(holder.stdout.readline())
                    self.down("held", told)
                    told["free_while_held"] = self.free_again(told["free_before"] - held["bytes"] - (1 << 30), 5)
                    result = told["teardown"]["pools"][0]
                    missing = [
                        int(word.strip("("))
                        for text in result["warnings"]
                        if "did not come back" in text
                        for word in text.split()
                        if word.startswith("(") and word[1:].isdigit()
                    ]
                    self.claim(
                        "with a foreign importer alive, teardown says how many bytes are missing and who has them",
                        result["state"] == "gone"
                        and any(abs(number - held["bytes"]) < held["bytes"] // 4 for number in missing)
                        and any(f"process {held['pid']} " in text for text in result["warnings"]),
                        {"held": held, "warnings": result["warnings"]},
                    )
                finally:
                    holder.stdin.close()
                    with suppress(subprocess.TimeoutExpired):
                        holder.wait(20)
                    holder.kill()
            told["free_after"] = self.free_again(told["free_before"] - (1 << 30))
            self.claim(
                "once the importer has let go, the memory is back",
                told["free_after"] > told["free_before"] - (1 << 30),
                {key: told[key] for key in ("free_before", "free", "free_while_held", "free_after")},
            )
            return told

    def plain(self, name: str) -> Any:
        """Provisioned and torn down, each driver call timed in the agent."""
        clock = self.folder / f"{name}.clock"
        seams = ",".join(filter(None, [self.env.get("EGMCTL_SEAMS"), "tests.gpu.clock:install"]))
        before = self.env
        self.env = {**before, "EGMCTL_SEAMS": seams, "EGMCTL_CLOCK": str(clock)}
        try:
            with self.pool(name) as told:
                agent = told["provision"]["pool"]["agent_pid"]
                self.down(name, told)
        finally:
            self.env = before
        lines = [json.loads(line) for line in clock.read_text().splitlines()]
        mine = [line for line in lines if line["pid"] == agent]
        for step in ("create", "access", "map", "export", "reserve", "unmap", "release"):
            told[f"{step}_s"] = sum(line["s"] for line in mine if line["site"] == f"memory.cuda.{step}")
        creates = [line["s"] for line in mine if line["site"] == "memory.cuda.create"]
        return {key: value for key, value in told.items() if key.endswith("_s")} | {"creates_s": creates}

    def rate(self, rounds: int, nbytes: int) -> Any:
        """By turns, in the order ours, bare, bare, ours: the machine's own rate drifts while it is used."""
        self.nbytes = nbytes
        ours: list[dict[str, Any]] = []
        bare: list[dict[str, Any]] = []
        for number in range(rounds):
            if number % 2:
                bare.append(self.bare())
            ours.append(self.plain(f"rate-{number}"))
            if number % 2 == 0:
                bare.append(self.bare())
        gib = self.nbytes / (1 << 30)
        ratios = [theirs["setup_s"] / mine["memory_s"] for mine, theirs in zip(ours, bare, strict=True)]
        ratio = statistics.median(ratios)
        told = {
            "ours": ours,
            "bare": bare,
            "ours_gib_s": [gib / each["memory_s"] for each in ours],
            "bare_gib_s": [gib / each["setup_s"] for each in bare],
            "pairs": ratios,
            "ratio": ratio,
            "ratio_of_best": min(each["setup_s"] for each in bare) / min(each["memory_s"] for each in ours),
        }
        self.claim("provisioning goes at 0.95 or more of the rate of a bare loop", ratio >= 0.95, told)
        return told

    def close(self) -> None:
        end_agents(self.paths)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.paths.runtime, ignore_errors=True)


def _payload(name: str, nbytes: int) -> bytes:
    seed = hashlib.sha512(name.encode()).digest()
    return (seed * (nbytes // len(seed) + 1))[:nbytes]


def _gpus(env: dict[str, str]) -> int:
    program = "from egmctl import seams; seams.load(); from egmctl.memory.driver import get_driver as g"
    program += "; print(g().device_count())"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, timeout=60, check=True)
    return int(done.stdout)


def _output(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout.decode(errors="replace").strip()


def _model(folder: Path) -> dict[str, str]:
    from tests.fabric.machines import GPUS
    from tests.model.config import Config

    attributes: dict[int, int | None] = {143: 0}
    config = Config(directory=folder, nodes=(0,), devices=GPUS, fabric="not-permitted", attributes=attributes)
    return config.to_env()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bytes", default="32GiB")
    parser.add_argument("--chunk", default="8GiB")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds after which no further phase begins")
    parser.add_argument("--master", default="0.3.14")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rate-bytes", default="16GiB")
    parser.add_argument("--phases", default="", help="some of them, in this order, with commas between")
    parser.add_argument("--model", action="store_true")
    options = parser.parse_args()
    memory = Path(tempfile.mkdtemp(prefix="egm-model-"))
    env = _model(memory) if options.model else {}
    run = Acceptance(
        options.out, parse_size(options.bytes), parse_size(options.chunk), env, options.limit, options.master
    )
    phases: dict[str, Callable[[], Any]] = {
        "environment": run.environment,
        "documents": run.documents,
        "fabric": run.fabric,
        "contract": run.contract,
        "warm": run.warm,
        "life": run.life,
        "held": run.held,
        "rate": lambda: run.rate(options.rounds, parse_size(options.rate_bytes)),
    }
    try:
        for name in options.phases.split(",") if options.phases else phases:
            run.phase(name, phases[name])
    finally:
        run.close()
        shutil.rmtree(memory, ignore_errors=True)
    for one in run.claims:
        print("holds" if one["holds"] else "DOES NOT HOLD", "-", one["claim"], flush=True)
    return 0 if all(one["holds"] for one in run.claims) else 1


if __name__ == "__main__":
    raise SystemExit(main())
