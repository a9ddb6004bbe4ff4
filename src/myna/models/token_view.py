"""A rendered conversation for the eye: every token, every frame, and what of it is learned."""

from __future__ import annotations

from rich.text import Text

from myna.models.base import IGNORED, Family, RenderedSequence

LEARNED, CONTEXT, CONTROL = "bold green", "default", "dim cyan"
SHOWN_FRAMES = 4
"""Frames drawn at each end of a long clip."""
SHOWN_BOOKS = 64
"""A frame of more numbers than this holds features, which tell the eye nothing."""


def token_view(rendered: RenderedSequence, family: Family, *, all_frames: bool = False) -> Text:
    """Green is learned, plain is context, cyan is control; `·` behind a code says that it is masked."""
    art = Text()
    learned = int((rendered.labels != IGNORED).sum()), int((rendered.code_labels != IGNORED).sum())
    art.append(f"{rendered.id}: {len(rendered)} positions, {learned[0]} text and {learned[1]} code targets\n", "bold")
    frames_before = 0
    for piece in rendered.pieces:
        art.append(f"{piece.start:6d}  ", "dim")
        if piece.kind == "audio":
            frames = piece.stop - piece.start
            art.append(f"{piece.shown}\n", LEARNED if piece.supervised else CONTEXT)
            if rendered.codes.shape[1] <= SHOWN_BOOKS:
                _draw_frames(art, rendered, frames_before, frames, piece.start, all_frames)
            frames_before += frames
            continue
        style = LEARNED if piece.supervised else CONTROL if piece.kind == "special" else CONTEXT
        for number, id in enumerate(rendered.ids[piece.start : piece.stop].tolist()):
            art.append("│" if number else "", "dim")
            art.append(family.show_token(id).replace("\n", "⏎"), style)
        art.append("\n")
    return art


def _draw_frames(
    art: Text, rendered: RenderedSequence, first: int, frames: int, position: int, all_frames: bool
) -> None:
    books = rendered.codes.shape[1]
    ends = SHOWN_FRAMES + books
    for frame in range(frames):
        if not all_frames and ends <= frame < frames - ends:
            if frame == ends:
                art.append(f"        … {frames - 2 * ends} more frames\n", "dim")
            continue
        art.append(f"{position + frame:6d}  ", "dim")
        for code, label in zip(rendered.codes[first + frame], rendered.code_labels[first + frame], strict=True):
            art.append(f"{code:5d} ", LEARNED) if label != IGNORED else art.append(f"{code:5d}·", "dim")
        art.append("\n")
