EXAMPLES = "egmctl doctor"


def run() -> None:
    """x"""
