EXAMPLES = "egmctl plan"
def run() -> None:
    """x"""
