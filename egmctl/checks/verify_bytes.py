"""Whether bytes that are put into a pool lie where they should and come back equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from egmctl.bench.buffers import registered
from egmctl.bench.cleanup import remove_objects
from egmctl.bench.pattern import digest, pattern
from egmctl.bench.stock import StockClient
from egmctl.bench.target import key_prefix
from egmctl.checks.base import CheckResult
from egmctl.consumer.errors import NoSpace
from egmctl.errors import EgmError
from egmctl.mooncake.master import Located, ReplicateConfig
from egmctl.units import MIB, format_size

if TYPE_CHECKING:
    from egmctl.checks.verify import PoolFacts
    from egmctl.ledger import SegmentRow

__all__ = ["Placement", "StockClientAgrees"]

_PLACING_TRIES = 8


class Placement:
    """Bytes put into each chunk lie there, and come back equal through a consumer that shares nothing with the first;
    on a GPU host through every GPU."""

    id: ClassVar[str] = "bytes"

    def run(self, facts: PoolFacts) -> Iterator[CheckResult]:
        ways: Sequence[int | None] = facts.devices or (None,)
        for row in facts.mounted():
            for device in ways:
                suffix = "" if device is None else f"/gpu{device}"
                yield self._chunk(facts, row, device, f"{self.id}/{row.name.partition('/')[2]}{suffix}")

    def _chunk(self, facts: PoolFacts, row: SegmentRow, device: int | None, where: str) -> CheckResult:
        total = 0
        direct, other = facts.copied()
        for size in facts.sizes(row.size):
            key = f"{key_prefix('verify')}/{row.chunk}/{size}"
            content = pattern(key, size)
            try:
                if not self._put_into(facts, row, key, content, device):
                    return CheckResult(
                        where,
                        "skip",
                        f"the Master placed {format_size(size)} elsewhere {_PLACING_TRIES} times",
                        "a place in this chunk",
                        "it is full, or the Master prefers another; nothing is wrong with that",
                    )
                difference = self._compare(facts, key, content, device)
            except NoSpace:
                return _no_room(where, size)
            except EgmError as error:
                return CheckResult(where, "fail", str(error), "put, get and equal bytes", error.hint)
            finally:
                remove_objects(facts.store, [key])
            if difference is not None:
                return CheckResult(
                    where, "fail", f"byte {difference} of {size} differs", "equal bytes", "take the pool out of use"
                )
            total += size
        facts.bytes_checked += total
        now_direct, now_other = facts.copied()
        # each byte went there and back: what did not do so in one step each way has passed through somewhere else
        facts.staging_bytes += now_other - other + max(0, 2 * total - (now_direct - direct))
        return CheckResult(where, "pass", f"{format_size(total)} put, got and equal")

    def _put_into(self, facts: PoolFacts, row: SegmentRow, key: str, content: bytes, device: int | None) -> bool:
        config = ReplicateConfig(preferred_segments=(row.name,))
        with registered(facts.store, len(content), device) as buffer:
            buffer.fill(content)
            for _ in range(_PLACING_TRIES):
                facts.store.put_from(key, buffer.address, len(content), config=config)
                if _lies_in(row, facts.master.get_replica_list(key)):
                    return True
                facts.store.remove(key, force=True)
        return False

    def _compare(self, facts: PoolFacts, key: str, content: bytes, device: int | None) -> int | None:
        """Where the first wrong byte is, if any is."""
        with registered(facts.second_store, len(content), device) as buffer:
            facts.second_store.get_into(key, buffer.address, len(content))
            found = buffer.content(len(content))
        if found == content:
            return None
        return next(i for i, (a, b) in enumerate(zip(found, content, strict=True)) if a != b)


def _lies_in(row: SegmentRow, located: Located) -> bool:
    return any(
        replica.te_endpoint == row.endpoint
        and row.base <= replica.address
        and replica.address + replica.size <= row.base + row.size
        for replica in located.replicas
    )


class StockClientAgrees:
    """An unmodified stock client reads what was put directly, and the other way round."""

    id: ClassVar[str] = "stock-client"

    def run(self, facts: PoolFacts) -> Iterator[CheckResult]:
        obstacle = facts.target.stock_obstacle()
        if obstacle:
            yield CheckResult(self.id, "skip", obstacle, "a stock client that can be run here")
            return
        size = min(MIB + 3, facts.target.plan.largest_object_bytes // 4)
        prefix = key_prefix("verify-stock")
        ours, theirs = f"{prefix}/direct", f"{prefix}/stock"
        try:
            target = facts.target
            with StockClient(target.master, target.metadata_server, host=target.local_name) as client:
                facts.store.put(ours, pattern(ours, size))
                _, codes, digests = client.get([ours], size, check=True)
                _, put_codes = client.put([theirs], size)
                got = facts.store.get(theirs) if put_codes == [0] else b""
        except NoSpace:
            yield _no_room(self.id, size)
            return
        finally:
            remove_objects(facts.store, (ours, theirs))
        problems = []
        if codes != [size]:
            problems.append(f"its get of a direct put answered {codes[0]}")
        elif digests != [digest(pattern(ours, size))]:
            problems.append("it read other bytes than were put directly")
        full = put_codes == [NoSpace.number]
        if not full and put_codes != [0]:
            problems.append(f"its put answered {put_codes[0]}")
        elif not full and got != pattern(theirs, size):
            problems.append("a direct get read other bytes than it put")
        if problems:
            hint = f"see {facts.paths.log(facts.name)}; `egmctl status` tells of the Transfer Engine child"
            yield CheckResult(self.id, "fail", "; ".join(problems), "equal bytes both ways", hint)
        elif full:
            yield _no_room(self.id, size)
        else:
            yield CheckResult(self.id, "pass", f"{format_size(size)} equal both ways, over tcp")


def _no_room(check: str, size: int) -> CheckResult:
    """A full pool is not a wrong one; what could not be put is not known to be right either."""
    return CheckResult(
        check,
        "skip",
        f"the Master has no room for {format_size(size)} (NO_AVAILABLE_HANDLE, {NoSpace.number})",
        "room for an object",
        "other objects fill the pool, and nothing is wrong with that: verify again once there is room",
    )
