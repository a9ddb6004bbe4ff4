"""Encoder of references: a thread beside the steps, and the codes of the last recordings."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import nullcontext
from queue import SimpleQueue
from threading import Thread

import torch

from myna.audio.files import Samples
from myna.core.errors import SpeakError
from myna.data.codec import Codec
from myna.data.conversation import AudioClip
from myna.speak.engine import encode_clip

MAX_CACHED_REFERENCES = 256
"""Encoded references that are kept: those of the voices, and of clients that send theirs with every request."""


class ReferenceEncoder:
    """Encodes recordings in the order in which they come, while the batch goes on; on a GPU in a stream of its own. A
    recording that is known, or being encoded, is not encoded again."""

    def __init__(self, codec: Codec, device: torch.device, *, single_thread: bool) -> None:
        self._codec, self._device, self._single_thread = codec, device, single_thread
        self._clips: OrderedDict[bytes, Future[AudioClip]] = OrderedDict()
        self._queue: SimpleQueue[tuple[Future[AudioClip], str, Samples]] = SimpleQueue()
        Thread(target=self._run, name="reference encoder", daemon=True).start()

    def encode(self, samples: Samples) -> Future[AudioClip]:
        """The codes of a recording, once they are there. To be called from one thread."""
        if len(samples) < self._codec.hop:
            raise SpeakError("a reference is shorter than one frame", hint="give a few seconds of the voice")
        key = hashlib.blake2b(samples.tobytes(), digest_size=16).digest()
        clip = self._clips.get(key)
        if clip is None or clip.cancelled() or (clip.done() and clip.exception() is not None):
            clip = self._clips[key] = Future()
            self._queue.put((clip, key.hex(), samples))
            if len(self._clips) > MAX_CACHED_REFERENCES:
                self._clips.popitem(last=False)
        self._clips.move_to_end(key)
        return clip

    def _run(self) -> None:
        if self._single_thread:
            torch.set_num_threads(1)
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        while True:
            clip, id, samples = self._queue.get()
            if not clip.set_running_or_notify_cancel():
                continue
            try:
                with torch.cuda.stream(stream) if stream is not None else nullcontext():
                    codes = encode_clip(self._codec, samples)
            except Exception as error:  # noqa: BLE001 - raised where the result is asked for
                clip.set_exception(error)
            else:
                clip.set_result(AudioClip(id, codes))
            del clip, samples  # not kept until the next comes
