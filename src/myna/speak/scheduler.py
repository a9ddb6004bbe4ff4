"""Continuous batching: requests join and leave a decoding batch while it runs."""

import hashlib
from collections import deque
from dataclasses import dataclass, field, replace
from textwrap import shorten

import numpy as np
import numpy.typing as npt

from myna.core.errors import SpeakError
from myna.data.codec import Codes
from myna.models.base import PendingStep, RenderedSequence, Sampling, SpeechDecoder
from myna.speak.request import FinishReason

SPARE_POSITIONS = 64
"""Positions to spare, more than any delay pattern adds to the frames of a clip."""


@dataclass(eq=False)
class Generation:
    """One generation in the decoding batch, with its codes so far."""

    prompt: RenderedSequence
    sampling: Sampling
    max_frames: int
    _decoder: SpeechDecoder
    slot: int = -1
    """Place of its adapter among the loaded ones; -1 for none."""
    strength: float = 1.0
    finish_reason: FinishReason | None = None
    error: SpeakError | None = None
    """Error that cancelled it; None if its user did."""
    held: bool = False
    """Whether steps may leave it out, since its listener has enough to hear."""
    _delayed: list[npt.NDArray[np.int64]] = field(default_factory=list)
    _log_probs: list[npt.NDArray[np.float32]] = field(default_factory=list)
    _positions: int = 0
    """Number of positions of its prompt and of the steps that were enqueued for it; their results may come later."""

    def __post_init__(self) -> None:
        self._positions = len(self.prompt)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def frames(self) -> int:
        """Number of whole frames so far."""
        return self._decoder.frames(self._delayed, self.finish_reason in ("stop", "length"))

    def codes(self, start: int = 0) -> Codes:
        """Return the whole frames from `start` on, with the delay undone: shape (frames, codebooks)."""
        return self._decoder.undelay(self._delayed, start, self.frames).astype(np.uint16)

    def log_probs(self) -> npt.NDArray[np.float32]:
        """Return log probabilities of all codes under the model's own distribution, and of the ends of stream: shape
        (frames + 1, codebooks). A cancelled generation has no ends."""
        ends = 1 if self.finish_reason in ("stop", "length") else 0
        return self._decoder.undelay(self._log_probs, 0, self.frames + ends)

    def cancel(self) -> None:
        """Free the row with the next step."""
        if not self.finished:
            self.finish_reason = "cancelled"


