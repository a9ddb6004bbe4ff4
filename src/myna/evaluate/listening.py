"""Blind listening: trials, answers of listeners on disk, their statistics, and the server of the page.

FOLDER/preferences/LISTENER.json   a file for each listener, so that answers are never overwritten by another listener's
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from myna.audio.files import Samples
from myna.core.errors import ConfigError, DataError, MynaError
from myna.core.io import atomic_write, bytes_hash, string_hash
from myna.core.statistics import percentile_interval, share_interval, sign_test, two_way_shares
from myna.evaluate.pipeline import load_audio
from myna.evaluate.scoring import ItemScores

FORMAT = "myna-preferences-1"
TIE = "tie"
MAX_TEXT_LENGTH = 200
"""Characters of a listener's name; ids are shorter still."""
ID_LENGTH = 16
"""Hex digits of ids that do not reveal the system."""
HOST = "127.0.0.1"
MAX_POST_BYTES = 4_000_000
PostHandler = Callable[[bytes], None]
"""Callback that takes the body of a POST, or raises a `MynaError` that says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class ComparedSystem:
    """System with the scores of its items and the folder of its audio."""

    name: str
    rows: Sequence[ItemScores]
    folder: Path
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    """Content of the folder's evaluation.json, for a system that was evaluated before."""

    def load_audio(self, item: str, sample_rate: int) -> Samples:
        """Load the audio of an item."""
        row = next(row for row in self.rows if row.id == item)
        return load_audio(row, self.folder, sample_rate)


