EXAMPLES = "egmctl verify"


def run() -> None:
    """x"""
