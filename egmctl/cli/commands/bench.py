EXAMPLES = "egmctl bench"


def run() -> None:
    """x"""
