"""The recipes' scripts find their neighbours beside them, as when they are run."""

from __future__ import annotations

import sys
from pathlib import Path

FLEDGLING = Path(__file__).parents[2] / "training" / "fledgling"
sys.path.insert(0, str(FLEDGLING))
sys.path.insert(0, str(FLEDGLING.parent / "pronunciation"))
