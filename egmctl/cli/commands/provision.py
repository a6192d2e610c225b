EXAMPLES = "egmctl provision"


def run() -> None:
    """x"""
