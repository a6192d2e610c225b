EXAMPLES = "egmctl topology"
def run() -> None:
    """x"""
