EXAMPLES = "egmctl demo"


def run() -> None:
    """x"""
