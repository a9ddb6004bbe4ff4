"""The ASGI application: all routes of a server, its errors, its page and its figures."""

from __future__ import annotations

import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from myna import __version__
from myna.serve import model_routes, speech_routes, voice_routes, websocket
from myna.serve.api_errors import ApiError, validation_error
from myna.serve.context import ServerContext, server_context
from myna.serve.guard import RequestGuard, local_hosts

PAGE_FILES = {"page.js": "text/javascript", "page.css": "text/css"}
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self' blob:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


def create_app(context: ServerContext) -> FastAPI:
    """The application of a server; the engine is started with it, and ended behind the last request."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await context.start()
        gc.collect()
        gc.freeze()  # a full collection would stop all streams for as long as it takes to visit every imported object
        try:
            yield
        finally:
            await context.close()

    app = FastAPI(
        title="Myna speech server",
        version=__version__,
        description="Speech in the contract of OpenAI's API.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.state.context = context
    for routes in (speech_routes, voice_routes, model_routes, websocket):
        app.include_router(routes.router)
    _add_status_routes(app)
    _add_page(app)
    _add_error_handlers(app)
    settings = context.settings
    app.add_middleware(
        RequestGuard,
        hosts=local_hosts(settings.host, settings.port, settings.allowed_hosts),
        api_key=settings.api_key,
        observe=context.metrics.observe_request,
    )
    return app


def _add_status_routes(app: FastAPI) -> None:
    @app.get("/health", tags=["status"])
    async def health(request: Request) -> Response:
        """Whether the server and its engine do their work."""
        client = server_context(request).client
        state = {"status": "ok" if client.healthy else "failed", "engine_restarts": client.restarts}
        return JSONResponse(state, 200 if client.healthy else 503)

    @app.get("/ready", tags=["status"])
    async def ready(request: Request) -> Response:
        """Whether the model is loaded and warm."""
        client = server_context(request).client
        return JSONResponse({"ready": client.ready}, 200 if client.ready else 503)

    @app.get("/metrics", tags=["status"], response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Figures for Prometheus."""
        return Response(await server_context(request).render_metrics(), media_type="text/plain; version=0.0.4")


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(_page_file("page.html"), headers=_page_headers())

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in PAGE_FILES:
            raise ApiError(404, "there is no such file")
        return Response(_page_file(name), media_type=PAGE_FILES[name], headers=_page_headers())

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        """The interface as a page: FastAPI's own loads scripts from elsewhere."""
        return HTMLResponse(_docs_page(request.app), headers=_page_headers())


def _page_headers() -> dict[str, str]:
    return {"content-security-policy": PAGE_POLICY, "cache-control": "no-store"}


@cache
def _page_file(name: str) -> bytes:
    return files("myna.serve").joinpath(name).read_bytes()


def _docs_page(app: FastAPI) -> str:
    from jinja2 import Environment

    schema = app.openapi()
    routes = [
        {
            "method": method.upper(),
            "path": path,
            "text": route.get("description", ""),
            "fields": list(_fields(schema, route)),
        }
        for path, methods in schema["paths"].items()
        for method, route in methods.items()
    ]
    template = Environment(autoescape=True).from_string(_page_file("docs.html").decode())
    return template.render(routes=routes, version=__version__)


def _fields(schema: dict[str, Any], route: dict[str, Any]) -> Any:
    """Name, type, default and meaning of the parameters and the body's fields of a route."""
    for parameter in route.get("parameters", ()):
        yield _field(schema, parameter["name"], parameter["schema"], required=parameter.get("required", False))
    for content in route.get("requestBody", {}).get("content", {}).values():
        body = _resolved(schema, content["schema"])
        for name, field in body.get("properties", {}).items():
            yield _field(schema, name, field, required=name in body.get("required", ()))


def _field(schema: dict[str, Any], name: str, field: dict[str, Any], *, required: bool) -> dict[str, str]:
    kinds = [_kind(schema, one) for one in field.get("anyOf", [field])]
    default = "required" if required else json.dumps(field.get("default"))
    return {"name": name, "kind": " or ".join(kinds), "default": default, "text": field.get("description", "")}


def _kind(schema: dict[str, Any], field: dict[str, Any]) -> str:
    field = _resolved(schema, field)
    if "enum" in field:
        return ", ".join(field["enum"])
    return str(field.get("title") if field.get("type") == "object" else field.get("type", "any"))


def _resolved(schema: dict[str, Any], field: dict[str, Any]) -> dict[str, Any]:
    name = field.get("$ref", "").rpartition("/")[2]
    return schema["components"]["schemas"][name] if name else field


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def refuse_body(_: Request, error: RequestValidationError) -> Response:
        return validation_error(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, ApiError):  # FastAPI's own words for anything that happens to a body
            return error.__cause__.response()
        texts = {404: f"there is no {request.url.path[:200]}", 405: f"{request.method} is not for this path"}
        message = texts.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def refuse_bug(_: Request, __: Exception) -> Response:
        return ApiError(500, "the server has failed; its log says how").response()
