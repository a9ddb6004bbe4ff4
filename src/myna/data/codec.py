"""Encoder and codec protocols: what the code store needs of a model family's audio front end."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]
"""Mono audio in [-1, 1] at the codec's sample rate, shape (samples,)."""

Codes = npt.NDArray[np.uint16]
"""Encoded audio of one utterance, shape (frames, codebooks): codec tokens, or input features as 16-bit words."""

EncodedBatch = tuple[list[int], list[Codes]]
"""Codes of some clips, and the clips' positions among all that were given."""

PendingSamples = Callable[[], list[Samples]]
"""Function that waits for samples that are being decoded: those of each window, in the order of the windows."""

NotifyCallback = Callable[[str], None]
"""Function called with a sentence for the user."""


class Encoder(Protocol):
    """Audio encoder: waveform to codes.

    `encode` takes clips of *equal* length stacked as (clips, samples), a multiple of `hop` samples: convolutions that
    look both ways would let padding corrupt the codes, so nothing is ever padded.
    """

    @property
    def revision(self) -> str:
        """Hash of configuration and weights: equal revisions give equal codes."""

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
        """Encode (clips, samples) to (clips, frames, codebooks)."""

    def encode_batches(
        self, clips: Sequence[Samples], batch_seconds: float, notify: NotifyCallback, /
    ) -> Iterator[EncodedBatch]:
        """Encode clips of any lengths, in whole frames, in batches of about `batch_seconds`, in any order.

        The batches follow from the clips alone, so that the same clips always give the same codes. The plain
        implementation is `encode_equal_lengths`.
        """


class Codec(Encoder, Protocol):
    @property
    def decode_reach(self) -> int:
        """Frames on either side of a frame that its samples depend on."""

    @property
    def window_independent(self) -> bool:
        """Whether a frame's samples are the same, bit for bit, in all windows that hold its reach."""

    def decode(self, codes: Codes) -> Samples:
        """Decode (frames, codebooks) to (frames * hop,) samples."""

    def decode_windows(self, windows: Sequence[Codes], /) -> PendingSamples:
        """Start decoding windows of any lengths, each as if it were a whole clip.

        A window's samples depend on that window alone, bit for bit, whatever else is in the call.
        """


def encode_equal_lengths(codec: Encoder, clips: Sequence[Samples], batch_seconds: float) -> Iterator[EncodedBatch]:
    """Encode clips of equal length together, longest first, through `encode`."""
    by_frames: defaultdict[int, list[int]] = defaultdict(list)
    for position, clip in enumerate(clips):
        by_frames[len(clip) // codec.hop].append(position)
    for frames, positions in sorted(by_frames.items(), reverse=True):
        size = max(1, int(batch_seconds * codec.frame_rate / frames))
        for start in range(0, len(positions), size):
            batch = positions[start : start + size]
            codes = codec.encode(np.stack([clips[position] for position in batch]))
            assert codes.shape == (len(batch), frames, codec.codebooks) and codes.dtype == np.uint16
            yield batch, list(codes)
