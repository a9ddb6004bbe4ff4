"""Players that carry their sound with them."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import soundfile

from myna.report.player import audio_figure, audio_player

RATE = 24_000


def test_the_sound_in_a_player_is_the_sound_it_was_given() -> None:
    samples = (0.5 * np.sin(np.arange(RATE) / 20)).astype(np.float32)
    made = audio_player(samples, RATE, label="line 1 <real>")
    assert 'aria-label="line 1 &lt;real&gt;"' in made and " controls" in made
    found = re.search(r'src="data:audio/flac;base64,([^"]+)"', made)
    assert found
    heard, rate = soundfile.read(io.BytesIO(base64.b64decode(found[1])), dtype="float32")
    assert rate == RATE and np.abs(heard - samples).max() < 1e-4


def test_nothing_to_hear_is_said() -> None:
    made = audio_figure(np.zeros(0, np.float32), RATE, title="after", label="line 1", max_seconds=2.0)
    assert "nothing to hear" in made and "<audio" not in made and "<img" not in made


def test_a_picture_is_as_wide_as_its_sound_is_long() -> None:
    made = audio_figure(np.ones(RATE, np.float32), RATE, title="real", label="line 1", max_seconds=2.0, note="<b>")
    assert "width:50.0%" in made and "1.0 s" in made
    assert "&lt;b&gt;" in made
