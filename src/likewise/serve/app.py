"""The HTTP routes of `likewise serve`: what they refuse, and the headers of every response.

Every path except /openapi.json starts with a random token. Requests with another host name are refused, so that no web
page can reach this one through its own domain (DNS rebinding).
"""

import asyncio
import json
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from likewise.locks import FolderLockedError
from likewise.serve import openapi
from likewise.serve.service import REPORT_DATA, Batcher, BusyError, Question, Service

LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
MOST_BYTES = {"image": 20_000_000, "text": 200_000, "json": 1_000_000}
SECONDS_FOR_BODY = 30
DRAINED = 10  # a larger body is read up to this many times the limit, and discarded
IMAGE_TYPES = (
    "image/png",
    "image/jpeg",
    "image/webp",
    "image/bmp",
    "image/gif",
    "image/tiff",
    "image/x-ms-bmp",
)
HERE = Path(__file__).parent
COMPONENTS = HERE.parent / "components"
STATIC = {
    "components.js": ((COMPONENTS / "keys.js", COMPONENTS / "components.js"), "text/javascript"),
    "components.css": ((COMPONENTS / "components.css",), "text/css"),
    "page.js": ((HERE / "page.js",), "text/javascript"),
    "page.css": ((HERE / "page.css",), "text/css"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "frame-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

Endpoint = Callable[[Request], Awaitable[Response]]


class RequestError(Exception):
    """A refused request.

    Attributes:
        status: HTTP status of the response.
        message: What was found and what was expected.
    """

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(message)


def build_app(service: Service, token: str, hosts: Sequence[str] = ()) -> ASGIApp:
    """Build the ASGI application.

    Args:
        service: The service behind the routes.
        token: The first part of every path.
        hosts: Host names, without ports, that are accepted besides those of this machine.

    """
    return _Guard(_routes_app(service, token), (*LOCAL_HOSTS, *hosts))


def routes(service: Service, batcher: Batcher) -> list[BaseRoute]:
    """Return the routes after the token."""
    handlers = _Handlers(service, batcher)
    return [
        Route("/", handlers.page),
        Route("/report", handlers.report),
        Route(f"/{REPORT_DATA}", handlers.report_data),
        Route("/pictures/{sample:int}", handlers.picture),
        Route("/static/{name}", handlers.static),
        Route("/about", handlers.about),
        Route("/ask", handlers.ask, methods=["POST"]),
        Route("/suspects", handlers.suspects),
        Route("/samples/{sample:int}", handlers.sample),
        Route("/decisions", handlers.decisions, methods=["GET"]),
        Route("/decisions", handlers.decide, methods=["POST"]),
    ]


def _routes_app(service: Service, token: str) -> Starlette:
    batcher = Batcher(service.explain)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        batcher.stop()

    async def describe(_: Request) -> Response:
        return _answer(openapi.document())

    handlers = {RequestError: _refused, HTTPException: _not_found, Exception: _failed}
    return Starlette(
        routes=[Route("/openapi.json", describe), Mount(f"/{token}", routes=routes(service, batcher))],
        exception_handlers=handlers,  # type: ignore[arg-type]
        lifespan=lifespan,
    )


class _Handlers:
    def __init__(self, service: Service, batcher: Batcher) -> None:
        self._service, self._batcher = service, batcher

    async def page(self, _: Request) -> Response:
        headers = {"Content-Security-Policy": POLICY}
        return FileResponse(HERE / "page.html", media_type="text/html", headers=headers)

    async def report(self, _: Request) -> Response:
        try:
            text = await asyncio.to_thread(self._service.report_page)
        except LookupError as error:
            raise RequestError(404, str(error)) from error
        return Response(text.encode(), media_type="text/html")  # its policy is inside

    async def report_data(self, _: Request) -> Response:
        try:
            content = await asyncio.to_thread(lambda: self._service.report_data)
        except LookupError as error:
            raise RequestError(404, str(error)) from error
        return Response(content, media_type="application/octet-stream")

    async def picture(self, request: Request) -> Response:
        try:
            return _answer(await asyncio.to_thread(self._service.picture, request.path_params["sample"]))
        except LookupError as error:
            raise RequestError(404, str(error)) from error

    async def static(self, request: Request) -> Response:
        if request.path_params["name"] not in STATIC:
            raise RequestError(404, "There is no such file.")
        paths, kind = STATIC[request.path_params["name"]]
        return Response("\n".join(path.read_text(encoding="utf-8") for path in paths), media_type=kind)

    async def about(self, _: Request) -> Response:
        return _answer(self._service.about())

    async def ask(self, request: Request) -> Response:
        reader, k = self._service.reader, _integer(request, "k", 8, 1, 50)
        if self._service.index is None or reader is None:
            raise RequestError(
                404,
                "This server cannot answer questions about new inputs: serve an index built by likewise index.",
            )
        raw = await _read_input(request, reader.kind)
        try:
            new = await asyncio.to_thread(reader.read, raw)
            return _answer(await self._batcher.ask(Question(new, k)))
        except MemoryError as error:
            raise RequestError(413, f"The input is too large once decoded: {error}") from error
        except BusyError as error:
            raise RequestError(503, str(error)) from error
        except (
            ValueError,
            TypeError,
            RuntimeError,
        ) as error:  # raised by the model or by --prepare
            raise RequestError(422, f"The input cannot be used: {error}") from error

    async def suspects(self, request: Request) -> Response:
        queue = self._service.queue
        if queue is None:
            raise RequestError(404, "Only an index is served, so there is no run to review.")
        start, count = _integer(request, "start", 0, 0, None), _integer(request, "count", 10, 1, 100)
        samples = await asyncio.to_thread(queue.entries, start, count)
        facts = {"total": len(queue), "flagged": queue.flagged, "start": start, "samples": samples}
        return _answer(facts)

    async def sample(self, request: Request) -> Response:
        queue, sample = self._service.queue, request.path_params["sample"]
        if queue is None or not 0 <= sample < len(queue):
            raise RequestError(404, f"There is no sample {sample}.")
        return _answer(await asyncio.to_thread(queue.entry, sample))

    async def decisions(self, _: Request) -> Response:
        try:
            return _answer(await asyncio.to_thread(self._service.decisions))
        except LookupError as error:
            raise RequestError(404, str(error)) from error

    async def decide(self, request: Request) -> Response:
        _require_type(request, ("application/json",))
        changes = _parse(await _body(request, MOST_BYTES["json"]))
        try:
            return _answer(await asyncio.to_thread(self._service.decide, changes))
        except LookupError as error:
            raise RequestError(404, str(error)) from error
        except FolderLockedError as error:
            raise RequestError(503, str(error)) from error
        except ValueError as error:
            raise RequestError(422, str(error)) from error


class _Guard:
    """Refuses other host names and origins, and adds headers to every response."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, tuple(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        refusal = None
        if _without_port(host) not in self._hosts:
            refusal = _error(421, "This page is not served under that host name.")
        elif origin is not None and origin.partition("://")[2] != host:
            refusal = _error(403, "Requests from other pages are refused.")
        await (refusal or self._app)(scope, receive, send_with_headers)


async def _read_input(request: Request, kind: str) -> Any:
    """Return the input that was sent; raise unless it is of the kind that is served."""
    given = _content_type(request)
    if given in IMAGE_TYPES or given == "application/octet-stream":
        _require_kind("image", kind)
        content = await _body(request, MOST_BYTES["image"])
        if not content:
            raise RequestError(400, "The image is empty.")
        return content
    if given == "text/plain":
        _require_kind("text", kind)
        return _text(await _body(request, MOST_BYTES["text"]))
    if given == "application/json":
        found = _parse(await _body(request, MOST_BYTES["json"]))
        if not isinstance(found, dict) or len(found) != 1 or next(iter(found)) not in ("text", "row"):
            raise RequestError(400, 'Expected {"text": "..."} or {"row": {...}}.')
        name, value = next(iter(found.items()))
        _require_kind(name, kind)
        return _text_value(value) if name == "text" else _row_value(value)
    raise RequestError(
        415,
        f"Expected {', '.join(IMAGE_TYPES[:4])}, text/plain or application/json, found {given or 'no type'}.",
    )


def _require_kind(given: str, kind: str) -> None:
    if given != kind:
        raise RequestError(415, f"Expected an input of kind {kind}, found {given}.")


def _require_type(request: Request, types: Sequence[str]) -> None:
    if _content_type(request) not in types:
        raise RequestError(415, f"Expected {', '.join(types)}, found {_content_type(request) or 'no type'}.")


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _body(request: Request, most: int) -> bytes:
    """Return the body, storing no more of it than is allowed.

    A body that is somewhat too large is read to its end and discarded: a client that is still sending would miss the
    response.
    """
    parts, size = [], 0
    try:
        async with asyncio.timeout(SECONDS_FOR_BODY):
            async for part in request.stream():
                size += len(part)
                if size <= most:
                    parts.append(part)
                elif size > DRAINED * most:
                    break
    except TimeoutError as error:
        raise RequestError(408, f"The request did not arrive within {SECONDS_FOR_BODY} s.") from error
    except ClientDisconnect as error:
        raise RequestError(400, "The connection was closed before the request was complete.") from error
    if size > most:
        raise RequestError(413, f"At most {most:,} bytes are accepted, found {size:,} or more.")
    return b"".join(parts)


def _text(content: bytes) -> str:
    try:
        return _not_blank(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RequestError(400, "The text is not UTF-8.") from error


def _text_value(value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(400, "text must be a string.")
    return _not_blank(value)


def _row_value(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or any(isinstance(cell, dict | list) for cell in value.values()):
        raise RequestError(400, "row must be an object: one number or text for each column.")
    return value


def _not_blank(text: str) -> str:
    if not text.strip():
        raise RequestError(400, "The text is empty.")
    return text


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"The request is not JSON: {str(error)[:100]}.") from error


def _integer(request: Request, name: str, default: int, least: int, most: int | None) -> int:
    text = request.query_params.get(name, str(default))
    allowed = f"at least {least}" if most is None else f"{least} to {most}"
    if (
        not text.isascii()
        or not text.isdigit()
        or len(text) > 9
        or int(text) < least
        or (most and int(text) > most)
    ):
        raise RequestError(400, f"{name} must be a number, {allowed}, found {text[:20]!r}.")
    return int(text)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


def _answer(facts: Any, status: int = 200) -> Response:
    content = json.dumps(_finite(facts), ensure_ascii=False, allow_nan=False)
    return Response(content.encode("utf-8", "replace"), status, media_type="application/json")


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def _error(status: int, message: str) -> Response:
    return _answer({"error": message}, status)


async def _refused(_: Request, error: RequestError) -> Response:
    return _error(error.status, error.message)


async def _not_found(_: Request, error: HTTPException) -> Response:
    return _error(error.status_code, str(error.detail))


async def _failed(_: Request, error: Exception) -> Response:
    return _error(500, f"{type(error).__name__}: {str(error)[:200]}")


def new_token() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_urlsafe(24)
