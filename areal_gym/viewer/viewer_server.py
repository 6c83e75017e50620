"""The viewer's web server: pages and JSON over run directories.

    GET /                                      the page; everything else it asks for here:
    GET /api/runs                              cards of all runs
    GET /api/listing?since=CURSOR              cards that have changed since an earlier answer
    GET /api/runs/RUN                          settings, provenance, evaluations, files
    GET /api/runs/RUN/pulse                    what changes while a run goes on
    GET /api/runs/RUN/curves?after=STEP        columns of metrics.jsonl
    GET /api/runs/RUN/FILE?start=&limit=       a page of a file's trajectories
    GET /api/runs/RUN/FILE/search?q=TEXT       places of trajectories with a text
    GET /api/runs/RUN/FILE/PLACE               one trajectory
    GET /api/runs/RUN/images/SHA256            a picture of its store
    GET /api/evaluations                       cards of all evaluations
    GET /api/evaluations/ID                    one, with all that it says of itself
    GET /api/evaluations/ID/samples?start=&limit=    a page of its samples
    GET /api/evaluations/ID/samples/PLACE      the trajectory of a sample
    POST /api/runs/RUN/notes                   set tags and note: {"tags": [...], "note": "..."}
    POST /api/runs/RUN/delete                  move the run to the trash: {}

By default it answers only to this machine, and only under the machine's own names, so that a web
site cannot reach it through the browser. Other machines need the token, which a cookie keeps.
Nothing but the two POSTs writes; they are taken from the viewer's own pages only, which browsers
name as `Origin`, and from none with `is_read_only`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal_gym.errors import DataError, GymError, UnknownIdError
from areal_gym.run_dir.run_notes import RunNotes, move_to_trash
from areal_gym.run_dir.shown_images import read_shown
from areal_gym.utils.files import MAX_JSON_DEPTH, is_nested_deeper, to_json
from areal_gym.utils.http_servers.addresses import host_name, is_loopback, is_same_secret
from areal_gym.utils.http_servers.asgi_site import serve_asgi
from areal_gym.utils.http_servers.connections import ConnectionLimits
from areal_gym.viewer.catalog import Catalog, Run
from areal_gym.viewer.evaluation_catalog import EvaluationCatalog
from areal_gym.viewer.run_listing import RunListing

STATIC = resources.files("areal_gym.viewer").joinpath("static")

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_COOKIE = "areal-gym-viewer"
_MAX_BODY_BYTES = 2**16
"""The limit of requests; only notes have a body."""


def make_app(catalog: Catalog, *, token: str | None = None, is_read_only: bool = False) -> ASGIApp:
    """Make the application.

    A browser must send the `token`; without one, only requests to a name of this machine are
    answered. With `is_read_only`, runs can be neither annotated nor deleted.
    """
    listing = RunListing(catalog, _card)
    evaluations = EvaluationCatalog(catalog)

    async def runs(request: Request) -> Response:
        return await _answer(lambda: [_card(run) for run in catalog.runs()])

    async def changes(request: Request) -> Response:
        since = request.query_params.get("since", "")
        return await _answer(lambda: {**listing.changes(since), "is_read_only": is_read_only})

    def edit(path: str, make: Callable[[Run, dict[str, Any]], Any]) -> Route:
        async def endpoint(request: Request) -> Response:
            if is_read_only:
                return Response("this viewer is read-only: it was started with --read-only", 403)
            body = await _object(request)
            return await _answer(lambda: make(catalog.run(request.path_params["run"]), body))

        return Route(f"/api/runs/{{run}}{path}", endpoint, methods=["POST"])

    def of_run(path: str, make: Callable[[Run, Request], Any]) -> Route:
        async def endpoint(request: Request) -> Response:
            return await _answer(lambda: make(catalog.run(request.path_params["run"]), request))

        return Route(f"/api/runs/{{run}}{path}", endpoint)

    def of_evaluation(path: str, make: Callable[[str, Request], Any]) -> Route:
        async def endpoint(request: Request) -> Response:
            return await _answer(lambda: make(request.path_params["id"], request))

        return Route(f"/api/evaluations{path}", endpoint)

    def sample(id: str, request: Request) -> Any:
        text = request.path_params["place"]
        if (place := _number(text)) is None:
            raise UnknownIdError(f"{id} has no sample {text!r}")
        return evaluations.trajectory(id, place)

    def samples(id: str, request: Request) -> Any:
        return evaluations.page(id, _whole(request, "start", 0), _whole(request, "limit", 5_000))

    async def every_evaluation(request: Request) -> Response:
        return await _answer(evaluations.cards)

    app = Starlette(
        routes=[
            Route("/", _page),
            Route("/static/{name}", _static),
            Route("/api/runs", runs),
            Route("/api/listing", changes),
            Route("/api/evaluations", every_evaluation),
            of_evaluation("/{id}", lambda id, request: evaluations.about(id)),
            Route(
                "/api/evaluations/{id}/images/{sha256}", _image_of(evaluations.directory_of, "id")
            ),
            of_evaluation("/{id}/samples", samples),
            of_evaluation("/{id}/samples/{place}", sample),
            Route("/api/runs/{run}/images/{sha256}", _image_of(catalog.run, "run")),
            edit("/notes", _save_notes),
            edit("/delete", _delete),
            of_run("", lambda run, request: run.about()),
            of_run("/pulse", lambda run, request: run.pulse()),
            of_run("/curves", lambda run, request: run.curves(_whole(request, "after", 0))),
            of_run("/{file}", _rows),
            of_run("/{file}/search", _search),
            of_run("/{file}/{place}", _detail),
        ],
        exception_handlers={GymError: _refuse},
    )
    return _Door(app, token)


async def serve(
    app: ASGIApp, listener: socket.socket, *, limits: ConnectionLimits | None = None
) -> None:
    """Answer requests until cancelled."""
    with contextlib.suppress(asyncio.CancelledError):
        await serve_asgi(app, listener, limits=limits, max_body_bytes=_MAX_BODY_BYTES)


def _rows(run: Run, request: Request) -> Any:
    start, limit = _whole(request, "start", 0), _whole(request, "limit", 5_000)
    return run.page(request.path_params["file"], start, limit)


def _search(run: Run, request: Request) -> Any:
    return run.file(request.path_params["file"]).search(request.query_params.get("q", ""))


def _detail(run: Run, request: Request) -> Any:
    file, place = request.path_params["file"], _number(request.path_params["place"])
    if place is None:
        raise UnknownIdError(f"{file} has no trajectory {request.path_params['place']!r}")
    return run.trajectory(file, place)


def _save_notes(run: Run, body: dict[str, Any]) -> Any:
    notes = RunNotes.from_dict(body)
    notes.save(run.directory)
    return {"tags": list(notes.tags), "note": notes.note}


def _delete(run: Run, body: dict[str, Any]) -> Any:
    return {"moved_to": str(move_to_trash(run.directory))}


async def _object(request: Request) -> dict[str, Any]:
    """Return the JSON object in a request, or raise DataError."""
    raw = await request.body()
    try:
        body = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or is_nested_deeper(body, MAX_JSON_DEPTH):
        raise DataError('the body of this request is not a JSON object, such as {"note": "..."}')
    return body


class _Door:
    """Lets in requests from here, or with the token, and says what a page may do."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        request = Request(scope)
        answer = self._turned_away(request) or _foreign_write(request) or self._app
        await answer(scope, receive, send_guarded)

    def _turned_away(self, request: Request) -> Response | None:
        if self._token is None:
            if is_loopback(host_name(request.headers.get("host", ""))):
                return None
            return Response("this viewer answers to its machine's own names only", 403)
        given = request.query_params.get("token")
        if given is not None and is_same_secret(given, self._token):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(_COOKIE, self._token, httponly=True, samesite="strict")
            return answer
        if is_same_secret(request.cookies.get(_COOKIE, ""), self._token):
            return None
        return Response("open the address that `areal-gym view` printed: it holds a token", 401)


