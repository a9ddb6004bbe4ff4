"""Routes of voices, consents, models and adapters; and answers about recordings."""

import asyncio
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Form, Request, UploadFile
from fastapi.responses import PlainTextResponse

from myna.audio.files import write_audio
from myna.core.errors import MynaError
from myna.data.pronunciation import DEFAULT_QUESTION
from myna.models.ref import display_name
from myna.provenance.consent import ConsentChecker, rename_consent, sentence_of_day
from myna.provenance.voice_store import Consent, StoredVoice
from myna.serve.context import DEFAULT_VOICE, LISTENING, Context, ServerContext, unless_disconnected
from myna.serve.messages import AnswerMessage, RequestEnd
from myna.serve.schemas import ApiError, ConsentNameBody, LoadAdapterBody, UnloadAdapterBody

SAMPLE_RATE = 24_000
"""Samples per second of recordings that are kept."""

voice_router, model_router = APIRouter(tags=["voices"]), APIRouter(tags=["models"])
NameField = Annotated[str, Form(max_length=64)]


@voice_router.get("/v1/audio/voices")
async def list_voices(context: Context) -> dict[str, Any]:
    """List the voices that a request may name. `default` is the model's own."""
    voices = await _in_store(context.store.list_voices)
    return {
        "voices": [
            {"id": DEFAULT_VOICE, "name": DEFAULT_VOICE},
            *({"id": voice.id, "name": voice.name} for voice in voices),
        ],
        "uploaded_voices": [  # as vLLM-Omni lists them
            {
                **voice.model_dump(include={"name", "language", "created_at"}),
                "consent": voice.consent.id,
                "ref_text": voice.recordings[0].text,
            }
            for voice in voices
        ],
        "object": "list",
        "data": [_voice_object(voice) for voice in voices],
    }


@voice_router.post("/v1/audio/voices")
async def create_voice(
    context: Context,
    name: NameField,
    audio_sample: UploadFile,
    consent: Annotated[str, Form(max_length=128)],
    ref_text: Annotated[str, Form(max_length=4096)] = "",
) -> dict[str, Any]:
    """Store a voice from a recording, checked against the recording of a consent."""
    texts = [ref_text] if ref_text else []

    def create(file: Path, checker: ConsentChecker) -> StoredVoice:
        return context.store.create_voice(name, [file], consent, checker, texts=texts)

    return _voice_object(await _from_recording(context, audio_sample, "audio_sample", create))


@voice_router.get("/v1/audio/voices/{voice_id}")
async def retrieve_voice(voice_id: str, context: Context) -> dict[str, Any]:
    return _voice_object(await _in_store(context.store.get_voice, voice_id))


@voice_router.delete("/v1/audio/voices/{voice_id}")
async def delete_voice(voice_id: str, context: Context) -> dict[str, Any]:
    """Remove a voice with its recordings."""
    voice = await _in_store(context.store.delete_voice, voice_id)
    context.voices.pop(voice.id, None)
    return {"id": voice.id, "object": "audio.voice.deleted", "deleted": True}


@voice_router.get("/v1/audio/consent_sentence", tags=["consents"])
async def retrieve_consent_sentence(name: str, language: str = "en") -> dict[str, str]:
    """Return the sentence that the speaker reads aloud today."""
    sentence = await _in_store(sentence_of_day, name, language)
    return {"name": name, "language": sentence.language, "sentence": sentence.text}


@voice_router.post("/v1/audio/voice_consents", tags=["consents"])
async def create_voice_consent(
    context: Context, name: NameField, recording: UploadFile, language: Annotated[str, Form(max_length=32)]
) -> dict[str, Any]:
    """Store a consent, if its sentence was recognised in the recording."""

    def create(file: Path, checker: ConsentChecker) -> Consent:
        return context.store.create_consent(name, file, language, checker)

    return _consent_object(await _from_recording(context, recording, "recording", create))


@voice_router.get("/v1/audio/voice_consents", tags=["consents"])
async def list_voice_consents(context: Context) -> dict[str, Any]:
    data = [_consent_object(one) for one in await _in_store(context.store.list_consents)]
    ids = [one["id"] for one in data] or [None]
    return {"object": "list", "data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": False}


@voice_router.get("/v1/audio/voice_consents/{consent_id}", tags=["consents"])
async def retrieve_voice_consent(consent_id: str, context: Context) -> dict[str, Any]:
    return _consent_object(await _in_store(context.store.get_consent, consent_id))


@voice_router.post("/v1/audio/voice_consents/{consent_id}", tags=["consents"])
async def update_voice_consent(consent_id: str, body: ConsentNameBody, context: Context) -> dict[str, Any]:
    """Change the spelling of the name in a consent."""
    return _consent_object(await _in_store(rename_consent, context.store, consent_id, body.name))


@voice_router.delete("/v1/audio/voice_consents/{consent_id}", tags=["consents"])
async def delete_voice_consent(consent_id: str, context: Context) -> dict[str, Any]:
    """Remove a consent that no voice needs."""
    consent = await _in_store(context.store.delete_consent, consent_id, status=409)
    return {"id": consent.id, "object": "audio.voice_consent.deleted", "deleted": True}


async def _in_store(
    function: Any, *arguments: Any, status: int = 400, threads: ThreadPoolExecutor | None = None
) -> Any:
    """Call a function of the store in a thread. Its errors become errors of the request."""
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)
    except MynaError as error:
        raise ApiError.of(error, status) from None


