"""Processes that make batches, so that whoever trains need not share Python's lock with them.

Each is a fresh interpreter that sees no card. It is sent what makes batches, once, and then plans, one by one; back
come arrays as they lie in memory, through a socket. Nothing is left on disk or in shared memory, and a worker goes when
the other end of its socket is closed, however the process there has ended.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

import numpy as np

from myna.errors import DataError, MynaError

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Of a worker, which has one thread and nothing to do with a card."""
LAST_BREATH = 5.0
"""Seconds that a process has from closing its socket to its exit code."""
NUMBER = struct.Struct("<Q")

Make = Callable[[Any], Any]


class Workers:
    """So many processes, each of which can do what `makes` do. They start at once, and are ready when they have
    imported what those need."""

    def __init__(self, number: int, makes: Sequence[Make]) -> None:
        sent = _packed(list(makes))
        self._all = [_Worker() for _ in range(number)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._all:
            worker.tell(sent)
            self._idle.put(worker)

    def make(self, which: int, order: Any) -> Any:
        """What `makes[which](order)` returns or raises. Whoever is free does it, while this thread waits."""
        worker = self._idle.get()
        try:
            return worker.ask((which, order))
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """None is asked to finish: they hold nothing that would have to be put away."""
        for worker in self._all:
            worker.end()


class _Worker:
    """One process, seen from outside."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            # With our path, since not only installed modules are sent.
            code = f"import sys; sys.path[:] = {sys.path!r}; from myna.data.workers import serve; serve({number})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=2,  # What they say is no result of ours.
                env=os.environ | ENVIRONMENT,
                start_new_session=True,  # Ctrl-C is for whoever trains, and may still want to finish a step.
            )

    def tell(self, parts: Sequence[Any]) -> None:
        with self._alive():
            _send(self._socket, parts)

    def ask(self, order: Any) -> Any:
        with self._alive():
            _send(self._socket, _packed(order))
            made, error = _unpacked(_receive(self._socket))
        if error is not None:
            raise error
        return made

    def end(self) -> None:
        with suppress(OSError):  # where it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)  # a thread that waits for an answer shall not wait for ever
        self._socket.close()
        self._process.kill()
        self._process.wait()

    @contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LAST_BREATH)
            self.end()
            code = self._process.returncode
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            raise DataError(
                f"process {self._process.pid}, which made batches, {how}",
                hint="--set data.workers=0 makes them in the training itself; fewer workers take less memory",
            ) from error


# The other side


def serve(number: int) -> None:
    """The life of a worker: batches out of orders, until nobody asks any more."""
    with socket.socket(fileno=number) as trainer, suppress(EOFError, ConnectionError):
        makes, unmade = _tried(_unpacked, _receive(trainer))
        # What is there by now stays. To look through it for garbage would take longer than making a batch.
        gc.freeze()
        while True:
            which, order = _unpacked(_receive(trainer))
            made, error = _tried(makes[which], order) if unmade is None else (None, unmade)
            # An answer that cannot travel is an error too.
            parts, error = _tried(_packed, (made, error))
            _send(trainer, parts if error is None else _packed((None, error)))


def _tried(work: Callable[[Any], Any], given: Any) -> tuple[Any, Exception | None]:
    """What came of it, or an error that can travel."""
    try:
        return work(given), None
    except MynaError as error:
        return None, error
    except Exception as error:  # noqa: BLE001 - it is raised again where somebody waits for it
        error.add_note(f"in a process that makes batches:\n{traceback.format_exc()}")
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - whatever is wrong with it, its words are not
            return None, RuntimeError(traceback.format_exc())
        return None, error


# What travels: a pickle, and the arrays it speaks of beside it, which are not copied into it


def _packed(value: Any) -> list[Any]:
    arrays: list[pickle.PickleBuffer] = []
    whole = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    return [whole, *(array.raw() for array in arrays)]


def _unpacked(parts: Sequence[Any]) -> Any:
    return pickle.loads(parts[0], buffers=parts[1:])


def _send(to: socket.socket, parts: Sequence[Any]) -> None:
    sizes = [len(parts), *map(len, parts)]
    to.sendall(b"".join(map(NUMBER.pack, sizes)))
    for part in parts:
        to.sendall(part)


def _receive(source: socket.socket) -> list[Any]:
    [count] = NUMBER.unpack(_read(source, NUMBER.size))
    sizes = np.frombuffer(_read(source, count * NUMBER.size), np.uint64)
    return [_read(source, size) for size in sizes.tolist()]


def _read(source: socket.socket, size: int) -> Any:
    """So many bytes, in one call as a rule: the kernel fills the array while Python does something else."""
    whole = np.empty(size, np.uint8)
    left = whole.data
    while left:
        read = source.recv_into(left, 0, socket.MSG_WAITALL)
        if not read:
            raise EOFError("nobody is there any more")
        left = left[read:]
    return whole