def _foreign_write(request: Request) -> Response | None:
    """Refuse a request that could change something and is not of one of the viewer's own pages.

    Browsers add `Origin` to every POST, and no page can set it to another value.
    """
    if request.method in ("GET", "HEAD"):
        return None
    try:
        origin = urlsplit(request.headers.get("origin", ""))
        is_own = origin.scheme in ("http", "https") and origin.netloc != ""
        is_own = is_own and origin.netloc.lower() == request.headers.get("host", "").lower()
    except ValueError:
        is_own = False
    if is_own:
        return None
    return Response("only the viewer's own pages may change runs", 403)


def _image_of(
    find: Callable[[str], Run | Path], name: str
) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of the pictures in the stores of these directories."""

    async def endpoint(request: Request) -> Response:
        place, sha256 = find(request.path_params[name]), request.path_params["sha256"]
        directory = place if isinstance(place, Path) else place.path
        png = await asyncio.to_thread(read_shown, directory, sha256)
        if png is None:
            return Response("no such picture", 404)
        return Response(png, media_type="image/png")

    return endpoint


async def _page(request: Request) -> Response:
    return Response(STATIC.joinpath("index.html").read_bytes(), media_type="text/html")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    known = {file.name: file for file in STATIC.iterdir()}
    kind = _KINDS.get(name[name.rfind(".") :])
    if name not in known or kind is None:
        return Response("no such file", 404)
    return Response(known[name].read_bytes(), media_type=kind)


async def _answer(make: Callable[[], Any]) -> Response:
    return _json(await asyncio.to_thread(_made, make))


def _made(make: Callable[[], Any]) -> str:
    try:
        return to_json(make())
    except GymError:
        raise
    except Exception as error:
        # Files of a run may hold anything; whatever fails while one is read is their fault.
        raise DataError(f"a file of this run does not hold what runs write: {error!r}") from error


def _card(run: Run) -> dict[str, Any]:
    """Return the card of a run, or one that says why it cannot be read."""
    try:
        card = run.card()
        to_json(card)
    except Exception as error:
        return {**Run.EMPTY_CARD, "name": run.name, "problems": [f"{error}"]}
    return card


def _json(text: str, status: int = 200) -> Response:
    # Half a surrogate pair, which a policy may well sample, is no UTF-8.
    return Response(text.encode("utf-8", "replace"), status, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, GymError)
    status = 404 if isinstance(error, UnknownIdError) else 422
    return _json(to_json({"error": error.message, "hints": list(error.hints)}), status)


def _whole(request: Request, name: str, default: int) -> int:
    number = _number(request.query_params.get(name, ""))
    return default if number is None else number


def _number(text: str) -> int | None:
    # A whole number that could count something.
    return int(text) if re.fullmatch("[0-9]{1,15}", text) else None
