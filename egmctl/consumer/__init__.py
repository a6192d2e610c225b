"""Put and get straight between a caller's buffers and a pool's DRAM, in host or GPU memory.

`EgmStore` is the face; `egmctl.consumer.errors` has what it raises. The bytes of a get are believed after this only:
the provider's incarnation is the one that was bound before the object was located, the Master's connection is the one
that was asked first, and the object lies where it lay, under the same replica number. A put is published only under the
same conditions, and within its deadline. Nothing is staged: the CPU copies pageable memory itself, straight to and from
chunks of this host (for ``cuda-posix`` and ``shm`` they are plain pointers), and is refused memory of another host.

What cannot be detected, so that it is known:

- A stock provider (no egmctl fields in its descriptor) is known by its handles alone. Should another one stand behind
  its endpoint while the Master still lists the old segments (31 s at most), a store that knew the old one sees other
  handles and refuses for `Timing.stock_expiry`; one that was opened after the change sees nothing unusual, and a handle
  that a reloaded driver gave out again looks like the same memory.
- ``exclusive`` in a descriptor is the provider's word, and so is which memory it hands over: an agent that lies about
  either is believed. Its control socket is trusted when root, this user or the owner of the socket's folder listens.
- A session does not see a removal or an overwrite by force inside its lease before `Session.unchanged` or
  `Session.renew` asks. A session of fabric memory of another host asks its endpoint once a `Timing.remote_check`.
- A copy queued on a stream cannot be called back. One that starts after the Master has handed its space out anew
  (600 s after an unfinished put, or after a restart of the Master and the lease time that a pool waits then) writes
  into another object; the put itself is not published. Give streams whose work ends within `Timing.put_deadline`.
- A PutEnd that was sent and not answered may have taken effect: `InterruptedPut` says so (``revoked`` is None).
- Somebody else with access to a pool's memory can write into it at any time; there is no checksum over an object.
"""

from egmctl.consumer.engine import Timing
from egmctl.consumer.flow import FlowOptions
from egmctl.consumer.session import Session
from egmctl.consumer.store import EgmStore
from egmctl.consumer.transfer import BatchTransfer, Transfer

__all__ = ["BatchTransfer", "EgmStore", "FlowOptions", "Session", "Timing", "Transfer"]
