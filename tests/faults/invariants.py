"""What has to hold of the order of recorded events, whatever failed and whoever was killed."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

__all__ = ["premature_releases", "repetitions", "undurable", "violations"]

Event = dict[str, Any]

_RELEASES = ("memory.shm.unmap", "memory.shm.close", "memory.cuda.close", "memory.cuda.unmap", "memory.cuda.release")
_ONCE = (
    "memory.shm.unmap",
    "memory.cuda.unmap",
    "memory.cuda.release",
    "memory.shm.unreserve",
    "memory.cuda.unreserve",
)
# What a Master's answer, or the fact that nothing was handed over, makes certain: it has no such segment from us.
_NEVER_MOUNTED = ("MasterRefused", "MasterRpcError", "MasterUnreachable")


def premature_releases(events: list[Event]) -> list[str]:
    """Memory let go while a segment of the same agent may have been at a Master, or while its descriptor was out."""
    alive: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    published: dict[int, set[str]] = defaultdict(set)
    wrong = []
    for event in events:
        pid, site, phase, detail = event["pid"], event["site"], event["phase"], event["detail"]
        if not event["label"].startswith("agent@"):
            continue
        failed = event.get("error")
        if site == "mooncake.master.mount_segment":
            segment = tuple(detail["segment"])
            if phase in ("before", "hit"):  # an injected failure says "may take effect" as well
                alive[pid].add(segment)
            elif phase == "after" and failed in _NEVER_MOUNTED:
                alive[pid].discard(segment)
        elif site == "mooncake.master.unmount_segment" and phase == "after" and not failed:
            alive[pid].discard(tuple(detail["segment"]))
        elif site == "ledger.commit" and phase == "after" and not failed and detail["what"] == "fenced":
            alive[pid].clear()  # `fence_was_kept` looks at whether it might
        elif site == "provider.publish" and phase == "after" and not failed:
            published[pid].add("endpoint")
        elif site == "provider.unpublish" and phase == "after" and not failed:
            published[pid].discard("endpoint")
        elif site == "metadata.put" and phase in ("before", "hit"):
            published[pid].add(detail["key"])
        elif site == "ledger.commit" and phase == "after" and not failed and detail["what"] == "publication removed":
            published[pid] &= {"endpoint"}  # found absent, or deleted; `residue` asks the server
        elif site in _RELEASES and phase == "before" and (alive[pid] or published[pid]):
            still = [f"segment {segment}" for segment in sorted(alive[pid])] + sorted(published[pid])
            wrong.append(f"{site} of chunk {detail.get('chunk')} while {', '.join(still)} may be known")
    return wrong


def fence_was_kept(events: list[Event], expiry: float) -> list[str]:
    """Between the last ping (or mount) of an agent and the record of its fence the expiry has passed."""
    last: dict[int, int] = {}
    wrong = []
    for event in events:
        site = event["site"]
        if site in ("mooncake.master.ping", "mooncake.master.mount_segment") and event["phase"] in ("before", "hit"):
            last[event["pid"]] = event["t"]
        if site == "ledger.commit" and event["phase"] == "before" and event["detail"]["what"] == "fenced":
            passed = (event["t"] - last.get(event["pid"], 0)) / 1e9
            if passed < expiry:
                wrong.append(f"fenced {passed:.1f} s after the last contact, not {expiry} s")
    return wrong


def undurable(events: list[Event]) -> list[str]:
    """Acts that the ledger did not name, durably, at the moment they were begun."""
    return [
        f"{event['site']} before the ledger said so: {event['undurable']}" for event in events if "undurable" in event
    ]


def repetitions(events: list[Event]) -> list[str]:
    """Steps done a second time although the first was done, and recorded as done."""
    wrong = []
    unmounted: set[tuple[int, ...]] = set()
    recorded: set[tuple[int, ...]] = set()
    released: set[tuple[int, str, Any]] = set()
    for event in events:
        site, phase, detail, pid = event["site"], event["phase"], event["detail"], event["pid"]
        good = phase == "after" and not event.get("error")
        if phase == "hit" and event.get("mode") == "lost":  # done, and not known to be
            unmounted.discard(tuple(detail.get("segment", ())))
            released.discard((pid, site, detail.get("chunk")))
        elif site == "mooncake.master.unmount_segment":
            segment = tuple(detail["segment"])
            if phase == "before" and segment in recorded:
                wrong.append(f"segment {segment} unmounted again although the ledger had it as unmounted")
            if good:
                unmounted.add(segment)
        elif site == "ledger.commit" and good and detail["what"] in ("unmounted", "mounted", "mount failed"):
            recorded |= unmounted
        elif site in ("memory.shm.file", "memory.cuda.create") and phase == "before":
            released = {one for one in released if one[0] != pid or one[2] != detail["chunk"]}
        elif site in _ONCE:
            mark = (pid, site, detail.get("chunk"))
            if phase == "before" and mark in released and detail.get("chunk") is not None:
                wrong.append(f"{site} of chunk {detail.get('chunk')} a second time")
            if good:
                released.add(mark)
    return wrong


def violations(events: list[Event], expiry: float) -> dict[str, list[str]]:
    """By sort; empty lists are left out."""
    found = {
        "premature": premature_releases(events),
        "fence": fence_was_kept(events, expiry),
        "undurable": undurable(events),
        "repeated": repetitions(events),
    }
    return {name: sentences for name, sentences in found.items() if sentences}
