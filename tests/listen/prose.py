"""Beginning of the Universal Declaration of Human Rights in 17 languages (github.com/eric-muller/udhr)."""

from __future__ import annotations

import json
from pathlib import Path

PROSE: dict[str, str] = json.loads(Path(__file__).with_name("prose.json").read_text(encoding="utf-8"))
