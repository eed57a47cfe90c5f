"""Folders of the repository, and the search path of the processes that tests start."""

from pathlib import Path

HELPERS = Path(__file__).parent
DATA = HELPERS.parent / "data"
ROOT = HELPERS.parents[1]
PYTHONPATH = f"{ROOT}:{HELPERS}"
"""What pytest's own search path holds (pyproject.toml, pythonpath)."""
