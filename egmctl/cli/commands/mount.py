EXAMPLES = "egmctl mount"


def run() -> None:
    """x"""
