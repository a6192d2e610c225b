"""The command line: faces only. Nothing outside this folder knows typer or rich."""
