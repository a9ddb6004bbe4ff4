"""Routes of models, adapters and answers about recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Form, Request, UploadFile
from fastapi.responses import PlainTextResponse

from myna.data.pronunciation import DEFAULT_QUESTION
from myna.models.ref import display_name
from myna.serve.api_errors import ApiError
from myna.serve.context import ServerContext, server_context, unless_disconnected
from myna.serve.messages import AnswerMessage, RequestEnd
from myna.serve.schemas import LoadAdapterBody, UnloadAdapterBody

MAX_ANSWER_SECONDS = 60.0
"""Of a recording that is asked about."""

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The model, and the adapters beside it."""
    context = server_context(request)
    names = [context.settings.model, *context.adapters.sources]
    return {"object": "list", "data": [_model_object(context, name) for name in names]}


@router.get("/v1/models/{name}")
async def retrieve_model(name: str, request: Request) -> dict[str, Any]:
    context = server_context(request)
    context.resolve_model(name)
    return _model_object(context, name)


def _model_object(context: ServerContext, name: str) -> dict[str, Any]:
    base = context.settings.model
    known = {"id": name, "object": "model", "created": context.started_at, "owned_by": "myna"}
    source = context.adapters.sources.get(name.removeprefix(f"{base}:"))
    if source is None:
        return {**known, "root": base, "parent": None}
    return {**known, "root": display_name(source), "parent": base}


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load_lora_adapter(body: LoadAdapterBody, request: Request) -> str:
    """Load an adapter from one of the allowed folders, while the others are spoken with."""
    context = server_context(request)
    folder = _allowed_folder(context, body.lora_path)
    if body.lora_name in (context.settings.model, *context.adapters.sources):
        raise ApiError(400, f"there is a model named {body.lora_name} already", param="lora_name")
    await context.change_adapter(body.lora_name, str(folder))
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_lora_adapter(body: UnloadAdapterBody, request: Request) -> str:
    """Forget an adapter. Requests that speak with it go on."""
    context = server_context(request)
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


def _allowed_folder(context: ServerContext, path: str) -> Path:
    """A folder below one of those that were allowed, links resolved; whether others exist is not told."""
    _check_adapter_loading(context)
    roots = [folder.resolve() for folder in context.settings.adapter_folders]
    inside = [] if "\0" in path else [(root / path).resolve() for root in roots]
    inside = [folder for folder in inside if any(folder.is_relative_to(root) for root in roots)]
    if not inside:
        raise ApiError(403, "adapters are loaded from the allowed folders alone", param="lora_path")
    if not (found := [folder for folder in inside if folder.is_dir()]):
        raise ApiError(404, "there is no such folder among the allowed ones", param="lora_path")
    return found[0]


@router.post("/v1/audio/assessments", tags=["answers"])
async def create_assessment(
    request: Request,
    file: UploadFile,
    model: Annotated[str, Form(max_length=256)] = "",
    question: Annotated[str, Form(max_length=4096)] = DEFAULT_QUESTION,
    max_tokens: Annotated[int, Form(ge=1, le=4096)] = 512,
    constrained: Annotated[bool, Form()] = False,
) -> dict[str, Any]:
    """Answer a question about a recording, by default to rate its pronunciation; for a model that answers."""
    context = server_context(request)
    await context.client.wait_until_loaded()
    context.resolve_model(model)
    rate = context.sample_rate
    samples = await context.uploads.decode(await file.read(), rate, param="file", max_seconds=MAX_ANSWER_SECONDS)
    job = context.client.submit(lambda id: AnswerMessage(id, samples, question, max_tokens, constrained))
    try:
        result = await unless_disconnected(request.receive, job.result())
    finally:
        job.cancel()
    end = result[1] if result is not None else RequestEnd(job.id)
    return {"text": end.text, "finish_reason": end.finish_reason}
