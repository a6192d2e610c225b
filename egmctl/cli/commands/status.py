EXAMPLES = "egmctl status"


def run() -> None:
    """x"""
