"""Until a command begins there is nothing to undo: an interrupt ends the process, wherever in its imports that is.

An exception would not do: it could be met in a finalizer, where Python shows it and goes on, or be wrapped in another.
"""

import os
import signal
from types import FrameType

__all__ = ["command_begins", "leave_when_interrupted"]


def leave_when_interrupted() -> None:
    """From now on an interrupt exits with 130 at once, unless interrupts are ignored or somebody else's."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def command_begins() -> None:
    """From now on an interrupt is a `KeyboardInterrupt`."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
