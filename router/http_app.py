"""All routes of the gateway, and the same shape for every error."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pd_core.config import RouterConfig
from pd_core.errors import InvalidRequest, KvrelayError, NotFound, UnknownModel
from pd_model.model_assets import ModelAssets
from router.api_fields import MAX_CHOICES
from router.chat_api import ChatApi
from router.completion_api import CompletionApi
from router.generate_endpoint import GenerateEndpoint
from router.http_errors import Forbidden, MethodNotAllowed, error_headers, error_json
from router.http_front import Front, is_loopback
from router.http_reply import read_body
from router.json_body import said
from router.json_lines import JsonLines
from router.metrics import CONTENT_TYPE, RouterMetrics
from router.path_probes import PathProbes, parse_order
from router.prompt import PromptReader
from router.readiness import readiness
from router.request_page import request_page
from router.serving import Serving

logger = logging.getLogger(__name__)

MAX_ORDER_BYTES = 4096
"""Body of a POST that says what is to be probed."""


def build_app(
    serving: Serving,
    assets: ModelAssets,
    metrics: RouterMetrics,
    *,
    config: RouterConfig,
    transfer_path: str,
    clock: Callable[[], float],
) -> ASGIApp:
    """The ASGI application. transfer_path: the config's"""
    pages = _Pages(serving, assets, metrics, PathProbes(serving, assets.name, transfer_path, clock), clock)
    reader = PromptReader(assets, max_waiting=config.max_queue)
    chat, completion = ChatApi(assets, reader), CompletionApi(assets, reader)
    generators: dict[str, ASGIApp] = {
        "/v1/chat/completions": GenerateEndpoint(chat, serving, assets, config, clock, metrics),
        "/v1/completions": GenerateEndpoint(completion, serving, assets, config, clock, metrics),
    }
    app = Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generators.items()),
            Route("/v1/models", pages.models, methods=["GET"]),
            Route("/v1/models/{model:path}", pages.model, methods=["GET"]),
            Route("/v1/requests/{request_id}", pages.request, methods=["GET"]),
            Route("/health", pages.health, methods=["GET"]),
            Route("/ready", pages.ready, methods=["GET"]),
            Route("/metrics", pages.metrics, methods=["GET"]),
            Route("/debug/ledger", pages.ledger, methods=["GET"]),
            Route("/debug/paths", pages.paths, methods=["POST"]),
        ],
        exception_handlers={
            HTTPException: _on_http_exception,
            KvrelayError: _on_kvrelay_error,
            Exception: _on_fault,
        },
    )
    app.router.redirect_slashes = False  # a redirect has no error body, and clients do not follow it with a POST
    return Front(generators, app, config.host, metrics.replied)


class _Pages:
    """Everything that generates no text."""

    def __init__(
        self,
        serving: Serving,
        assets: ModelAssets,
        metrics: RouterMetrics,
        probes: PathProbes,
        clock: Callable[[], float],
    ) -> None:
        self._serving = serving
        self._probes = probes
        self._metrics = metrics
        self._clock = clock
        self._model = {"id": assets.name, "object": "model", "created": int(time.time()), "owned_by": "kvrelay"}

    async def models(self, _request: Request) -> Response:
        return _json({"object": "list", "data": [self._model]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._model["id"]:
            raise UnknownModel(f"the model {said(name)} is not served here; {self._model['id']!r} is", param="model")
        return _json(self._model)

    async def request(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        return _json(request_page(request_id, self._serving.timelines(request_id, MAX_CHOICES)))

    async def health(self, _request: Request) -> Response:
        return _json({"status": "alive"})

    async def ready(self, _request: Request) -> Response:
        detail = readiness(self._serving, self._clock())
        return _json(detail, 200 if detail["ready"] else 503)

    async def metrics(self, _request: Request) -> Response:
        return Response(self._metrics.scrape(), headers={"content-type": CONTENT_TYPE})

    async def ledger(self, request: Request) -> Response:
        _check_is_near(request)
        reports = await self._serving.fleet.read_ledgers()
        shown = {
            name: {"error": report.message} if isinstance(report, KvrelayError) else msgspec.to_builtins(report)
            for name, report in reports.items()
        }
        return _json({"workers": shown})

    async def paths(self, request: Request) -> Response:
        _check_is_near(request)
        body = await read_body(request.scope, request.receive, MAX_ORDER_BYTES)
        lines = self._probes.begin(parse_order(body))
        return JsonLines(lines, self._probes.end)


def _check_is_near(request: Request) -> None:
    if request.client is None or not is_loopback(request.client.host):
        raise Forbidden(f"{request.url.path} answers on the loopback address only")


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - narrows the type that the table promises
    if error.status_code == 404:
        return _error(NotFound(f"there is nothing at {request.url.path[:200]!r}"))
    if error.status_code == 405:
        return _error(MethodNotAllowed(f"{request.method[:20]} is not allowed here"), error.headers)
    return _error(InvalidRequest(error.detail))


async def _on_kvrelay_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, KvrelayError)  # noqa: S101 - as above
    return _error(error)


async def _on_fault(request: Request, error: Exception) -> Response:
    logger.error("%s failed", request.url.path, exc_info=error)
    return _error(KvrelayError("internal error in the router; see its log"))


def _error(error: KvrelayError, more: Mapping[str, str] | None = None) -> Response:
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error_json(error), error.http_status, {**headers, **(more or {})}, media_type="application/json")


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
