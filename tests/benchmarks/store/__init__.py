"""The parts of `tests.benchmarks.consumer_h200`."""
