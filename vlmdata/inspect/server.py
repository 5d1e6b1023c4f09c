"""The served page: a small read-only web application for one dataset, or for the mixture of several.

It answers only GET requests to its own host names. A foreign page whose name is made to resolve to this machine thus
gets nothing. It reads only the dataset: no part of a request ever becomes a file name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlmdata.errors import NotFoundError, UsageError, VlmdataError
from vlmdata.format.dataset import VlmDataset
from vlmdata.inspect.dataset import DatasetCard, suspicious_samples
from vlmdata.inspect.packs import EpochPacks
from vlmdata.inspect.page.build import HtmlPage, build_page
from vlmdata.inspect.page.payload import dataset_name, dataset_payload, safe, sample_payload, summary_payload
from vlmdata.inspect.query import candidates, parse_query, search
from vlmdata.inspect.sample import THUMBNAIL_SIDE, SampleDescriber
from vlmdata.inspect.serialise import to_json
from vlmdata.inspect.versions import VersionHistory
from vlmdata.media.image_file import image_file
from vlmdata.wording import counted

_SAMPLES_A_PAGE, _PACKS_A_PAGE = 40, 8
#: After this time, a text search returns partial results, and the page asks again.
_SEARCH_SECONDS = 0.4
_HTTP, _HTTPS = 80, 443
_USUAL = {"http": _HTTP, "https": _HTTPS}
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class _Count(IntegerConvertor):
    """A whole number of a path. Python converts no text of thousands of digits."""

    regex = "[0-9]{1,15}"


register_url_convertor("count", _Count())


class MixtureApp:
    """The application for any number of datasets: the mixture over the steps, and packs."""

    def __init__(self, name: str, packs: EpochPacks, card: Any = None):
        self._packs = packs
        boot: dict[str, Any] = {"mode": "served", "name": name, "card": card, "samples": [], "packs": None}
        self._built: HtmlPage = build_page(boot, {}, served=True)

    def routes(self) -> list[Route]:
        """Returns all routes. Starlette runs sync functions in threads, so a slow request blocks no other."""
        return [
            Route("/", self._page, methods=["GET"]),
            Route("/api/mixture", self._mixture, methods=["GET"]),
            Route("/api/packs", self._pack_list, methods=["GET"]),
        ]

    def _page(self, request: Request) -> Response:
        policy = self._built.policy + "; frame-ancestors 'none'"
        headers = {"content-security-policy": policy}
        return Response(self._built.html, media_type="text/html; charset=utf-8", headers=headers)

    def _mixture(self, request: Request) -> Response:
        return _json(self._packs.mixture())

    def _pack_list(self, request: Request) -> Response:
        return _json(self._packs.page(_number(request, "start"), _PACKS_A_PAGE))


class InspectApp(MixtureApp):
    """The application for one dataset, with its card, samples, mixture and packs."""

    def __init__(self, dataset: VlmDataset, card: DatasetCard, packs: EpochPacks):
        super().__init__(dataset_name(dataset), packs, dataset_payload(dataset, card))
        self._dataset, self._history = dataset, VersionHistory(dataset)
        self._describe = SampleDescriber(dataset)
        # Candidates of the last few queries, since scrolling repeats the same query.
        suspicious = suspicious_samples(card)
        self._candidates = lru_cache(maxsize=4)(lambda query: candidates(self._describe.facts, query, suspicious))

    def routes(self) -> list[Route]:
        """Returns all routes, also those of samples."""
        return [
            *super().routes(),
            Route("/api/samples", self._list, methods=["GET"]),
            Route("/api/samples/{index:count}", self._sample, methods=["GET"]),
            Route("/api/samples/{index:count}/images/{number:count}", self._image, methods=["GET"]),
            Route("/api/samples/{index:count}/thumbnail", self._thumbnail, methods=["GET"]),
            Route("/api/versions", self._versions, methods=["GET"]),
            Route("/api/versions/compare", self._compare, methods=["GET"]),
        ]

    def _list(self, request: Request) -> Response:
        try:
            query = parse_query(request.query_params.get("query", ""), request.query_params.get("sort", "stored"))
        except UsageError as error:
            raise HTTPException(400, str(error)) from error
        order = self._candidates(query)
        hits = search(
            self._dataset,
            self._describe.texts,
            order,
            query.text,
            start=_number(request, "start"),
            limit=_SAMPLES_A_PAGE,
            seconds=_SEARCH_SECONDS,
        )
        rows = [summary_payload(self._describe, i) for i in hits.samples]
        return _json({"rows": rows, "searched": hits.searched, "candidates": hits.candidates, "done": hits.done})

    def _sample(self, request: Request) -> Response:
        return _json(sample_payload(self._describe(self._index(request))))

    def _image(self, request: Request) -> Response:
        pixels = self._pixels(request, int(request.path_params["number"]), _number(request, "frame"))
        return Response(image_file(pixels, "png"), media_type="image/png")

    def _thumbnail(self, request: Request) -> Response:
        pixels = self._pixels(request, 0)
        return Response(image_file(pixels, "webp", THUMBNAIL_SIDE), media_type="image/webp")

    def _pixels(self, request: Request, number: int, patch: int = 0) -> npt.NDArray[np.uint8]:
        try:
            return self._describe.image(self._index(request), number, patch)
        except NotFoundError as error:
            raise HTTPException(404, str(error)) from error

    def _versions(self, request: Request) -> Response:
        return _json(self._history.page())

    def _compare(self, request: Request) -> Response:
        try:
            return _json(self._history.comparison(_number(request, "first"), _number(request, "second")))
        except UsageError as error:
            raise HTTPException(404, str(error)) from error

    def _index(self, request: Request) -> int:
        index = int(request.path_params["index"])
        if index >= len(self._dataset):
            raise HTTPException(
                404, f"no sample {index}: the dataset has {counted(len(self._dataset), 'sample')}, numbered from 0"
            )
        return index


class Guard:
    """Passes GET requests for the server's own hosts that come from no other site, and adds security headers.

    Hosts and origins are in lower case. ``any_address`` allows any IP address with ``port`` too: a server on all
    interfaces does not know its names, but a site that rebinds its name sends that name.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str], origins: frozenset[str], any_address: bool, port: int):
        self._app, self._hosts, self._origins = app, hosts, origins
        self._any_address, self._port = any_address, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles or rejects a request."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope["method"], Headers(scope=scope))

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        await (refusal or self._app)(scope, receive, send_safely)

    def _refusal(self, method: str, headers: Headers) -> Response | None:
        if not self._is_ours(headers.getlist("host"), self._hosts, ""):
            return _refuse(421, "this server does not serve that host; --allow-host adds its name")
        origins = headers.getlist("origin")
        if origins and not self._is_ours(origins, self._origins, "http://"):
            return _refuse(403, "requests from other sites are rejected")
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return _refuse(403, "requests from other sites are rejected")
        return None if method == "GET" else _refuse(405, "only GET is allowed", {"allow": "GET"})

    def _is_ours(self, values: Sequence[str], ours: frozenset[str], scheme: str) -> bool:
        if len(values) != 1:
            return False
        value = values[0].lower()
        if value in ours:
            return True
        name, port = _name_and_port(value.removeprefix(scheme))
        return self._any_address and value.startswith(scheme) and (port or _HTTP) == self._port and _is_address(name)


