"""Routes of stored consents, without an engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from myna.core.io import save_text
from myna.provenance.consent import SENTENCES
from myna.provenance.voice_store import CONSENT_FILE, Consent, StoredRecording
from myna.serve.context import ServerContext, ServerSettings
from myna.serve.messages import EngineSettings
from myna.serve.server import create_app

SENTENCE = SENTENCES["en"].format(name="Nicola Berg", first="winter", second="anchor")
CONSENT = Consent(
    id="cons_1",
    name="Nicola Berg",
    language="en",
    created_at=1,
    sentence=SENTENCE,
    recording=StoredRecording(file="consent.wav", sha256="", text=SENTENCE),
)


@pytest.mark.parametrize(
    ("id", "body", "status", "words"),
    [
        ("cons_1", {"name": "Nikola Berg"}, 200, "Nikola Berg"),
        ("cons_1", {"name": "Hugo Winter"}, 400, "not the name that was read aloud"),
        ("cons_1", {"name": "../Nicola"}, 400, "cannot be the name"),
        ("cons_1", {}, 400, "name: Field required"),
        ("cons_2", {"name": "Nicola Berg"}, 404, "no consent"),
    ],
)
def test_an_update_keeps_to_what_was_read_aloud(
    id: str, body: Any, status: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYNA_HOME", str(tmp_path))
    save_text(tmp_path / "consents" / CONSENT.id / CONSENT_FILE, CONSENT.model_dump_json())

    async def send() -> tuple[httpx2.Response, httpx2.Response]:
        context = ServerContext(ServerSettings(EngineSettings("fledgling"), voices=tmp_path))
        transport, url = httpx2.ASGITransport(app=create_app(context)), "http://127.0.0.1:8000"
        async with httpx2.AsyncClient(transport=transport, base_url=url) as web:
            updated = await web.post(f"/v1/audio/voice_consents/{id}", json=body)
            return updated, await web.get(f"/v1/audio/voice_consents/{CONSENT.id}")

    updated, kept = asyncio.run(send())
    assert updated.status_code == status and words in updated.text
    assert kept.json()["name"] == (body["name"] if status == 200 else CONSENT.name)
