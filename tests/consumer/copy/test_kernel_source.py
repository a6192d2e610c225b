"""The CUDA source itself, run on the CPU: what a GPU would do, wherever there is a C++ compiler."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from egmctl.consumer.copy.source import ENTRY_POINTS, SOURCE

COMPILER = shutil.which("g++")
HARNESS = Path(__file__).with_name("kernels_on_cpu.cpp")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")
@pytest.mark.timeout(180)
def test_entries_go_where_they_belong_and_nowhere_else_even_when_offsets_change_meanwhile(tmp_path: Path) -> None:
    assert COMPILER is not None
    plain, loads = re.subn(r"asm volatile\(.*?\);", "v = *reinterpret_cast<const uint4 *>(p);", SOURCE, flags=re.DOTALL)
    assert loads == 1
    kernels, program = tmp_path / "kernels.h", tmp_path / "kernels"
    kernels.write_text(plain)
    command = [COMPILER, "-std=c++20", "-O1", "-pthread", f'-DKERNELS="{kernels}"', str(HARNESS), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_kernel_that_is_launched_is_in_the_source() -> None:
    assert set(re.findall(r'extern "C" __global__ void (\w+)\(', SOURCE)) == set(ENTRY_POINTS)
