"""What the code store needs of a codec. The codecs themselves live with the model families that use them."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]
"""Mono audio in [-1, 1] at the codec's sample rate, shape (samples,)."""

Codes = npt.NDArray[np.uint16]
"""Codec tokens of one clip, shape (frames, codebooks)."""


class Codec(Protocol):
    """Turns clips into codes and back.

    `encode` takes clips of *equal* length stacked as (clips, samples), a multiple of `hop` samples: convolutions that
    look both ways would let padding corrupt the codes, so nothing is ever padded.
    """

    @property
    def revision(self) -> str:
        """A hash over the codec's configuration and weights: equal revisions give equal codes."""

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

    def decode(self, codes: Codes) -> Samples:
        """(frames, codebooks) -> (frames * hop,)."""
