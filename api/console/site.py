"""Renders the console's pages from packaged files, guards them, and asks the database for them in threads of their own."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import jinja2
from fastapi import APIRouter, Request
from markupsafe import Markup
from starlette.responses import RedirectResponse, Response

from api.door import CONSOLE, COOKIE, NOT_ALLOWED, NOT_AUTHENTICATED, TokenRefused, caller_of
from api.permissions import may_operate, require_may_operate
from api.problems import NOT_FOUND, Problem, invalid, problem_of
from api.requests import body_of
from api.services import Services, services_of
from domain.engine.personal.tokens import hidden_value, key_ids, opened_value
from infra.access import Right
from infra.database.connect import Connection, DatabaseUnavailable, session
from infra.errors import SamefoldError, printable
from infra.processes.code_identity import CODE_DIGEST
from infra.tls import is_loopback

log = logging.getLogger(__name__)

T = TypeVar("T")
Page: TypeAlias = Callable[[Request], Awaitable[Response]]

HERE = Path(__file__).parent
MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
STATIC = {file.name: (file.read_bytes(), MEDIA_TYPES[file.suffix]) for file in (HERE / "static").iterdir()}
POLICY = "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; frame-ancestors 'none'; form-action 'self'"
"""Beside the header of all answers: no script and no style but those of the files."""
THREADS = 4
QUESTION_S = 4.0
"""For one section of a page: then it says that the database is silent, and the page stands."""
STATEMENT_MS = 3_000
MOST_FIELDS = 1_000
LONGEST_FORM = 4 * 2**20
"""A command of a mebibyte, each byte of which takes three where the form encodes it."""
LONGEST_COOKIE = 3_900
"""Bytes of a token, of the four thousand that browsers keep of a cookie."""
LONGEST_SHOWN = 2_000
"""Characters of one value on a page."""


class Section(NamedTuple, Generic[T]):
    """A part of a page: what was found, or why it was not."""

    found: T | None
    error: SamefoldError | None


class Console:
    """What the pages of one API process share."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self._threads = ThreadPoolExecutor(THREADS, "console")
        self._of_kafka = ThreadPoolExecutor(THREADS, "console and Kafka")

    async def ask(self, question: Callable[[Connection], T]) -> Section[T]:
        """The answer of the database, from a connection and a thread of its own."""
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._asked, question)
        try:
            return Section(await asyncio.wait_for(work, QUESTION_S), None)
        except TimeoutError:
            silent = DatabaseUnavailable(
                f"PostgreSQL has not answered for {QUESTION_S:g} s.", "Look again in a moment."
            )
            return Section(None, silent)
        except SamefoldError as error:
            return Section(None, error.with_traceback(None))

    async def must(self, question: Callable[[Connection], T]) -> T:
        """As `ask`, for what a page is nothing without. Raises what the question raises, DatabaseUnavailable."""
        section = await self.ask(question)
        if section.error is not None:
            raise section.error
        return cast(T, section.found)

    def of_kafka(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Work that waits for the brokers, in a thread that nothing else needs."""
        return asyncio.get_running_loop().run_in_executor(self._of_kafka, work)

    def _asked(self, question: Callable[[Connection], T]) -> T:
        with session(
            self.services.settings, "samefold console", statement_timeout_ms=STATEMENT_MS, by_key=True
        ) as connection:
            return question(connection)


def console_of(request: Request) -> Console:
    console: Console = request.app.state.console
    return console


# ── what the templates call ──


def ago(moment: datetime | None) -> Markup:
    """A time as people say it, with the exact one when they point at it."""
    if moment is None:
        return Markup("–")
    exact = moment.astimezone(UTC).isoformat(" ", "milliseconds").replace("+00:00", " UTC")
    template = Markup('<time datetime="{}" title="{}">{}</time>')
    return template.format(moment.isoformat(), exact, roughly((datetime.now(UTC) - moment).total_seconds()))


def roughly(seconds: float) -> str:
    """`12 s ago`, `in 3 min`."""
    far = abs(seconds)
    steps = (("s", 1, 100), ("min", 60, 6_000), ("h", 3_600, 172_800), ("d", 86_400, float("inf")))
    text = next(f"{far / length:.0f} {unit}" for unit, length, most in steps if far < most)
    return f"{text} ago" if seconds >= 0 else f"in {text}"


def size(count: int | None) -> str:
    """Bytes in words."""
    if count is None:
        return "–"
    scaled, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if scaled < 1_000 or unit == "TB":
            break
        scaled /= 1_000
    return f"{scaled:.0f} {unit}" if unit == "B" or scaled >= 100 else f"{scaled:.1f} {unit}"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: `0–3, 7`."""
    runs: list[list[int]] = []
    for one in numbers:
        if runs and one == runs[-1][-1] + 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs) or "none"


