"""Playback of speech as it is generated, through a player that is installed."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from myna.audio.files import Samples, pcm16, write_audio
from myna.core.errors import SpeakError

PIPE_PLAYERS = {
    "ffplay": "-nodisp -autoexit -loglevel error -f s16le -sample_rate {rate} -i pipe:0",
    "aplay": "-q -t raw -f S16_LE -c 1 -r {rate} -",
}
"""Players that read raw audio from a pipe, with their arguments."""
FILE_PLAYERS = ("afplay",)
"""Players that need a whole file."""


def find_player() -> str:
    """Return the name of the first player that is installed."""
    for name in (*PIPE_PLAYERS, *FILE_PLAYERS):
        if shutil.which(name):
            return name
    raise SpeakError(
        f"no player is installed: none of {', '.join((*PIPE_PLAYERS, *FILE_PLAYERS))} is there",
        hint="install ffmpeg, which has ffplay (apt install ffmpeg, brew install ffmpeg, winget install ffmpeg); or "
        "write a file with --out",
    )


@contextmanager
def open_player(sample_rate: int) -> Iterator[Callable[[Samples], None]]:
    """Open a player. The function plays samples, and returns once they are taken; the end waits for the last sound."""
    name = find_player()
    if name in FILE_PLAYERS:
        pieces: list[Samples] = []
        yield pieces.append
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "speech.wav")
            write_audio(file, np.concatenate(pieces), sample_rate)
            _check(name, subprocess.run([name, str(file)], check=False).returncode)
        return
    command = [name, *PIPE_PLAYERS[name].format(rate=sample_rate).split()]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    pipe = process.stdin
    assert pipe is not None

    def play(samples: Samples) -> None:
        try:
            pipe.write(pcm16(samples))
            pipe.flush()
        except BrokenPipeError:
            _check(name, process.wait() or 1)

    try:
        yield play
        pipe.close()
        _check(name, process.wait())
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextmanager
def open_standard_output() -> Iterator[Callable[[Samples], None]]:
    """Open standard output for raw 16-bit audio. If its reader ends, this process ends quietly, as others in a pipe
    do."""

    def write(samples: Samples) -> None:
        sys.stdout.buffer.write(pcm16(samples))
        sys.stdout.buffer.flush()

    try:
        yield write
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to fail at exit
        sys.exit(0)


def _check(name: str, code: int) -> None:
    if code:
        raise SpeakError(f"{name} ended with code {code}", hint="see what it says above, or write a file with --out")
