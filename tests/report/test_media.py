"""Clips of a page: players, and spectrograms that decode and show what is there."""

from __future__ import annotations

import base64
import io
import re
import struct
import zlib

import numpy as np
import pytest
import soundfile

from myna.report.page import (
    BANDS,
    Cell,
    Pixels,
    Samples,
    cell,
    clip,
    color_palette,
    encode_png,
    item,
    mel_spectrogram_pixels,
    render_page,
)

RATE = 24_000


def tone(pitch: float, seconds: float = 0.5) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.sin(2 * np.pi * pitch * np.arange(round(seconds * RATE)) / RATE).astype(np.float32)


def decoded(content: bytes) -> tuple[Pixels, Pixels]:
    """Pixels and palette of a PNG, each chunk checked by its sum."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(content):
        length, kind = struct.unpack(">I4s", content[at : at + 8])
        body = content[at + 8 : at + 8 + length]
        assert struct.unpack(">I", content[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    width, height, depth, colour, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, colour, rest) == (8, 3, [0, 0, 0])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()
    return lines[:, 1:], np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)


def test_a_png_decodes_to_its_pixels() -> None:
    pixels = np.arange(6 * 7, dtype=np.uint8).reshape(6, 7)
    found, colours = decoded(encode_png(pixels))
    assert np.array_equal(found, pixels)
    assert np.array_equal(colours, color_palette())


def test_louder_levels_are_brighter() -> None:
    light = color_palette().astype(float) @ [0.2, 0.7, 0.1]
    assert (np.diff(light) > -1).all() and light[-1] > light[0] + 200


def test_a_higher_tone_is_higher_in_the_image() -> None:
    rows = [int(mel_spectrogram_pixels(tone(pitch), RATE).mean(axis=1).argmax()) for pitch in (150.0, 600.0, 2400.0)]
    assert rows == sorted(rows, reverse=True) and len(set(rows)) == 3, "row 0 is the top"


def test_a_column_is_ten_milliseconds() -> None:
    pixels = mel_spectrogram_pixels(np.concatenate([tone(500.0, 0.3), np.zeros(round(0.3 * RATE), np.float32)]), RATE)
    assert pixels.shape == (BANDS, 60)
    assert pixels[:, 5:25].max() == 255 and pixels[:, 36:].max() == 0, "sound in the first half, silence after it"


@pytest.mark.parametrize("samples", [np.zeros(0, np.float32), np.zeros(2400, np.float32)])
def test_silence_is_black(samples: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
    pixels = mel_spectrogram_pixels(samples, RATE)
    assert pixels.shape[0] == BANDS and pixels.shape[1] >= 1 and not pixels.any()


def rendered(samples: Samples, *, notes: tuple[Cell, ...] = ()) -> str:
    """Show a clip beside a longest one of two seconds."""
    made = clip(samples, RATE, title="real", label='line 1, "real"', max_seconds=2.0, notes=notes)
    page = render_page("title", [item("text", "note", [made])])
    return page[page.index("<main>") : page.index("</main>")]


def test_a_spectrogram_is_an_image_with_a_name() -> None:
    made = rendered(tone(440.0))
    assert 'alt="spectrogram of line 1, &#34;real&#34;"' in made
    found = re.search(r'src="data:image/png;base64,([^"]+)"', made)
    assert found
    pixels, _ = decoded(base64.b64decode(found[1]))
    assert np.array_equal(pixels, mel_spectrogram_pixels(tone(440.0), RATE))


def test_a_player_holds_the_audio_it_was_given() -> None:
    samples = tone(190.0, 1.0) * np.float32(0.5)
    made = rendered(samples)
    assert 'aria-label="play line 1, &#34;real&#34;"' in made and " controls" in made
    found = re.search(r'src="data:audio/flac;base64,([^"]+)"', made)
    assert found
    played, rate = soundfile.read(io.BytesIO(base64.b64decode(found[1])), dtype="float32")
    assert rate == RATE and np.abs(played - samples).max() < 1e-4


def test_an_empty_clip_has_a_note_and_no_player() -> None:
    made = rendered(np.zeros(0, np.float32))
    assert "nothing to hear" in made and "<audio" not in made and "<img" not in made


def test_a_spectrogram_is_as_wide_as_its_clip_is_long() -> None:
    made = rendered(np.ones(RATE, np.float32), notes=("<b>", cell("cut", "bad")))
    assert "width:50.0%" in made and "1.0 s" in made
    assert '&lt;b&gt; · <span class="bad">cut</span>' in made
