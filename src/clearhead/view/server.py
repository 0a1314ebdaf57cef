"""`clearhead view`: the long view with every weight at hand, served to this machine alone.

Loopback only; an address nobody can guess; requests from other pages are refused by their Host and Origin.
"""

import json
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from clearhead.errors import ClearheadError
from clearhead.view import page
from clearhead.view.container import Document
from clearhead.view.long import Run, Sight
from clearhead.view.tiles import tile

_MOST_UNITS = 2048  # along each side of a tile
_MOST_TOKENS = 16384
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


class _BadRequestError(Exception):
    """What a request lacks, in one sentence."""


def application(document: Document, runs: Sequence[Run], token: str) -> Starlette:
    """The page at /token/, and weights as float32 at /token/tile, row and column."""
    text = page.html(replace(document, header={**document.header, "served": True}))
    sights = [list(run.sights) for run in runs]

    async def show(_: Request) -> Response:
        return HTMLResponse(text, headers={**_HEADERS, "content-security-policy": page.policy(document, served=True)})

    def answer(compute: Callable[[Any, Sight, int], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            body = await request.body()
            try:
                asked = _read(body)
                sight, head = _chosen(asked, sights)
                found = await run_in_threadpool(compute, asked, sight, head)
            except (_BadRequestError, ClearheadError) as error:
                return PlainTextResponse(str(error), 400, headers=_HEADERS)
            data = np.ascontiguousarray(found, "<f4").tobytes()
            return Response(data, media_type="application/octet-stream", headers=_HEADERS)

        return endpoint

    async def guarded(request: Request, call: Callable[[Request], Any]) -> Response:
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        if origin is not None and origin != f"http://{host}":
            return PlainTextResponse("requests from other pages are refused", 403, headers=_HEADERS)
        if not secrets.compare_digest(request.path_params["token"].encode(), token.encode()):
            return PlainTextResponse("there is nothing here", 404, headers=_HEADERS)
        return await call(request)

    def route(path: str, call: Callable[[Request], Any], method: str) -> Route:
        async def endpoint(request: Request) -> Response:
            return await guarded(request, call)

        return Route(f"/{{token}}/{path}", endpoint, methods=[method])

    routes = [route("", show, "GET")]
    routes += [
        route(name, answer(compute), "POST") for name, compute in (("tile", _tile), ("row", _row), ("column", _column))
    ]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1"])])


def serve(document: Document, runs: Sequence[Run], say: Callable[[str], None], port: int = 0) -> None:
    """Serve until interrupted; `say` is told the address."""
    import uvicorn

    token = secrets.token_urlsafe(24)
    listening = socket.create_server(("127.0.0.1", port))
    say(f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/")
    config = uvicorn.Config(application(document, runs, token), log_level="warning", lifespan="off", access_log=False)
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        listening.close()


def _read(body: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(body)
    except ValueError:
        raise _BadRequestError("the request is no JSON") from None
    if not isinstance(asked, dict):
        raise _BadRequestError("the request is no JSON object")
    return asked


def _number(asked: dict[str, Any], name: str, size: int) -> int:
    value = asked.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise _BadRequestError(f"{name} is {value!r}: expected a whole number from 0 to {size - 1}")
    return value


def _chosen(asked: dict[str, Any], sights: list[list[Sight]]) -> tuple[Sight, int]:
    run = sights[_number(asked, "run", len(sights))]
    sight = run[_number(asked, "layer", len(run))]
    return sight, _number(asked, "head", len(sight.heads))


def _edges(asked: dict[str, Any], name: str, size: int) -> list[int]:
    edges = asked.get(name)
    whole = isinstance(edges, list) and all(isinstance(edge, int) and not isinstance(edge, bool) for edge in edges)
    if not isinstance(edges, list) or not whole or not 2 <= len(edges) <= _MOST_UNITS + 1:
        raise _BadRequestError(f"{name}: expected 2 to {_MOST_UNITS + 1} whole numbers, where units begin and end")
    if edges[0] < 0 or edges[-1] > size or any(a >= b for a, b in pairwise(edges)):
        raise _BadRequestError(f"{name}: expected rising numbers from 0 to {size}")
    if edges[-1] - edges[0] > _MOST_TOKENS:
        raise _BadRequestError(f"{name}: one tile has at most {_MOST_TOKENS} tokens")
    return edges


def _tile(asked: dict[str, Any], sight: Sight, head: int) -> Any:
    rows, cols = (
        _edges(asked, name, size) for name, size in zip(("rows", "cols"), sight.matrix.shape[2:], strict=True)
    )
    rule = asked.get("rule")
    if rule not in ("most", "mean"):
        raise _BadRequestError(f"rule is {rule!r}: expected most or mean")
    step = _number(asked, "step", _MOST_UNITS + 1)
    return tile(sight.matrix, head, rows, cols, max(step, 1), rule)


def _row(asked: dict[str, Any], sight: Sight, head: int) -> Any:
    i = _number(asked, "at", sight.matrix.shape[2])
    return tile(sight.matrix, head, [i, i + 1], range(sight.matrix.shape[3] + 1), 1, "most")


def _column(asked: dict[str, Any], sight: Sight, head: int) -> Any:
    j = _number(asked, "at", sight.matrix.shape[3])
    return tile(sight.matrix, head, range(sight.matrix.shape[2] + 1), [j, j + 1], 1, "most")
