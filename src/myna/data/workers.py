"""Worker processes that build batches, so that the training process does not share the GIL with them.

Each is a fresh interpreter that sees no GPU. It is sent the batch builders once, and then a plan at a time; batches
come back through a socket, their arrays out of band. Nothing is left on disk or in shared memory, and a worker ends
when the other end of its socket is closed, however the process there has ended. docs/decisions/0013 has the figures
beside those of torch's DataLoader.
"""

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

from myna.core.errors import DataError, MynaError

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
EXIT_SECONDS = 5.0
"""Seconds from the end of a worker's socket to its exit code."""
SIZE = struct.Struct("<Q")


class WorkerPool:
    """Pool of `number` processes, each of which holds all `builders`. They start at once and import what those need."""

    def __init__(self, number: int, builders: Sequence[Callable[[Any], Any]]) -> None:
        message = _pickle(list(builders))
        self._workers = [_Worker() for _ in range(number)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            worker.send(message)
            self._idle.put(worker)

    def build(self, builder: int, plan: Any) -> Any:
        """Return or raise what `builders[builder](plan)` does, in an idle worker, while this thread waits."""
        worker = self._idle.get()
        try:
            return worker.request((builder, plan))
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()


class _Worker:
    """One worker process, as the training process sees it."""

    def __init__(self) -> None:
        self._socket, child_socket = socket.socketpair()
        with child_socket:
            fd = child_socket.fileno()
            # This process's path, since builders may come from modules that are not installed.
            code = f"import sys; sys.path[:] = {sys.path!r}; from myna.data import workers; workers.worker_main({fd})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to the training process
                env=os.environ | ENVIRONMENT,
                start_new_session=True,  # Ctrl-C is for the training process, which may still finish its step
            )

    def send(self, parts: Sequence[Any]) -> None:
        with self._death_reported():
            _send(self._socket, parts)

    def request(self, message: Any) -> Any:
        with self._death_reported():
            _send(self._socket, _pickle(message))
            result, error = _unpickle(_receive(self._socket))
        if error is not None:
            raise error
        return result

    def kill(self) -> None:
        with suppress(OSError):  # it may be closed already
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
        self._socket.close()
        self._process.kill()
        self._process.wait()

    @contextmanager
    def _death_reported(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_SECONDS)
            self.kill()
            code = self._process.returncode
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            raise DataError(
                f"worker process {self._process.pid}, which built batches, {how}",
                hint="--set data.workers=0 builds them in the training process; fewer workers take less memory",
            ) from error


def worker_main(fd: int) -> None:
    """Main loop of a worker process: builds a batch from each plan until the socket is closed."""
    with socket.socket(fileno=fd) as trainer, suppress(EOFError, ConnectionError):
        builders, load_error = _try(_unpickle, _receive(trainer))
        # Searching imported modules for garbage would take longer than building a batch.
        gc.freeze()
        while True:
            builder, plan = _unpickle(_receive(trainer))
            result, error = _try(builders[builder], plan) if load_error is None else (None, load_error)
            # A result that cannot be pickled is an error too.
            parts, error = _try(_pickle, (result, error))
            _send(trainer, parts if error is None else _pickle((None, error)))


def _try(function: Callable[[Any], Any], argument: Any) -> tuple[Any, Exception | None]:
    """Return the result, or an error that can be pickled."""
    try:
        return function(argument), None
    except MynaError as error:
        return None, error
    except Exception as error:  # noqa: BLE001 - it is raised again in the training process
        error.add_note(f"in a worker process:\n{traceback.format_exc()}")
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - whatever is wrong with it, its text can be sent
            return None, RuntimeError(traceback.format_exc())
        return None, error


def _pickle(value: Any) -> list[Any]:
    """Return the parts of a message: a pickle, and its arrays out of band, which are not copied into it."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return [data, *(buffer.raw() for buffer in buffers)]


def _unpickle(parts: Sequence[Any]) -> Any:
    return pickle.loads(parts[0], buffers=parts[1:])


def _send(to: socket.socket, parts: Sequence[Any]) -> None:
    to.sendall(b"".join(map(SIZE.pack, [len(parts), *map(len, parts)])))
    for part in parts:
        to.sendall(part)


def _receive(source: socket.socket) -> list[Any]:
    def read(size: int) -> Any:
        # Usually in one call, in which the kernel fills the array without the GIL.
        array = np.empty(size, np.uint8)
        remaining = array.data
        while remaining:
            count = source.recv_into(remaining, 0, socket.MSG_WAITALL)
            if not count:
                raise EOFError("the socket is closed")
            remaining = remaining[count:]
        return array

    [count] = SIZE.unpack(read(SIZE.size))
    return [read(size) for size in np.frombuffer(read(count * SIZE.size), np.uint64).tolist()]
