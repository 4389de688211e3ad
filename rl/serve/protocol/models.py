"""`/v1/models`: the model that is served and its adapters, with the fields of OpenAI and of
Anthropic."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rl.serve.service import Service


async def models(request: Request) -> Response:
    """Lists the models."""
    service: Service = request.app.state.service
    shown = [_shown(service, name) for name in service.names]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"], "has_more": False}
    return JSONResponse({"object": "list", "data": shown, **ends})


async def model(request: Request) -> Response:
    """Describes one model."""
    service: Service = request.app.state.service
    name = request.path_params["name"]
    service.check_model(name)
    return JSONResponse(_shown(service, name))


def _shown(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "duet",
        "parent": None if name == service.name else service.name,
        "max_model_len": service.max_length,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
    }