class BatchScheduler:
    """Queue in front of a decoding batch. `advance` does one step: cancelled and ended generations leave, waiting ones
    are let in, a step is enqueued, and the oldest result is read once `steps_ahead` newer steps are enqueued. A step
    leaves out held generations if fewer rows are computed then."""

    def __init__(self, decoder: SpeechDecoder) -> None:
        self.decoder = decoder
        self._waiting: deque[Generation] = deque()
        self._rows: list[Generation] = []
        self._pending: deque[tuple[PendingStep, tuple[Generation, ...]]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._rows or self._pending)

    def room(self, prompt: RenderedSequence) -> int:
        """Return the number of frames that fit a slot after a prompt."""
        return self.decoder.max_positions - self.decoder.positions(prompt, 0)

    def submit(
        self,
        prompt: RenderedSequence,
        sampling: Sampling,
        max_frames: int,
        adapter: str | int = "",
        strength: float = 1.0,
    ) -> Generation:
        """Queue a generation, with a loaded adapter, the slot of one that is in use, or with none."""
        needed = self.decoder.positions(prompt, max_frames)
        if needed > self.decoder.max_positions:
            raise SpeakError(
                f"{shorten(prompt.id, 60, placeholder=' ...')} needs {needed} positions, the batch has "
                f"{self.decoder.max_positions}",
                hint="use a shorter reference or text, or a lower limit of seconds",
            )
        slot = -1
        if adapter not in ("", -1):
            if self.decoder.adapters is None:
                raise SpeakError(f"there is no adapter {adapter}", hint="load it first")
            slot = self.decoder.adapters.acquire(adapter)
        generation = Generation(prompt, sampling, max_frames, self.decoder, slot, strength)
        self._waiting.append(generation)
        return generation

    def advance(self) -> bool:
        """Do one step. Return whether its results ended any generation."""
        self.release_finished()
        self._let_in()
        if self._rows:
            stepped = tuple(self._rows[: self._arrange_rows()])
            longest = max([generation._positions for generation in stepped])
            self._pending.append((self.decoder.step(len(stepped), longest), stepped))
            for generation in stepped:
                generation._positions += 1
        ended = False
        while len(self._pending) > (self.decoder.steps_ahead if self._rows else 0):
            ended |= self._read()
        return ended

    def _arrange_rows(self) -> int:
        """Return how many of the first rows the next step takes: all, or fewer if held ones can be left out. Rows that
        are not held then change places with held ones before them, through a free row."""
        rows, spare = self._rows, len(self._rows)
        running = sum(not generation.held for generation in rows)
        count = min(spare, self.decoder.bucket(running))
        if not running or count == spare or spare == self.decoder.rows:
            return spare
        held = [row for row in range(count) if rows[row].held]
        behind = [row for row in range(count, spare) if not rows[row].held]
        for first, second in zip(held, behind, strict=False):
            for source, target in ((first, spare), (second, first), (spare, second)):
                generation = rows[second if source == second else first]
                self.decoder.move_row(source, target, generation._positions)
            rows[first], rows[second] = rows[second], rows[first]
        if held and behind:
            self.decoder.end(spare)
        return count

    def release_finished(self) -> None:
        """Free rows and adapters of ended generations. The last row takes the place of one that leaves."""
        for generation in [waiting for waiting in self._waiting if waiting.finished]:
            self._waiting.remove(generation)
            self._release(generation)
        for row in range(len(self._rows) - 1, -1, -1):
            if not self._rows[row].finished:
                continue
            self._release(self._rows[row])
            last = self._rows.pop()
            if row < len(self._rows):
                self.decoder.move_row(len(self._rows), row, last._positions)
                self._rows[row] = last
            self.decoder.end(len(self._rows))

    def _let_in(self) -> None:
        while self._waiting and len(self._rows) < self.decoder.rows:
            generation = self._waiting.popleft()
            row, prompt, voice = len(self._rows), generation.prompt, (generation.slot, generation.strength)
            # Insert the new row before held rows, so that it need not be moved later.
            held = next((i for i, other in enumerate(self._rows) if other.held), row)
            if held < row:
                moved = self._rows[held]
                self.decoder.move_row(held, row, moved._positions)
                self.decoder.end(held)
                self._rows.append(moved)
                row = held
            if generation.slot >= 0:
                self.decoder.use_adapter(row, *voice)
            # Another take of a prompt whose keys and values are still here.
            takes = (i for i, other in enumerate(self._rows) if other.prompt is prompt and i != row)
            source = next((i for i in takes if (self._rows[i].slot, self._rows[i].strength) == voice), None)
            if source is None:
                self.decoder.prefill(row, prompt)
            else:
                self.decoder.copy_prompt(source, row, len(prompt))
            self.decoder.begin(row, len(prompt), generation.sampling, generation.max_frames)
            self._rows[row : row + 1] = [generation]

    def _release(self, generation: Generation) -> None:
        if generation.slot >= 0 and self.decoder.adapters is not None:
            self.decoder.adapters.release(generation.slot)

    def _read(self) -> bool:
        step, generations = self._pending.popleft()
        codes, log_probs, active = step.result()
        is_running, has_failed = active.tolist(), False
        rows = zip(generations, codes.numpy(), log_probs.numpy(), is_running, strict=True)
        for generation, row_codes, row_log_probs, is_active in rows:
            if generation.finish_reason is not None:
                continue
            if not np.isfinite(row_log_probs).all():
                generation.error = SpeakError(
                    f"{generation.prompt.id}: the model's logits are not finite after {generation.frames} frames",
                    hint="check its weights with `myna verify`; fp16 may have overflowed: try another precision",
                )
                generation.cancel()
                has_failed = True
                continue
            generation._delayed.append(row_codes)
            generation._log_probs.append(row_log_probs)
            if not is_active:
                # All codebooks of the last frame are ends; the cap is at the frame after the last one allowed.
                ended = len(generation._delayed) - codes.shape[1]
                generation.finish_reason = "stop" if ended < generation.max_frames else "length"
        return has_failed or not all(is_running)


def request_sampling(sampling: Sampling, id: str) -> Sampling:
    """Return the sampling settings with the seed of one random stream, which does not depend on the batch."""
    digest = hashlib.blake2b(f"{sampling.seed}/{id}".encode(), digest_size=7).digest()
    return replace(sampling, seed=int.from_bytes(digest, "big"))
