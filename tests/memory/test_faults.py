"""Each driver call of setup, of release and of an import fails once: nothing is left, and release can be repeated."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from egmctl import steps
from egmctl.errors import EgmError
from egmctl.memory import Chunk, ChunkSpec, ReleaseError, import_share
from egmctl.memory.base import MemoryKind
from egmctl.memory.cuda import CudaProvider
from egmctl.memory.cuda_import import CudaMapping
from egmctl.memory.driver import install_driver
from tests.model.config import Config, Fault
from tests.model.driver import ModelDriver

UNIT = 16 << 20
SPECS = [ChunkSpec(0, 0, UNIT), ChunkSpec(1, 1, 2 * UNIT), ChunkSpec(2, 1, UNIT)]
KINDS: list[MemoryKind] = ["cuda-fabric", "cuda-posix"]


@dataclass(frozen=True)
class Site:
    """The ``nth`` call of one name, as it happens in one phase of a whole life."""

    kind: MemoryKind
    phase: str
    call: str
    nth: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.phase}-{self.call}-{self.nth}"


def new_model(folder: Path, faults: list[Fault] | None = None) -> ModelDriver:
    driver = ModelDriver(Config(directory=folder, faults=faults or []))
    install_driver(lambda: driver)
    return driver


def set_up(kind: MemoryKind, made: list[Chunk] | None = None) -> tuple[CudaProvider, list[Chunk]]:
    chunks = [] if made is None else made
    memory = CudaProvider(kind, sum(spec.nbytes for spec in SPECS))
    _providers.append(memory)
    for spec in SPECS:
        chunks.append(memory.create(spec, lambda _: None))
    return memory, chunks


_providers: list[CudaProvider] = []


def tear_down(memory: CudaProvider) -> None:
    for chunk in reversed(memory.chunks()):
        memory.release(chunk)
    memory.close()


def import_first(chunks: list[Chunk]) -> CudaMapping:
    share = chunks[0].share()
    try:
        mapping = import_share(share, devices=[0, 1])
    finally:
        if share.fd is not None:
            os.close(share.fd)
    assert isinstance(mapping, CudaMapping)
    return mapping


def whole_life(kind: MemoryKind) -> Iterator[str]:
    """All phases without a failure; each is over when its name comes."""
    memory, chunks = set_up(kind)
    yield "setup"
    mapping = import_first(chunks)
    yield "import"
    mapping.close()
    yield "close"
    tear_down(memory)
    yield "release"


def enumerate_sites() -> Iterator[Site]:
    """Every driver call of a life that succeeds."""
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="egm-sites-") as folder:
            model = new_model(Path(folder))
            counts: Counter[str] = Counter()
            for phase in whole_life(kind):
                for call in model.calls[counts.total() :]:
                    counts[call] += 1
                    yield Site(kind, phase, call, counts[call])
            install_driver(None)
    _providers.clear()


SITES = list(enumerate_sites())


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    install_driver(None)
    steps.watch(None)
    _providers.clear()


def sites(*phases: str) -> list[Any]:
    return [pytest.param(site, id=str(site)) for site in SITES if site.phase in phases]


@pytest.fixture
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> ModelDriver:
    site: Site = request.getfixturevalue("site")
    return new_model(tmp_path / "machine", [Fault(site.call, site.nth)])


def test_every_kind_of_call_of_both_kinds_is_among_the_sites(record_property: Callable[[str, object], None]) -> None:
    seen = {kind: {site.call for site in SITES if site.kind == kind} for kind in KINDS}
    common = {"granularity", "mem_create", "address_reserve", "mem_map", "set_access"}
    common |= {"mem_unmap", "mem_release", "address_free"}
    assert common | {"export_fabric", "import_fabric"} <= seen["cuda-fabric"]
    assert common | {"export_fd", "import_fd"} <= seen["cuda-posix"]
    record_property("fault sites", dict(Counter(site.phase for site in SITES)))


@pytest.mark.parametrize("site", sites("setup"))
def test_a_call_of_setup_that_fails_leaves_what_was_whole_before_and_nothing_else(
    site: Site, broken: ModelDriver
) -> None:
    made: list[Chunk] = []
    with pytest.raises(EgmError) as caught:
        set_up(site.kind, made)
    assert "CUDA_ERROR_UNKNOWN (999)" in caught.value.message
    assert caught.value.hint
    if _providers:
        memory = _providers[-1]
        assert memory.owned() == [chunk.spec for chunk in made]
        tear_down(memory)
    assert broken.leaks() == {}
    assert list(broken.config.directory.iterdir()) == []


@pytest.mark.parametrize("site", sites("import"))
def test_a_call_of_an_import_that_fails_leaves_nothing_of_it(site: Site, broken: ModelDriver) -> None:
    memory, chunks = set_up(site.kind)
    before = broken.leaks()
    with pytest.raises(EgmError, match="999"):
        import_first(chunks)
    assert broken.leaks() == before
    import_first(chunks).close()
    tear_down(memory)
    assert broken.leaks() == {}


@pytest.mark.parametrize("site", sites("close"))
def test_a_call_of_closing_a_mapping_that_fails_is_made_again_by_the_next_close(
    site: Site, broken: ModelDriver
) -> None:
    memory, chunks = set_up(site.kind)
    before = broken.leaks()
    mapping = import_first(chunks)
    with pytest.raises(ReleaseError, match="999"):
        mapping.close()
    assert broken.leaks() != before
    mapping.close()
    assert broken.leaks() == before
    tear_down(memory)
    assert broken.leaks() == {}


@pytest.mark.parametrize("site", sites("release"))
def test_a_call_of_release_that_fails_keeps_ownership_and_the_next_release_finishes(
    site: Site, broken: ModelDriver
) -> None:
    memory, chunks = set_up(site.kind)
    import_first(chunks).close()
    with pytest.raises(ReleaseError, match="999") as caught:
        tear_down(memory)
    assert caught.value.exit_code == 4
    left = broken.leaks()
    assert left, "what could not be released is still there"
    if site.call != "address_free":
        assert memory.owned()
    tear_down(memory)
    assert broken.leaks() == {}
    for call in ("mem_unmap", "mem_release", "address_free"):
        done = broken.calls.count(call) - (1 if call == site.call else 0)
        expected = len(SPECS) + 1 if call != "address_free" else 2
        assert done == expected, f"{call} succeeds once for each thing and is not made again"


@pytest.mark.parametrize("kind", KINDS)
def test_an_undo_that_fails_too_is_owned_and_released_later(kind: MemoryKind, tmp_path: Path) -> None:
    model = new_model(tmp_path / "machine", [Fault("set_access", 2), Fault("mem_unmap", 1)])
    made: list[Chunk] = []
    with pytest.raises(ReleaseError) as caught:
        set_up(kind, made)
    assert isinstance(caught.value.__context__, EgmError)
    memory = _providers[-1]
    assert memory.owned() == SPECS[:2]
    assert model.leaks()
    tear_down(memory)
    assert model.leaks() == {}


def test_an_import_whose_undo_fails_hands_over_what_is_left(tmp_path: Path) -> None:
    model = new_model(tmp_path / "machine", [Fault("set_access", 4), Fault("mem_release", 1)])
    memory, chunks = set_up("cuda-posix")
    before = model.leaks()
    with pytest.raises(ReleaseError) as caught:
        import_first(chunks)
    assert caught.value.left is not None
    caught.value.left.close()
    assert model.leaks() == before
    tear_down(memory)
    assert model.leaks() == {}


class FailAt:
    """A watcher that lets the nth step of a site fail, before or after its act."""

    def __init__(self, site: str, nth: int, *, after: bool) -> None:
        self.site, self.nth, self.late = site, nth, after
        self.seen: list[str] = []

    def before(self, site: str, detail: dict[str, Any]) -> None:
        self.seen.append(site)
        if not self.late:
            self._hit(site)

    def after(self, site: str, detail: dict[str, Any], error: BaseException | None) -> None:
        if self.late and error is None:
            self._hit(site)

    def _hit(self, site: str) -> None:
        if site == self.site and self.seen.count(site) == self.nth:
            self.nth = -1
            raise OSError(5, "told to fail")


SETUP_STEPS = ["reserve", "create", "map", "access", "export"]
RELEASE_STEPS = ["unmap", "release", "unreserve"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", SETUP_STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_setup_interrupted_before_or_after_its_act_leaves_nothing(
    kind: MemoryKind, name: str, after: bool, tmp_path: Path
) -> None:
    model = new_model(tmp_path / "machine")
    steps.watch(FailAt(f"memory.cuda.{name}", 1, after=after))
    with pytest.raises(OSError, match="told to fail"):
        set_up(kind)
    steps.watch(None)
    assert _providers[-1].owned() == []
    tear_down(_providers[-1])
    assert model.leaks() == {}


@pytest.mark.parametrize("name", [*RELEASE_STEPS, "close"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_step_of_release_interrupted_before_or_after_its_act_is_not_repeated_once_done(
    name: str, after: bool, tmp_path: Path
) -> None:
    model = new_model(tmp_path / "machine")
    memory, _ = set_up("cuda-posix")
    steps.watch(FailAt(f"memory.cuda.{name}", 1, after=after))
    with pytest.raises(ReleaseError, match="told to fail"):
        tear_down(memory)
    steps.watch(None)
    tear_down(memory)
    assert model.leaks() == {}
