"""An importer that egmctl does not know: it takes chunks over the agent's socket and keeps them whatever it is told.

``python -m tests.gpu.hold ENDPOINT INDEX...``: prints one line of JSON once it holds them, and ends with its input.
"""

from __future__ import annotations

import json
import os
import sys

__all__ = ["main"]


def main() -> None:
    from egmctl import seams
    from egmctl.consumer.agent_link import export
    from egmctl.memory import import_share
    from egmctl.memory.driver import get_driver
    from egmctl.mooncake.handshake import fetch_descriptor

    seams.load()
    endpoint, wanted = sys.argv[1], [int(word) for word in sys.argv[2:]]
    egm = fetch_descriptor(endpoint, 10.0).egm
    assert egm is not None
    devices = range(get_driver().device_count())
    held = []
    for chunk in egm.chunks:
        if chunk.index in wanted:
            share = export(egm.socket, chunk.index, egm.nonce, chunk.addr, chunk.length, 30.0)
            held.append(import_share(share, devices=devices))
            assert share.fd is not None
            os.close(share.fd)
    print(json.dumps({"pid": os.getpid(), "bytes": sum(mapping.nbytes for mapping in held)}), flush=True)
    sys.stdin.read()
    for mapping in held:
        mapping.close()


if __name__ == "__main__":
    main()
