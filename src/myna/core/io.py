"""Files: written complete or not at all, never over foreign data; locks, hashes, and the folders of the user."""

import difflib
import errno
import glob
import hashlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Literal

from myna.core.errors import OutputError

HOME_VARIABLE = "MYNA_HOME"
"""Environment variable with one folder for all user files, in place of the folders of the system."""
DISK_ERROR_HINTS = {
    errno.ENOSPC: "make room on that disk, and give the same command again",
    getattr(errno, "EDQUOT", errno.ENOSPC): "make room within your quota, and give the same command again",
    errno.EFBIG: "files there may not be that large: raise `ulimit -f`, or choose another place",
    errno.EROFS: "choose a place that can be written to",
    errno.EACCES: "choose a place that you may use, or change its permissions",
    errno.EPERM: "choose a place that you may use, or change its permissions",
    errno.EEXIST: "there is a file where a folder is needed: choose another place",
    errno.ENOTDIR: "there is a file where a folder is needed: choose another place",
    errno.EISDIR: "there is a folder where a file is needed: choose another name",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EIO: "the disk does not answer as it should: check it, or choose another place",
}
"""Hints for errors of disks and permissions, by `OSError.errno`. Other numbers are bugs."""
FREE_BYTES = 1 << 20
"""Minimum free bytes for an output."""
TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{12}\.tmp")
"""Name of a file that is being written. A killed process may leave one behind; `lock_folder` removes it."""
LOCK_FILE = ".lock"
"""Lock file in an output folder, or in the temporary folder of a process."""
MARKER_FILE = ".myna"
"""File in an output folder with the kind of its contents."""


def disk_error(error: OSError) -> OutputError | None:
    """Return an error of a disk or of permissions with its hint; None for any other error."""
    hint = DISK_ERROR_HINTS.get(error.errno or 0)
    name = f"{error.filename}: " if error.filename else ""
    return OutputError(f"{name}{os.strerror(error.errno or 0)}", hint=hint) if hint else None


@contextmanager
def report_disk_errors() -> Iterator[None]:
    """Raise errors of a disk or of permissions as `OutputError`s."""
    try:
        yield
    except OSError as error:
        raise disk_error(error) or error from error


def check_output_file(path: Path, *, inputs: Iterable[Path] = (), force: bool = False) -> None:
    """Refuse, before any work is done, an output file that would replace an input or (without `force`) any other file,
    and a place that cannot be written to."""
    _check_no_input(path, inputs)
    if path.is_dir():
        raise OutputError(f"{path} is a folder", hint=f"name a file: {path / 'NAME'}")
    if not force and os.path.lexists(path):
        raise OutputError(f"{path} exists", hint="choose another name, or replace it with --force (force=True)")
    check_writable(path.parent)


def claim_folder(
    folder: Path, kind: str, *, known: Iterable[str] = (), inputs: Iterable[Path] = (), force: bool = False
) -> None:
    """Make an output folder and write its marker file. A folder with other contents is refused unless `force` is given;
    an input is always refused. A folder without a marker is accepted if it has a file of the `known` names."""
    _check_no_input(folder, inputs)
    marker = folder / MARKER_FILE
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file", hint="choose another folder with --out")
    if not force and folder.is_dir() and not is_unused(folder):
        is_ours = marker.read_text(encoding="utf-8").strip() == kind if marker.is_file() else False
        if not is_ours and not any((folder / name).exists() for name in known):
            raise OutputError(
                f"{folder} is not empty, and holds no {kind}",
                hint="choose another folder with --out, or write into that one with --force (force=True)",
            )
    check_writable(folder)
    save_text(marker, f"{kind}\n")


def is_unused(folder: Path, known: Iterable[str] = ()) -> bool:
    """Whether a folder holds only files of the `known` names and half-written files of killed processes."""
    names = {entry.name for entry in folder.iterdir()}.difference(known)
    return all(TEMPORARY_NAME.fullmatch(name) for name in names)


