"""What the code store needs of an encoder. Codecs and features live with the model families that use them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]
"""Mono audio in [-1, 1] at the codec's sample rate, shape (samples,)."""

Codes = npt.NDArray[np.uint16]
"""What a model knows of one clip, shape (frames, codebooks): codec tokens, or the features that it hears."""

Encoded = tuple[list[int], list[Codes]]
"""The codes of some clips, and their places among all that were given."""

Say = Callable[[str], None]
"""Told what a person should know."""


class Encoder(Protocol):
    """Turns clips into codes.

    `encode` takes clips of *equal* length stacked as (clips, samples), a multiple of `hop` samples: convolutions that
    look both ways would let padding corrupt the codes, so nothing is ever padded.
    """

    @property
    def revision(self) -> str:
        """A hash over configuration and weights: equal revisions give equal codes."""

    @property
    def sample_rate(self) -> int: ...

    @property
    def hop(self) -> int:
        """Samples per frame."""

    @property
    def codebooks(self) -> int: ...

    @property
    def codebook_size(self) -> int: ...

    @property
    def frame_rate(self) -> float:
        """Frames per second: `sample_rate / hop`."""

    def encode(self, clips: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
        """(clips, samples) -> (clips, frames, codebooks)."""

    def encode_all(self, clips: Sequence[Samples], batch_seconds: float, say: Say) -> Iterator[Encoded]:
        """Clips of any lengths, in whole frames, a batch of about so many seconds at a time, in any order.

        The batches follow from the clips alone, so that the same clips always give the same codes. Where there is no
        faster way, this is `by_equal_lengths`.
        """


class Codec(Encoder, Protocol):
    """Turns clips into codes and back: what a model speaks through."""

    def decode(self, codes: Codes) -> Samples:
        """(frames, codebooks) -> (frames * hop,)."""


def by_equal_lengths(codec: Encoder, clips: Sequence[Samples], batch_seconds: float) -> Iterator[Encoded]:
    """Equal lengths together, longest first, through `encode`."""
    of_length: defaultdict[int, list[int]] = defaultdict(list)
    for place, clip in enumerate(clips):
        of_length[len(clip) // codec.hop].append(place)
    for frames, places in sorted(of_length.items(), reverse=True):
        size = max(1, int(batch_seconds * codec.frame_rate / frames))
        for start in range(0, len(places), size):
            batch = places[start : start + size]
            codes = codec.encode(np.stack([clips[place] for place in batch]))
            assert codes.shape == (len(batch), frames, codec.codebooks) and codes.dtype == np.uint16
            yield batch, list(codes)