async def _from_recording(
    context: ServerContext, upload: UploadFile, param: str, create: Callable[[Path, ConsentChecker], Any]
) -> Any:
    """Store a recording that is checked. The decoded samples are kept, not the upload."""
    if context.settings.asr is None:
        raise ApiError(
            403,
            "this server takes no new voices: it has no recogniser to check consents with (start it with --asr base, "
            "or add voices on its machine: myna voice add)",
            code="consent_checks_unavailable",
        )
    checker = await _in_store(_open_checker, context.settings.asr, status=503, threads=LISTENING)
    samples = await context.uploads.decode(await upload.read(), SAMPLE_RATE, param=param)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "recording.flac")
        await _in_store(write_audio, file, samples, SAMPLE_RATE)
        try:
            return await _in_store(create, file, checker, threads=LISTENING)
        except ApiError as error:
            error.message = error.message.replace(str(file), "the recording")
            raise


@cache
def _open_checker(asr: str) -> ConsentChecker:
    return ConsentChecker.open(asr)


def _voice_object(voice: StoredVoice) -> dict[str, Any]:
    known = voice.model_dump(include={"id", "name", "created_at"})
    return {"object": "audio.voice", **known, "type": "audio_sample"}


def _consent_object(consent: Consent) -> dict[str, Any]:
    return {"object": "audio.voice_consent", **consent.model_dump(include={"id", "name", "language", "created_at"})}


MAX_ANSWER_SECONDS = 60.0
"""Longest recording in seconds that may be asked about."""


@model_router.get("/v1/models")
async def list_models(context: Context) -> dict[str, Any]:
    """List the model and its adapters."""
    names = [context.settings.model, *context.adapters.sources]
    return {"object": "list", "data": [_model_object(context, name) for name in names]}


@model_router.get("/v1/audio/models")
async def list_speech_models(context: Context) -> dict[str, Any]:
    """List the same models as Open WebUI asks for them."""
    return {"models": [{"id": name, "name": name} for name in (context.settings.model, *context.adapters.sources)]}


@model_router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, context: Context) -> dict[str, Any]:
    context.resolve_model(name)
    return _model_object(context, name)


def _model_object(context: ServerContext, name: str) -> dict[str, Any]:
    base = context.settings.model
    known = {"id": name, "object": "model", "created": context.started_at, "owned_by": "myna"}
    source = context.adapters.sources.get(name.removeprefix(f"{base}:"))
    if source is None:
        return {**known, "root": base, "parent": None}
    return {**known, "root": display_name(source), "parent": base}


@model_router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load_lora_adapter(body: LoadAdapterBody, context: Context) -> str:
    """Load an adapter from one of the allowed folders. Others continue to speak."""
    _check_adapter_loading(context)
    # A folder below one of the allowed ones, with links resolved. Other folders are not revealed.
    roots = [folder.resolve() for folder in context.settings.adapter_folders]
    inside = [] if "\0" in body.lora_path else [(root / body.lora_path).resolve() for root in roots]
    inside = [folder for folder in inside if any(folder.is_relative_to(root) for root in roots)]
    if not inside:
        raise ApiError(403, "adapters are loaded from the allowed folders alone", param="lora_path")
    if not (found := [folder for folder in inside if folder.is_dir()]):
        raise ApiError(404, "there is no such folder among the allowed ones", param="lora_path")
    if body.lora_name in (context.settings.model, *context.adapters.sources):
        raise ApiError(400, f"there is a model named {body.lora_name} already", param="lora_name")
    await context.change_adapter(body.lora_name, str(found[0]))
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


@model_router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_lora_adapter(body: UnloadAdapterBody, context: Context) -> str:
    """Unload an adapter. Requests that speak with it continue."""
    _check_adapter_loading(context)
    if body.lora_name not in context.adapters.sources:
        raise ApiError(404, f"there is no adapter {body.lora_name!r}", param="lora_name", code="model_not_found")
    await context.change_adapter(body.lora_name, None)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


def _check_adapter_loading(context: ServerContext) -> None:
    if not context.settings.adapter_folders:
        raise ApiError(
            403, "adapters cannot be changed while this server runs (start it with --allow-adapter-loading FOLDER)"
        )


@model_router.post("/v1/audio/assessments", tags=["answers"])
async def create_assessment(
    request: Request,
    context: Context,
    file: UploadFile,
    model: Annotated[str, Form(max_length=256)] = "",
    question: Annotated[str, Form(max_length=4096)] = DEFAULT_QUESTION,
    max_tokens: Annotated[int, Form(ge=1, le=4096)] = 512,
    constrained: Annotated[bool, Form()] = False,
) -> dict[str, Any]:
    """Answer a question about a recording; by default, rate its pronunciation. For a model that answers."""
    await context.client.wait_until_loaded()
    context.resolve_model(model)
    rate = context.sample_rate
    samples = await context.uploads.decode(await file.read(), rate, param="file", max_seconds=MAX_ANSWER_SECONDS)
    (job,) = context.client.submit_all([AnswerMessage(samples, question, max_tokens, constrained)])
    try:
        result = await unless_disconnected(request.receive, job.result())
    finally:
        job.cancel()
    end = result[1] if result is not None else RequestEnd(job.id)
    return {"text": end.text, "finish_reason": end.finish_reason}
