"""A seam: the model of the driver chooses addresses by itself, whatever is wished for."""

from __future__ import annotations

from tests.model.driver import ModelDriver

__all__ = ["install"]


def install() -> None:
    reserve = ModelDriver.address_reserve

    def by_itself(self: ModelDriver, nbytes: int, alignment: int = 0, hint: int = 0) -> int:
        return reserve(self, nbytes, alignment, 0)

    ModelDriver.address_reserve = by_itself  # type: ignore[method-assign]
