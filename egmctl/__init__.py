"""egmctl: the CPU DRAM of GPU hosts as a Mooncake Store pool that GPUs read and write directly."""

__version__ = "0.1.0"