def check_new_folder(folder: Path) -> None:
    """Refuse a folder that is not empty, and a place that cannot be written to."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} exists and is not empty", hint="name a new folder, or remove that one first")
    check_writable(folder)


def _check_no_input(path: Path, inputs: Iterable[Path]) -> None:
    for one in inputs:
        if path.resolve() == one.resolve() or (path.exists() and one.exists() and path.samefile(one)):
            raise OutputError(f"{path} is an input, which is never replaced", hint="choose another name with --out")


def check_writable(folder: Path) -> None:
    """Refuse, before any work is done, an output folder that cannot be made or written to."""
    try:
        existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(FREE_BYTES))
    except OSError as error:
        hint = DISK_ERROR_HINTS.get(error.errno or 0, DISK_ERROR_HINTS[errno.EROFS])
        raise OutputError(f"cannot write to {folder}: {error.strerror}", hint=hint) from None


@contextmanager
def _named_errors(path: Path, temporary: Path) -> Iterator[None]:
    """Make errors of a disk name the output file, instead of the temporary one or none."""
    try:
        yield
    except OSError as error:
        is_ours = error.filename is None or str(temporary) in f"{error.filename} {error.filename2}"
        if error.errno is not None and is_ours:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    except Exception as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):  # raised by a library in Rust
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary file to write to; it then appears as `path` complete, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex[:12]}.tmp")
    try:
        with _named_errors(path, temporary):
            yield temporary
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save_text(path: Path, text: str) -> None:
    """Write a UTF-8 file complete or not at all."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder to write to; it then appears as `folder` complete, or not at all.

    An existing folder that is not empty is refused, or with `replace` replaced. Temporary folders left by killed
    processes are removed.
    """
    if not replace:
        check_new_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for file in folder.parent.glob(f".{glob.escape(folder.name)}.*/{LOCK_FILE}"):
        with suppress(_LockHeldError), acquire_lock(file, _LockHeldError):
            shutil.rmtree(file.parent, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch,
        acquire_lock(Path(scratch, LOCK_FILE)),
    ):
        written = Path(scratch, "new")
        written.mkdir()
        with _named_errors(folder, written):
            yield written
        try:
            if folder.exists():
                folder.rename(Path(scratch, "old")) if replace else folder.rmdir()
            written.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise OutputError(
                f"{folder} was written by another process in the meantime", hint="name a new folder for this one"
            ) from None


@contextmanager
def lock_folder(folder: Path, activity: str) -> Iterator[None]:
    """Hold an output folder, for one process at a time; `activity` says what it does, such as `speaking into`. Files
    that killed processes left half-written in it are removed."""
    hint = "wait for it, or choose another --out"
    with acquire_lock(folder / LOCK_FILE, lambda: OutputError(f"another process is {activity} {folder}", hint=hint)):
        remove_temporary_files(folder)
        yield


def acquire_lock(file: Path, held: Callable[[], Exception] | None = None) -> AbstractContextManager[object]:
    """Take a lock file until the context ends; the operating system releases it with the process, however that ends.
    If another process holds the lock, wait for it, or raise the error that `held` makes."""
    from filelock import FileLock, Timeout

    try:
        return FileLock(file).acquire(blocking=held is None)
    except Timeout:
        assert held is not None, "waiting has no time limit"
        raise held() from None


class _LockHeldError(Exception):
    """Error: the temporary folder belongs to a process that is still running."""


def remove_temporary_files(folder: Path) -> None:
    """Remove half-written files of killed processes from a folder that no other process writes to."""
    for file in folder.rglob(".*.tmp"):
        if TEMPORARY_NAME.fullmatch(file.name):
            file.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Flush a file or folder to the disk. A file's name survives a power failure only after its folder was flushed."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def bytes_hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def string_hash(text: str) -> int:
    """64-bit blake2b hash of a string."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def safe_file_name(name: str) -> str:
    """Return a name that any file system accepts. A hash keeps names apart that would become equal."""
    plain = re.sub(r"[^\w.-]+", "_", name).strip("._")[:80]
    return plain if plain == name else f"{plain}-{bytes_hash(name.encode())[:8]}"


def file_hash(path: Path) -> str:
    """Return the blake2b-128 hash of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def similar_path(path: Path) -> Path | None:
    """Return the existing path that is most like one that does not exist, for "did you mean"."""
    with suppress(OSError):
        folder = path.parent if path.parent.is_dir() else similar_path(path.parent)
        if folder is not None:
            names = [one.name for one in folder.iterdir()]
            found = [path.name] if path.name in names else difflib.get_close_matches(path.name, names, n=1)
            return folder / found[0] if found else None
    return None


def is_file(path: Path) -> bool:
    """Whether a path is a file; False also for a string that cannot be a path, such as ten thousand characters."""
    try:
        return path.is_file()
    except OSError:
        return False


def absolute_folder(source: str) -> str:
    """Return the absolute path of a folder, for another working directory; any other name as it is."""
    return str(Path(source).absolute()) if Path(source).is_dir() else source


def sniff_suffix(data: bytes) -> str:
    """Return the suffix of encoded audio by its first bytes; `.bin` if unknown."""
    head = data[:64]
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return ".wav"
    if head[:4] == b"fLaC":
        return ".flac"
    if head[:4] == b"OggS":
        return ".opus" if b"OpusHead" in head else ".ogg"
    if head[:3] == b"ID3" or (len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0):
        return ".mp3"
    if head[4:8] == b"ftyp":
        return ".m4a"
    if head[:4] == b"FORM":
        return ".aiff"
    return ".bin"


DEFAULT_SPEAKER_ENCODER = "ecapa"
"""Speaker encoder of curation, evaluation and consent checks, so that their similarities have one scale."""
ECAPA_FILE = "ecapa.safetensors"


def user_folder(kind: Literal["cache", "config", "data", "state"]) -> Path:
    """Return the user's folder for downloads (`cache`), keys (`config`), voices (`data`) or the speech log (`state`).

    It may not exist.
    """
    if home := os.environ.get(HOME_VARIABLE):
        return Path(home).expanduser()
    import platformdirs

    folders = {
        "cache": platformdirs.user_cache_path,
        "config": platformdirs.user_config_path,
        "data": platformdirs.user_data_path,
        "state": platformdirs.user_state_path,
    }
    return folders[kind]("myna", appauthor=False)


def curation_models_folder() -> Path:
    """Return the folder of the models that curation listens with, made by `myna setup curation`."""
    return user_folder("cache") / "curation"


def whisper_folder() -> Path:
    """Return the folder of Whisper base, made by `myna setup metrics`."""
    return user_folder("cache") / "whisper-base"


def ecapa_file() -> Path:
    """Return the weights of the default speaker encoder, made by `myna setup metrics` or `myna setup curation`."""
    own = user_folder("cache") / "ecapa" / ECAPA_FILE
    return own if own.is_file() or not (curation := curation_models_folder() / ECAPA_FILE).is_file() else curation


def private_file(path: Path, content: bytes) -> bytes:
    """Write a file that only its user may read, unless it exists; return its content. Processes and threads that make
    it at the same time get the same content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        try:
            os.link(temporary, path)  # fails if it exists: the first one stays
        except FileExistsError:
            pass
        except OSError:  # exFAT and SMB have no hard links
            with acquire_lock(path.with_name(f".{path.name}.lock")):
                if not path.is_file():
                    temporary.replace(path)
        return path.read_bytes()
    finally:
        temporary.unlink(missing_ok=True)
