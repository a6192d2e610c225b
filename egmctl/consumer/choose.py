"""Which of an object's replicas is read."""

from __future__ import annotations

from collections.abc import Sequence

from egmctl.consumer.errors import GetFailed, InvalidBuffer, InvalidRequest, StoreClosed, Unreachable
from egmctl.consumer.master_link import Location
from egmctl.consumer.pins import Again, Pins, Place, Target
from egmctl.errors import EgmError

__all__ = ["NOT_THE_PLACE", "Failures", "choose"]

Failures = dict[int, list[tuple[Place, EgmError]]]
"""For a request, the places that a copy was begun from and failed. None yet: a copy failed that others took part in,
and it is copied apart from what lies at other providers."""

NOT_THE_PLACE = (StoreClosed, InvalidRequest, InvalidBuffer)
"""With these errors a copy from elsewhere would fail as well."""


def choose(pins: Pins, location: Location, failed: Sequence[tuple[Place, EgmError]] = ()) -> tuple[Place, Target]:
    """The first replica that can be reached and is not among those ``failed``. Raises `Again` when a later attempt may
    reach one, else `Unreachable`, or `GetFailed` where copies were begun."""
    reasons = list(location.elsewhere)
    later: Again | None = None
    broken: EgmError | None = None
    for place in location.places:
        known = next((error for other, error in failed if other == place), None)
        if known is not None:
            broken = known
            reasons.append(f"replica {place.replica} at {place.endpoint} could not be copied: {known}")
            continue
        try:
            return place, pins.resolve(place, location.asked_at)
        except Again as error:
            if later is None or (error.at_once and not later.bound):
                later = error
            reasons.append(str(error.error))
        except EgmError as error:
            reasons.append(str(error))
    if later is not None:
        raise later
    if broken is not None:
        raise GetFailed(
            "no replica could be copied: " + "; ".join(reasons),
            where=f"object {location.key!r}",
            hint=broken.hint,
            facts={"reasons": reasons},
        ) from broken
    raise Unreachable(
        "no replica lies in memory that can be reached directly: " + ("; ".join(reasons) or "it has none in memory"),
        where=f"object {location.key!r}",
        hint="read it through a Mooncake client",
        facts={"reasons": reasons},
    )
