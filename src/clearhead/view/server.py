"""Serves the pages of `clearhead view` and `clearhead serve`, and what they ask for, to this machine only.

It listens on loopback under a secret path, and refuses requests from other pages by their Host and Origin.
"""

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Thread
from types import MappingProxyType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from clearhead.errors import ClearheadError, SelectionError
from clearhead.view import page
from clearhead.view.answers import ANSWERS, answer
from clearhead.view.container import Document
from clearhead.view.long import ShownRun

_MOST = 2**18  # bytes of a request
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}

Door = Callable[[Any], Awaitable[ASGIApp]]  # from what is asked, any JSON, to the response
Work = Callable[[Any, Callable[[dict[str, Any]], None], Callable[[range], Iterable[int]]], None]  # asked, tell, steps


def application(document: Callable[[], Document], doors: Mapping[str, Door], token: str) -> Starlette:
    """Serve the page at /token/, and each door at /token/ and its name."""

    def refused(request: Request) -> Response | None:
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        if origin is not None and origin != f"http://{host}":
            return _said(403, "requests from other pages are refused")
        if not secrets.compare_digest(request.path_params["token"].encode(), token.encode()):
            return _said(404, "there is nothing here")
        return None

    async def show(request: Request) -> Response:
        if refusal := refused(request):
            return refusal
        made = await run_in_threadpool(document)
        policy = {"content-security-policy": f"{page.policy(made)}; frame-ancestors 'none'"}
        return HTMLResponse(page.html(made), headers=_HEADERS | policy)

    async def open_door(request: Request) -> ASGIApp:
        if refusal := refused(request):
            return refusal
        if (door := doors.get(request.path_params["what"])) is None:
            return _said(404, "there is nothing here")
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MOST:
                return _said(413, f"the request is longer than {_MOST} bytes")
        try:
            return await door(json.loads(body))
        except ClearheadError as error:
            return _said(400, error.what)
        except (ValueError, RecursionError):  # RecursionError: very deeply nested lists
            return _said(400, "the request is not JSON")

    routes = [Route("/{token}/", show, methods=["GET"]), Route("/{token}/{what}", open_door, methods=["POST"])]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1"])])


def weights_of(runs: Sequence[ShownRun]) -> dict[str, Door]:
    """Return the doors of `clearhead view`: /tile, /row and /column give weights (view/answers.py)."""

    async def weights(what: str, asked: Any) -> Response:
        data = await run_in_threadpool(answer, what, asked, runs)
        return Response(data, media_type="application/octet-stream", headers=_HEADERS)

    return {what: partial(weights, what) for what in ANSWERS}


@dataclass(slots=True)
class Desk:
    """Runs one piece of work at a time, in a thread; what a page asks for ends what it asked for before."""

    work: Work
    ending: Callable[[], bool] = lambda: False  # will the server end?
    page: str = ""
    stop: Event = field(default_factory=Event)
    thread: Thread | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, asked: Any) -> ASGIApp:
        """Begin what a page asks for, and send its lines of JSON as they come; without a reader it ends soon.

        Raises SelectionError for a request that names no page.
        """
        if not isinstance(asked, dict) or not isinstance(asked.get("page"), str):
            raise SelectionError("expected an object with the name of its page.")
        async with self.turn:
            if self.thread is not None and self.thread.is_alive():
                if asked["page"] != self.page and not self.stop.is_set():
                    return _said(409, "another page's run is not done yet: one at a time")
                self.stop.set()
                await run_in_threadpool(self.thread.join)
            lines, loop = asyncio.Queue[bytes | None](), asyncio.get_running_loop()

            def put(line: bytes | None) -> None:
                loop.call_soon_threadsafe(lines.put_nowait, line)

            self.page, self.stop = asked["page"], (stop := Event())
            self.thread = Thread(target=self._begin, args=(asked, stop, put))
            self.thread.start()

        async def each() -> AsyncIterator[bytes]:
            while (line := await lines.get()) is not None:
                yield line

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await StreamingResponse(each(), headers=_HEADERS)(scope, receive, send)
            finally:
                stop.set()

        return respond

    def _begin(self, asked: Any, stop: Event, put: Callable[[bytes | None], None]) -> None:
        def tell(line: dict[str, Any]) -> None:
            put(json.dumps(line).encode() + b"\n")

        def steps(numbers: range) -> Iterator[int]:
            for number in numbers:
                if stop.is_set() or self.ending():
                    raise asyncio.CancelledError
                yield number

        try:
            self.work(asked, tell, steps)
        except ClearheadError as error:
            tell({"error": error.one_line()})
        except asyncio.CancelledError:
            tell({"error": "the run was stopped."})
        except BaseException as error:
            tell({"error": f"{type(error).__name__}: {error}"})
            raise  # which prints it where the server runs
        finally:
            put(None)


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


def serve(
    say: Callable[[str], None],
    listening: socket.socket,
    document: Callable[[], Document],
    doors: Mapping[str, Door] = MappingProxyType({}),
    work: Work | None = None,
) -> None:
    """Serve a page, its doors and at /run some work, until interrupted; `say` is called with the address."""
    token = secrets.token_urlsafe(24)
    running = {} if work is None else {"run": Desk(work, lambda: server.should_exit).run}
    app = application(document, {**doors, **running}, token)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False))
    say(f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/")
    server.run(sockets=[listening])


def _said(status: int, words: str) -> Response:
    return PlainTextResponse(words, status, headers=_HEADERS)
