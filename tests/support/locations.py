"""Where the repository and the reference data lie."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
VECTORS_FOLDER = ROOT / "tests" / "vectors"
