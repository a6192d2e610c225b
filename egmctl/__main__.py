"""``python -m egmctl``, and where the ``egmctl`` command begins: nothing is imported before interrupts are expected."""

import sys

__all__ = ["run"]


def run() -> int:
    """The command line of this process; its exit code."""
    try:
        from egmctl.cli.starting import leave_when_interrupted

        leave_when_interrupted()
        from egmctl.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
