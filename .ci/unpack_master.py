"""Unpack `mooncake_master` and the libraries beside it from a downloaded wheel. Usage: unpack_master.py FOLDER TARGET

Not the rest: the bindings need a GPU's driver, and a second `mooncake` module must not stand next to the installed one.
"""

import re
import sys
import zipfile
from pathlib import Path

KEEP = re.compile(r"mooncake/mooncake_master|[^/]+\.libs/[^/]+|[^/]+\.dist-info/(METADATA|licenses/.+|LICENSE.*)")


def main(folder: Path, target: Path) -> None:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in filter(KEEP.fullmatch, archive.namelist()):
            path = Path(archive.extract(name, target))
            if path.name == "mooncake_master":
                path.chmod(0o755)
    if not (target / "mooncake" / "mooncake_master").is_file():
        sys.exit(f"there is no mooncake_master in {wheel.name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
