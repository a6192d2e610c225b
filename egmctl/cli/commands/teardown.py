EXAMPLES = "egmctl teardown"


def run() -> None:
    """x"""
