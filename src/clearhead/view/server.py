"""Serves the long view for `clearhead view`, with every weight computed on request, to this machine only.

It listens on loopback under a secret path, and refuses requests from other pages by their Host and Origin.
"""

import json
import secrets
import socket
from collections.abc import Callable, Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from clearhead.errors import ClearheadError, SelectionError
from clearhead.view import page
from clearhead.view.answers import ANSWERS, answer
from clearhead.view.container import Document
from clearhead.view.long import ShownRun

_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


def application(document: Document, runs: Sequence[ShownRun], token: str) -> Starlette:
    """Serve the page at /token/, and its requests (view/answers.py) at /token/tile, /row and /column."""
    text = page.html(document)
    headers = {**_HEADERS, "content-security-policy": f"{page.policy(document)}; frame-ancestors 'none'"}

    def refused(request: Request) -> Response | None:
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        if origin is not None and origin != f"http://{host}":
            return _said(403, "requests from other pages are refused")
        if not secrets.compare_digest(request.path_params["token"].encode(), token.encode()):
            return _said(404, "there is nothing here")
        return None

    async def show(request: Request) -> Response:
        return refused(request) or HTMLResponse(text, headers=headers)

    async def weights(request: Request) -> Response:
        if refusal := refused(request):
            return refusal
        if (what := request.path_params["what"]) not in ANSWERS:
            return _said(404, "there is nothing here")
        try:
            asked = json.loads(await request.body())
            data = await run_in_threadpool(answer, what, asked, runs)
        except ClearheadError as error:
            return _said(400, error.what)
        except (ValueError, RecursionError):  # RecursionError: very deeply nested lists
            return _said(400, "the request is not JSON")
        return Response(data, media_type="application/octet-stream", headers=_HEADERS)

    routes = [Route("/{token}/", show, methods=["GET"]), Route("/{token}/{what}", weights, methods=["POST"])]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1"])])


def listen(port: int = 0) -> socket.socket:
    """Open a listening socket on loopback; port 0 takes a free one. Raises SelectionError if the port is unusable."""
    if not 0 <= port <= 65535:
        raise SelectionError(f"port is {port}: expected 0 to 65535.", "leave out --port to take a free one.")
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise SelectionError(
            f"port {port} cannot be used: {error.strerror or str(error)}.", "leave out --port to take a free one."
        ) from None


def serve(document: Document, runs: Sequence[ShownRun], say: Callable[[str], None], listening: socket.socket) -> None:
    """Serve until interrupted; call `say` with the address."""
    token = secrets.token_urlsafe(24)
    say(f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/")
    config = uvicorn.Config(application(document, runs, token), log_level="warning", lifespan="off", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])


def _said(status: int, words: str) -> Response:
    return PlainTextResponse(words, status, headers=_HEADERS)