@dataclass(frozen=True, slots=True)
class ListeningTrial:
    """Two sounds of one item. Ids of sounds reveal nothing; `systems` says which system made which."""

    id: str
    item: str
    text: str
    sounds: tuple[str, str]
    """Ids of the sounds, in the order in which they are offered."""
    systems: tuple[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        (first, second), systems = row["sounds"], row["systems"]
        return cls(row["id"], row["item"], row["text"], (first, second), (systems[0], systems[1]))


@dataclass(frozen=True, slots=True)
class ListenerAnswers:
    """Answers of one listener."""

    id: str
    name: str
    answers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Id of the preferred sound, or `tie`, and time of the answer, by trial."""

    def to_json(self) -> dict[str, Any]:
        answers = {trial: {"choice": choice, "at": at} for trial, (choice, at) in sorted(self.answers.items())}
        return {"format": FORMAT, "listener": {"id": self.id, "name": self.name}, "answers": answers}

    def merged_with(self, other: Self) -> Self:
        """Merge with later answers of this listener; of two answers to one trial the later counts."""
        answers = dict(self.answers)
        for trial, (choice, at) in other.answers.items():
            if trial not in answers or at >= answers[trial][1]:
                answers[trial] = (choice, at)
        return replace(self, name=other.name or self.name, answers=answers)


def listening_trials(
    systems: Sequence[ComparedSystem], seed: int, limit: int
) -> tuple[list[ListeningTrial], dict[tuple[str, str], int]]:
    """Pair every two systems on some of the items, in an order that follows from the seed, each system first equally
    often; also return how many items of a pair are identical audio."""
    rows = {system.name: {row.id: row for row in system.rows} for system in systems}
    ids = sorted(rows[systems[0].name], key=lambda id: string_hash(f"{seed}/listen/{id}"))
    trials: list[ListeningTrial] = []
    identical: dict[tuple[str, str], int] = {}
    for first, second in itertools.combinations(rows, 2):
        differing = [id for id in ids if rows[first][id].audio_hash != rows[second][id].audio_hash]
        if len(differing) < len(ids):
            identical[first, second] = len(ids) - len(differing)
        start = string_hash(f"{seed}/first/{first}/{second}") % 2
        for number, id in enumerate(differing[:limit]):
            pair = (first, second) if (number + start) % 2 == 0 else (second, first)
            sounds = (_sound_id(pair[0], rows[pair[0]][id]), _sound_id(pair[1], rows[pair[1]][id]))
            trial_id = bytes_hash(repr(sorted(sounds)).encode())[:ID_LENGTH]
            trials.append(ListeningTrial(trial_id, id, rows[first][id].text, sounds, pair))
    return sorted(trials, key=lambda trial: string_hash(f"{seed}/order/{trial.id}")), identical


def _sound_id(system: str, row: ItemScores) -> str:
    """Identify one system's audio of an item: two systems with identical audio have two ids."""
    return bytes_hash(repr((system, row.item_key, row.id, row.audio_hash)).encode())[:ID_LENGTH]


def parse_listener_answers(content: str | bytes, source: str) -> ListenerAnswers:
    """Parse the answers of one listener as the page saves them; `source` is for error messages."""
    hint = "give the file that the page of `myna compare` saved"
    try:
        row = json.loads(content)
        if row["format"] != FORMAT:
            raise DataError(f"{source} has the format {row['format']}, not {FORMAT}", hint=hint)
        id, name = row["listener"]["id"], row["listener"]["name"]
        answers = {trial: (answer["choice"], answer["at"]) for trial, answer in row["answers"].items()}
        texts = [id, name, *answers, *(text for answer in answers.values() for text in answer)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{source} holds no preferences: {type(error).__name__} {error}", hint=hint) from None
    if not all(isinstance(text, str) and len(text) <= MAX_TEXT_LENGTH for text in texts):
        raise DataError(f"{source} holds answers that are no short texts", hint=hint)
    if not re.fullmatch(r"[0-9a-z]{8,64}", id):
        raise DataError(f"{source} names a listener {id!r}, which is no id", hint=hint)
    return ListenerAnswers(id, name, answers)


def save_listener_answers(folder: Path, listener: ListenerAnswers) -> ListenerAnswers:
    """Merge answers into the folder of a comparison; earlier answers of the same listener are kept."""
    file = folder / "preferences" / f"{listener.id}.json"
    if file.is_file():
        listener = parse_listener_answers(file.read_bytes(), str(file)).merged_with(listener)
    with atomic_write(file) as temporary:
        temporary.write_text(json.dumps(listener.to_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return listener


def load_listener_answers(folder: Path) -> list[ListenerAnswers]:
    return [
        parse_listener_answers(file.read_bytes(), str(file)) for file in sorted((folder / "preferences").glob("*.json"))
    ]


@dataclass(frozen=True, slots=True, eq=False)
class PreferenceCount:
    """Numbers of answers that prefer each of two systems, or neither."""

    systems: tuple[str, str]
    answers: npt.NDArray[np.float64]
    """Numbers of answers that prefer the first, the second and neither, (items, listeners, 3)."""

    @property
    def wins(self) -> tuple[int, int]:
        first, second, _ = self.answers.sum(axis=(0, 1))
        return int(first), int(second)

    @property
    def ties(self) -> int:
        return int(self.answers[..., 2].sum())

    @property
    def decided(self) -> int:
        return sum(self.wins)

    @property
    def share(self) -> float | None:
        """Share of the first system among answers that prefer one."""
        return self.wins[0] / self.decided if self.decided else None

    @property
    def interval(self) -> tuple[float, float]:
        """Interval of that share, which allows for other items, other listeners and other answers."""
        low, high = share_interval(self.wins[0], self.decided)
        if not self.decided:
            return low, high
        drawn_low, drawn_high = percentile_interval(self._drawn_shares)
        return min(low, drawn_low), max(high, drawn_high)

    @property
    def p_value(self) -> float:
        """Two-sided p-value, without the ties: that of the sign test, or of items and listeners if it is higher."""
        if not self.decided:
            return 1.0
        drawn = self._drawn_shares
        return max(sign_test(*self.wins), min(1.0, 2 * min(float(np.mean(drawn <= 0.5)), float(np.mean(drawn >= 0.5)))))

    @property
    def _drawn_shares(self) -> npt.NDArray[np.float64]:
        return two_way_shares(self.answers[..., :2])

    @property
    def preferred(self) -> str | None:
        """System that the interval favors; None if it holds one half."""
        low, high = self.interval
        return self.systems[0] if low > 0.5 else self.systems[1] if high < 0.5 else None

    def to_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {
            "systems": list(self.systems),
            "wins": list(self.wins),
            "ties": self.ties,
            "share": self.share,
            "low": low,
            "high": high,
            "p": self.p_value,
            "preferred": self.preferred,
        }


@dataclass(frozen=True, slots=True)
class Preferences:
    """Sum of all listeners' answers."""

    pairs: list[PreferenceCount]
    items: list[tuple[str, PreferenceCount]]
    """Item and count for each item and pair that was answered."""
    listeners: list[tuple[str, int]]
    """Name of each listener, and number of the answers that count here."""
    not_counted: int = 0
    """Number of answers about sounds that this comparison does not have."""

    def to_json(self) -> dict[str, Any]:
        return {
            "listeners": [{"name": name, "answers": count} for name, count in self.listeners],
            "pairs": [pair.to_json() for pair in self.pairs],
            "items": [{"item": item, **count.to_json()} for item, count in self.items],
            "answers_not_counted": self.not_counted,
        }


def aggregate_preferences(
    trials: Sequence[ListeningTrial], listeners: Iterable[ListenerAnswers], order: Sequence[str]
) -> Preferences:
    """Count all answers. `order` says which of two systems comes first, however they were offered."""
    by_id = {trial.id: trial for trial in trials}
    pair_of = {}
    for trial in trials:
        one, other = sorted(trial.systems, key=order.index)
        pair_of[trial.id] = (one, other)
    listeners = list(listeners)
    items = {item: place for place, item in enumerate(sorted({trial.item for trial in trials}))}
    by_pair = {pair: np.zeros((len(items), len(listeners), 3)) for pair in pair_of.values()}
    counted, not_counted = [], 0
    for number, listener in enumerate(listeners):
        valid = 0
        for id, (choice, _) in listener.answers.items():
            if id not in by_id or choice not in (*by_id[id].sounds, TIE):
                not_counted += 1
                continue
            valid += 1
            trial, pair = by_id[id], pair_of[id]
            outcome = 2 if choice == TIE else pair.index(trial.systems[trial.sounds.index(choice)])
            by_pair[pair][items[trial.item], number, outcome] += 1
        counted.append((listener.name or listener.id, valid))
    pairs = [PreferenceCount(pair, answers) for pair, answers in by_pair.items()]
    of_items = [
        (item, PreferenceCount(pair.systems, pair.answers[[place]]))
        for item, place in items.items()
        for pair in sorted(pairs, key=lambda pair: pair.systems)
        if pair.answers[place].any()
    ]
    return Preferences(pairs, of_items, counted, not_counted)


def local_page_server(page: bytes, post_path: str, on_post: PostHandler, port: int) -> ThreadingHTTPServer:
    """Serve `page` at / and pass what is posted to /`post_path` to `on_post`, one at a time. Port 0 is any free one."""
    lock = Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self._is_local():
                return
            if self.path != "/":
                self._respond(HTTPStatus.NOT_FOUND, b"there is one page here: /")
                return
            self._respond(HTTPStatus.OK, page, "text/html; charset=utf-8")

        def do_POST(self) -> None:
            if not self._is_local():
                return
            if self.path != f"/{post_path}":
                self._respond(HTTPStatus.NOT_FOUND, f"answers go to /{post_path}".encode())
                return
            # Other sites can make a browser send forms and plain text, but not JSON without a CORS preflight.
            if self.headers.get_content_type() != "application/json":
                self._respond(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, b"answers are sent as application/json")
                return
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or int(length) > MAX_POST_BYTES:
                self._respond(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_POST_BYTES} bytes are taken".encode())
                return
            content = self.rfile.read(int(length))
            try:
                with lock:
                    on_post(content)
            except MynaError as error:
                self._respond(HTTPStatus.BAD_REQUEST, str(error).encode())
                return
            self._respond(HTTPStatus.OK, b"saved")

        def _is_local(self) -> bool:
            """Whether host and origin are this machine: another site's name that resolves here is DNS rebinding."""
            if self.headers.get("Host") in self._hosts():
                origin = self.headers.get("Origin")
                if origin is None or origin.removeprefix("http://") in self._hosts():
                    return True
            self._respond(HTTPStatus.FORBIDDEN, b"this page is for this machine alone")
            return False

        def _hosts(self) -> tuple[str, str]:
            port = server.server_port
            return f"{HOST}:{port}", f"localhost:{port}"

        def _respond(self, status: HTTPStatus, content: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Log nothing: the terminal is for results."""

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise ConfigError(f"port {port} cannot be used: {error}", hint="name another one: --port 8766") from error
    server.daemon_threads = True
    return server