def build_app(served: MixtureApp, *, host: str, port: int, names: Sequence[str] = ()) -> Starlette:
    """Builds the guarded application that listens on an address and port.

    ``names`` are additional host names, with a port or for the usual ones.

    Raises:
        UsageError: If such a name is none.
    """
    hosts, origins = _ours(host, port, names)
    everywhere = _is_address(_bracketed(host)) and ipaddress.ip_address(host.strip("[]")).is_unspecified
    guard = Middleware(Guard, hosts=hosts, origins=origins, any_address=everywhere, port=port)
    handlers: Any = dict.fromkeys((HTTPException, VlmdataError, Exception), _failed)
    return Starlette(routes=served.routes(), middleware=[guard], exception_handlers=handlers)


def _ours(host: str, port: int, names: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the host headers and the origins that are this server's.

    Browsers leave out port 80 of HTTP and 443 of HTTPS. ``names`` may be those of a proxy, which may serve either.
    """
    hosts, origins = set[str](), set[str]()

    def add(scheme: str, name: str, port: int) -> None:
        places = [f"{name}:{port}".lower()] + [name.lower()] * (_USUAL[scheme] == port)
        hosts.update(places)
        origins.update(f"{scheme}://{place}" for place in places)

    for own in ("127.0.0.1", "localhost", "::1", host):
        add("http", _bracketed(own), port)
    for given in names:
        name, at = _name_and_port(given)
        if not name or set("/@ ") & set(name):
            raise UsageError(f"--allow-host {given}: give a host name, such as data.example.com, without http://")
        for each in (port, _HTTP, _HTTPS) if at is None else (at,):
            add("http", name, each)
            add("https", name, each)
    return frozenset(hosts), frozenset(origins)


def _failed(request: Request, error: Exception) -> Response:
    """Answers with the message, which the page shows instead of a sample. Starlette prints an unexpected traceback."""
    if isinstance(error, HTTPException):
        return _json({"error": error.detail}, error.status_code)
    message = safe(str(error))
    if not isinstance(error, VlmdataError):
        message = f"{type(error).__name__}: {message}. Run `vlmdata verify` for details."
    return _json({"error": message}, 500)


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


def _refuse(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return Response(message + "\n", status, media_type="text/plain", headers=headers)


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise HTTPException(400, f"{name} is {text[:40]!r}; it must be a whole number, at least 0")
    return int(text)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _name_and_port(host: str) -> tuple[str, int | None]:
    """Splits ``name:8765``, ``[::1]:8765``, or either of them without a port. An IPv6 address gets brackets."""
    if not _is_address(host):
        name, _, port = host.rpartition(":")
        if name and port.isascii() and port.isdecimal() and len(port) <= 5:
            return name, int(port)
    return _bracketed(host), None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
