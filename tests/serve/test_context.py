"""Sources of a server, and the hosts that it answers to."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myna.core.errors import ConfigError
from myna.models import open_family, save_tiny_model
from myna.serve.context import resolve_sources
from myna.serve.schemas import ApiError
from myna.serve.server import RequestGuard, local_hosts
from myna.serve.transcoding import recording_bytes
from tests.models.helpers import random_adapter


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A base model and two adapters."""
    root = tmp_path_factory.mktemp("sources")
    family = open_family(str(save_tiny_model(root / "base")))
    anna, marta = (str(random_adapter(family, root / name)) for name in ("anna", "marta"))
    return str(root / "base"), anna, marta


def test_one_source_is_opened_as_it_is(folders: tuple[str, str, str]) -> None:
    base, anna, _ = folders
    assert resolve_sources([base], None) == (base, {})
    assert resolve_sources([anna], None) == (anna, {}), "merged into its base"
    assert resolve_sources([anna], base) == (anna, {})
    assert resolve_sources(["fledgling"], None) == ("fledgling", {})


def test_several_are_adapters_of_one_base(folders: tuple[str, str, str]) -> None:
    base, anna, marta = folders
    assert resolve_sources([base, anna, f"m={marta}"], None) == (base, {"anna": anna, "m": marta})
    assert resolve_sources([anna, marta], None) == (base, {"anna": anna, "marta": marta})
    assert resolve_sources([anna], None, keep_adapters=True) == (base, {"anna": anna})


def test_sources_without_a_common_base_are_refused(folders: tuple[str, str, str]) -> None:
    base, anna, marta = folders
    for sources, words in (
        ([base, base], "only one base model"),
        ([anna, base], "only one base model"),
        ([anna, f"anna={marta}"], "two models are named anna"),
        ([base, f"base={anna}"], "two models are named base"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            resolve_sources(sources, None)
        assert caught.value.hint


def test_names_of_this_machine() -> None:
    own = {"127.0.0.1:81", "localhost:81", "[::1]:81"}
    assert local_hosts("127.0.0.1", 81) == local_hosts("localhost", 81) == local_hosts("::1", 81) == own
    assert local_hosts("127.0.0.1", 81, ["Speech.Example.com"]) == own | {"speech.example.com"}
    assert local_hosts("0.0.0.0", 80) == frozenset()


def pass_guard(headers: dict[str, str], *, key: str | None = None, method: str = "POST") -> int:
    """Return the status of a guard, 200 if it lets a request through."""
    sent: list[dict[str, Any]] = []

    async def app(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    raw = [(name.encode(), value.encode("utf-8")) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": "/v1/audio/speech", "headers": raw}
    guard = RequestGuard(app, hosts=local_hosts("127.0.0.1", 80), api_key=key, observe=lambda *_: None)
    asyncio.run(guard(scope, receive, send))
    return int(sent[0]["status"])


@given(st.text(alphabet=st.characters(codec="ascii", exclude_categories=["Cc"])))
def test_only_own_hosts_and_origins_pass(text: str) -> None:
    own = "127.0.0.1:80"
    assert pass_guard({"host": text}) == (200 if text.lower() in local_hosts("127.0.0.1", 80) else 403)
    origin_passes = text.partition("://")[2].lower() == own
    assert pass_guard({"host": own, "origin": text}) == (200 if origin_passes else 403)
    assert pass_guard({"host": own, "authorization": text}, key="the key") == (
        200 if text.lower().startswith("bearer ") and text[7:] == "the key" else 401
    )


@given(st.text(max_size=60))
def test_fields_with_recordings_are_decoded_or_refused(text: str) -> None:
    try:
        recording_bytes(text, param="ref_audio")
    except ApiError as error:
        assert error.status == 400 and error.param == "ref_audio"


def test_a_source_may_lie_in_any_folder(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "a model with = and spaces")
    assert resolve_sources([str(model)], None)[0] == str(model)
