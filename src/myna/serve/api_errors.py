"""Errors in the shape of OpenAI's API, for everything that the server refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from myna.core.errors import MynaError
from myna.serve.messages import Failure

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""Types of errors by status; other requests that are refused are `invalid_request_error`."""


class ApiError(Exception):
    """A request that is refused, or has failed, with its status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind = kind or KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.headers = dict(headers or {})

    @staticmethod
    def of(error: MynaError, *, param: str | None = None) -> ApiError:
        return ApiError(400, f"{error.what} ({error.hint})", param=param)

    @staticmethod
    def of_failure(failure: Failure) -> ApiError:
        """An error that the engine process has told."""
        if not failure.is_users:
            return ApiError(503, failure.message, code="engine_error", headers={"retry-after": "2"})
        return ApiError(400, f"{failure.message} ({failure.hint})" if failure.hint else failure.message)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first thing that is wrong with a body, and where. What was sent is not repeated: it may be megabytes."""
    first = errors[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    name = ".".join(place) or None
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is no JSON")
    message = first["msg"]
    if first["type"] == "extra_forbidden":
        message = "there is no such field; /docs lists all fields"
    return ApiError(400, f"{name}: {message}" if name else message, param=name)
