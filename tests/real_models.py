"""Models that `myna setup` has downloaded for this user. Tests have a MYNA_HOME of their own, which is empty."""

from __future__ import annotations

import platformdirs

CURATION = platformdirs.user_cache_path("myna", appauthor=False) / "curation"
WHISPER = platformdirs.user_cache_path("myna", appauthor=False) / "whisper-base"
