"""Terminal view of a rendered conversation: every token, every frame, and which are supervised."""

from rich.text import Text

from myna.models.base import IGNORE_INDEX, Family, RenderedSequence

SUPERVISED, CONTEXT, CONTROL = "bold green", "default", "dim cyan"
EDGE_FRAMES_SHOWN = 4
"""Frames drawn at each end of a long clip."""
MAX_CODEBOOKS_SHOWN = 64
"""Largest number of values of a frame that are shown; frames of more values are features."""


def token_view(rendered: RenderedSequence, family: Family, *, all_frames: bool = False) -> Text:
    """Return the view: supervised in green, context plain, control in cyan, and `·` after a code that is masked."""
    view = Text()
    targets = int((rendered.labels != IGNORE_INDEX).sum()), int((rendered.code_labels != IGNORE_INDEX).sum())
    view.append(f"{rendered.id}: {len(rendered)} positions, {targets[0]} text and {targets[1]} code targets\n", "bold")
    frames_before = 0
    for piece in rendered.spans:
        view.append(f"{piece.start:6d}  ", "dim")
        if piece.kind == "audio":
            frames = piece.stop - piece.start
            view.append(f"{piece.shown}\n", SUPERVISED if piece.supervised else CONTEXT)
            if rendered.codes.shape[1] <= MAX_CODEBOOKS_SHOWN:
                _draw_frames(view, rendered, frames_before, frames, piece.start, all_frames)
            frames_before += frames
            continue
        style = SUPERVISED if piece.supervised else CONTROL if piece.kind == "special" else CONTEXT
        for number, id in enumerate(rendered.ids[piece.start : piece.stop].tolist()):
            view.append("│" if number else "", "dim")
            view.append(family.show_token(id).replace("\n", "⏎"), style)
        view.append("\n")
    return view


def _draw_frames(
    view: Text, rendered: RenderedSequence, first: int, frames: int, position: int, all_frames: bool
) -> None:
    books = rendered.codes.shape[1]
    ends = EDGE_FRAMES_SHOWN + books
    for frame in range(frames):
        if not all_frames and ends <= frame < frames - ends:
            if frame == ends:
                view.append(f"        … {frames - 2 * ends} more frames\n", "dim")
            continue
        view.append(f"{position + frame:6d}  ", "dim")
        for code, label in zip(rendered.codes[first + frame], rendered.code_labels[first + frame], strict=True):
            view.append(f"{code:5d} ", SUPERVISED) if label != IGNORE_INDEX else view.append(f"{code:5d}·", "dim")
        view.append("\n")
