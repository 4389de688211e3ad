"""Errors of a request, as an HTTP status with a body that clients of OpenAI and Anthropic read."""

from __future__ import annotations

from dataclasses import dataclass

from policy.json_types import JsonObject

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


@dataclass
class ApiError(Exception):
    """An answer that is no result.

    status: of HTTP. param: the field of the body that is wrong, such as "messages[0].content".
    code: what programs compare, such as "context_length_exceeded".
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    @property
    def openai(self) -> JsonObject:
        """Returns the body in the form of OpenAI."""
        return {
            "error": {
                "message": self.message,
                "type": _OPENAI_TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def anthropic(self) -> JsonObject:
        """Returns the body in the form of Anthropic."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """Returns the error of a field with a wrong value."""
    return ApiError(400, message if param is None else f"{param}: {message}", param, code)