def cut(value: Any) -> str:
    """A value as a text that a page can hold."""
    text = printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), keep="\n")
    left = len(text) - LONGEST_SHOWN
    return text if left <= 0 else f"{text[:LONGEST_SHOWN]}… and {left:,} characters more"


def url(path: str, **query: Any) -> str:
    """An address within the console."""
    given = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{CONSOLE}{path}{'?' if given else ''}{urlencode(given, quote_via=quote, errors='replace')}"


TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE / "templates"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)
TEMPLATES.filters |= {"ago": ago, "size": size, "number": number, "spans": spans, "cut": cut}
TEMPLATES.globals |= {"url": url, "code": CODE_DIGEST}


def values_of(request: Request, current: str) -> dict[str, Any]:
    """What the frame of each page shows."""
    caller = caller_of(request)
    return {
        "current": current,
        "service": services_of(request).settings.group_prefix,
        "subject": caller.subject if caller else None,
        "may_change": may_operate(request, "change"),
        # not of what a form was answered with: to load that again is to send the form again
        "reloads": request.method == "GET" and services_of(request).settings.auth == "off",
    }


def page(request: Request, template: str, status: int = 200, **values: Any) -> Response:
    frame = values_of(request, template.partition(".")[0])
    text = TEMPLATES.get_template(template).render(frame | values)
    return Response(text, status, {"Content-Security-Policy": POLICY}, "text/html; charset=utf-8")


# ── who may see and send what ──


def add(router: APIRouter, path: str, function: Page, right: Right = "look", method: str = "GET") -> None:
    """A page of the console, for callers with that right."""
    endpoint = partial(_answered, function, right)
    router.add_api_route(f"{CONSOLE}{path}", endpoint, methods=[method], include_in_schema=False, response_model=None)


async def _answered(function: Page, right: Right, request: Request) -> Response:
    """The function's page, or one that says why there is none."""
    try:
        _require_own_page(request)
        require_may_operate(request, right)
        return await function(request)
    except Problem as problem:
        return refused(request, problem)
    except SamefoldError as error:
        return refused(request, problem_of(error), error)


def refused(request: Request, problem: Problem, error: SamefoldError | None = None) -> Response:
    """A page with what is wrong. It is for those who run the service: an error's own words are not kept from them."""
    kind, members = problem.kind, problem.members
    text = error.message if error else problem.detail
    hint = error.hint if error else members.get("hint", "")
    values = {"kind": kind, "text": text, "hint": hint, "errors": members.get("errors", ())}
    return page(request, "refused.html", kind.status, **values)


def _require_own_page(request: Request) -> None:
    """Raises Problem 403 where another site has a browser ask for it.

    Of what changes something a browser says which page sends it. Without a token, a name that another site resolves to this machine
    would do for its scripts to be of the same origin (DNS rebinding).
    """
    host = request.headers.get("host", "")
    if services_of(request).settings.auth == "off" and not is_loopback(_name_in(f"//{host}")):
        raise NOT_ALLOWED("Without SAMEFOLD_AUTH the console answers under this machine's own names only: localhost.")
    if request.method == "POST":
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        is_own = site == "same-origin" if site is not None else origin in (f"http://{host}", f"https://{host}")
        if not is_own:
            raise NOT_ALLOWED("The form comes from another site: send it from the console's own page.")


