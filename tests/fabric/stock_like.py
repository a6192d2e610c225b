"""A consumer that remembers as a stock nvlink client does: for good, and by names alone.

- A descriptor is asked for once for each endpoint and kept, whatever becomes of the endpoint.
- An imported handle is mapped once for each (endpoint, address of the buffer) and kept; the handle is not looked at
  again.
- An address outside the descriptor kept is "not found"; nothing is asked again.
- No nonce, no question whether the provider lives, before or after a copy.

`StockLike` is the tests' half; ``python -m tests.fabric.stock_like`` the program. Where an object lies it asks the
Master each time, as stock clients do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any

from tests.support.master import REPOSITORY

__all__ = ["StockLike"]


class StockLike:
    """Puts and gets over GPU 0."""

    def __init__(self, master: str, env: dict[str, str], *, metadata: str = "P2PHANDSHAKE") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fabric.stock_like", master, metadata],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            cwd=REPOSITORY,
        )

    def __enter__(self) -> StockLike:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(10)
        finally:
            self._process.kill()

    def put(self, key: str, value: bytes) -> str:
        """ "" when it was put, else what went wrong."""
        return str(self._ask(op="put", key=key, value=value.hex()))

    def get(self, key: str) -> bytes | None:
        """The bytes that it takes for the object's; None when it fails."""
        found = self._ask(op="get", key=key)
        return None if found is None else bytes.fromhex(found)

    def memory(self) -> list[tuple[str, int]]:
        """(endpoint, address) of the mappings it keeps."""
        return [(endpoint, address) for endpoint, address in self._ask(op="memory")]

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


# The program.


class _Program:
    def __init__(self, master: str, metadata: str) -> None:
        from egmctl.memory.driver import get_driver
        from egmctl.mooncake.master import MasterClient, new_uuid

        self.master = MasterClient(master)
        self.client = new_uuid()
        self.metadata = metadata
        self.driver = get_driver()
        self.driver.use_device(0)
        self.descriptors: dict[str, dict[str, Any]] = {}
        self.mapped: dict[tuple[str, int], int] = {}

    def descriptor(self, endpoint: str) -> dict[str, Any]:
        if endpoint not in self.descriptors:
            from egmctl.mooncake.handshake import fetch_descriptor
            from egmctl.mooncake.metadata import MetadataClient

            if self.metadata == "P2PHANDSHAKE":
                self.descriptors[endpoint] = fetch_descriptor(endpoint, 5).document()
            else:
                found = MetadataClient(self.metadata).fetch(endpoint)
                if found is None:
                    raise LookupError("no descriptor")
                self.descriptors[endpoint] = found.document()
        return self.descriptors[endpoint]

    def relocate(self, endpoint: str, address: int, nbytes: int) -> int:
        """Where a provider's address is mapped here."""
        from egmctl.memory.driver import Location

        for buffer in self.descriptor(endpoint)["buffers"]:
            start, length = buffer["addr"], buffer["length"]
            if start <= address and address + nbytes <= start + length and buffer["shm_name"]:
                place = self.mapped.get((endpoint, start))
                if place is None:
                    handle = self.driver.import_fabric(bytes.fromhex(buffer["shm_name"]))
                    place = self.driver.address_reserve(length)
                    self.driver.mem_map(place, length, 0, handle)
                    self.driver.set_access(place, length, [Location("device", 0)])
                    self.mapped[endpoint, start] = place
                return place + int(address - start)
        raise LookupError("requested address not found")

    def move(self, place: int, data: bytes | None, nbytes: int) -> bytes:
        import ctypes

        block = ctypes.create_string_buffer(data or b"", nbytes)
        here = ctypes.addressof(block)
        self.driver.memcpy(*((place, here) if data is not None else (here, place)), nbytes)
        return block.raw

    def put(self, key: str, value: str) -> str:
        from egmctl.errors import EgmError

        data = bytes.fromhex(value)
        try:
            replica = self.master.put_start(self.client, key, len(data))[0]
        except EgmError as error:
            return str(error)
        try:
            self.move(self.relocate(replica.te_endpoint, replica.address, len(data)), data, len(data))
        except (EgmError, LookupError) as error:
            self.master.put_revoke(self.client, key)
            return str(error)
        self.master.put_end(self.client, key)
        return ""

    def get(self, key: str) -> str | None:
        from egmctl.errors import EgmError

        try:
            replica = self.master.get_replica_list(key).replicas[0]
            place = self.relocate(replica.te_endpoint, replica.address, replica.size)
            return self.move(place, None, replica.size).hex()
        except (EgmError, LookupError):
            return None

    def memory(self) -> list[tuple[str, int]]:
        return sorted(self.mapped)


def main() -> None:
    from egmctl import seams

    seams.load()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    program = _Program(*sys.argv[1:3])
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(program, request.pop("op"))(**request)), file=out, flush=True)


if __name__ == "__main__":
    main()
