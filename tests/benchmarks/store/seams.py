"""What the restart case switches off in a provider."""

from __future__ import annotations

__all__ = ["no_waiting"]


def no_waiting() -> None:
    """A provider that publishes and mounts at once, whatever the Master still lists under its endpoint. It does not
    claim that the endpoint is its own alone; once its expiry has passed, its agent says so as always."""
    from egmctl.provider.mount_stages import Publication

    Publication._establish_exclusive = staticmethod(lambda pool: None)  # type: ignore[method-assign]