def _name_in(address: str) -> str:
    """The host's name, without its port; "" where there is none."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


async def form_of(request: Request, most: int = LONGEST_FORM) -> dict[str, str]:
    """The fields of a form that was sent. Raises Problem 413, 422."""
    body = await body_of(request, most)
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="strict")
    except ValueError:
        raise invalid([("body", "it is no form")]) from None
    return dict(pairs)


async def opened(request: Request, value: Any) -> Any:
    """The value with personal values as the caller may see them: as they are, or hidden."""
    services = services_of(request)
    ids = key_ids(json.dumps(value, ensure_ascii=False, default=str)) if services.keys else ()
    if not ids or services.keys is None:
        return value
    if not may_operate(request, "see personal values"):
        return hidden_value(value)
    async with services.pool.connection() as connection:
        return opened_value(value, await services.keys.keys_for_async(connection, ids))


# ── signing in ──


async def sign_in(request: Request) -> Response:
    """A page for a token, which the browser then keeps in a cookie that no script can read."""
    services = services_of(request)
    if services.issuer is None:
        return RedirectResponse(CONSOLE, 303)
    if request.method != "POST":
        return _signing_in(request, 200)
    try:
        _require_own_page(request)
        token = (await form_of(request, 4 * LONGEST_COOKIE)).get("token", "").strip()
        if len(token) > LONGEST_COOKIE:
            raise TokenRefused("No browser keeps a token of that size: let a gateway send it as Authorization.")
        caller, until = await services.issuer.caller_of(token)
    except TokenRefused as error:
        log.warning("refused a token at the console: %s", error.message)
        return _signing_in(request, NOT_AUTHENTICATED.status, error.message)
    except SamefoldError as error:
        return _signing_in(request, 503, str(error))
    except Problem as problem:
        return _signing_in(request, problem.kind.status, problem.detail)
    log.info("%r signs in to the console", caller.subject)
    answer = RedirectResponse(CONSOLE, 303)
    options: dict[str, Any] = {"max_age": max(int(until - time.time()), 1), "path": CONSOLE, "httponly": True}
    is_near = is_loopback(_name_in(f"//{request.headers.get('host', '')}"))
    answer.set_cookie(COOKIE.decode(), token, samesite="lax", secure=not is_near, **options)
    return answer


async def sign_out(_request: Request) -> Response:
    answer = RedirectResponse(f"{CONSOLE}/sign-in", 303)
    answer.delete_cookie(COOKIE.decode(), path=CONSOLE)
    return answer


def _signing_in(request: Request, status: int, problem: str = "") -> Response:
    return page(request, "sign-in.html", status, problem=problem, subject=None, reloads=False)


async def static(request: Request) -> Response:
    found = STATIC.get(request.path_params["name"])
    if found is None:
        raise NOT_FOUND()
    return Response(found[0], media_type=found[1])


async def no_page(request: Request) -> Response:
    if request.path_params["path"] == "":
        return RedirectResponse(CONSOLE, 303)
    raise NOT_FOUND()


async def code(request: Request) -> Response:
    """While developing: whether a page that is open was made by this very code; else htmx loads it again."""
    is_same = request.query_params.get("is") == CODE_DIGEST
    return Response(status_code=204, headers={} if is_same else {"HX-Refresh": "true"})


def add_frame(router: APIRouter) -> None:
    """What is no page of its own."""
    for path, function, methods in (
        ("/static/{name}", static, ["GET"]),
        ("/sign-in", sign_in, ["GET", "POST"]),
        ("/sign-out", sign_out, ["POST"]),
    ):
        router.add_api_route(
            f"{CONSOLE}{path}", function, methods=methods, include_in_schema=False, response_model=None
        )
    add(router, "/code", code)
