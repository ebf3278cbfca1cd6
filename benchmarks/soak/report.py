from pathlib import Path

RESULTS = Path("x")
PAGE = Path("y")


def write(a: Path, b: Path) -> None:
    pass
