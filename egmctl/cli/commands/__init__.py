"""One file per command. Each holds ``run``, its options and help, and ``EXAMPLES``."""
