"""make test + test-all: `make test` must pass where nginx is not installed.

docs/behind-a-proxy.md: nginx runs the page's lines and protects the API as it says; commands, rows and live rows come through.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from api import feeds, server
from api.issuer import MAX_TOKEN_BYTES
from api.requests import LONGEST_WAIT_S
from infra.log.clients import MAX_COMMAND_BYTES
from infra.settings import Settings
from tests.engine.api.api import DAY, Api, everything, problem
from tests.engine.api.raw_http import HOST, answer, head, post
from tests.engine.infra.secure import Authority
from tools.dev.process import free_ports
from tools.testing.fixtures import ROOT
from tools.testing.waiting import DEADLINE_S, until

PAGE = (ROOT / "docs" / "behind-a-proxy.md").read_text()
NGINX = re.findall(r"```nginx\n(.*?)```", PAGE, re.DOTALL)[0]
ENVOY = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])
OTHER_HOST = "127.0.0.2"
HALF_A_HEAD = b"GET /views HTTP/1.1\r\nHost: te"
HALF_A_BODY = head("POST", "/accounts/slow/deposit", [("Content-Type", "application/json"), ("Content-Length", "100")])


class Proxy:
    """nginx with the page's lines, on a port of this test's and in front of another one."""

    def __init__(self, port: int, trusted: ssl.SSLContext) -> None:
        self.port = port
        self.url = f"https://{HOST}:{port}"
        self.trusted = trusted

    @contextmanager
    def connection(self, source: str = HOST) -> Iterator[ssl.SSLSocket]:
        """One from that address of this machine."""
        plain = socket.create_connection((HOST, self.port), DEADLINE_S, (source, 0))
        with self.trusted.wrap_socket(plain, server_hostname=HOST) as opened:
            yield opened

    def status(self, request: bytes, source: str = HOST) -> int:
        with self.connection(source) as opened:
            opened.sendall(request)
            return answer(opened).status


@contextmanager
def nginx(folder: Path, *behind: int) -> Iterator[Proxy]:
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.fail("nginx is not installed: `apt-get install nginx-light` (Debian, Ubuntu), `brew install nginx`")
    authority, [port] = Authority("proxies"), free_ports(1)
    authority.write(folder, "bank")
    [server] = re.findall(r"^ +server 127\.0\.0\.1:8000 .*\n", NGINX, re.MULTILINE)
    lines = NGINX.replace(server, "".join(server.replace("127.0.0.1:8000", f"{HOST}:{one}") for one in behind))
    for of_page, here in (
        ("listen 443 ", f"listen {HOST}:{port} "),
        ("/etc/ssl/bank", f"{folder}/bank"),
    ):
        assert of_page in lines
        lines = lines.replace(of_page, here)
    folders = "\n".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/log;\n"
        f"events {{ worker_connections 2000; }}\nhttp {{ access_log off;\n{folders}\n{lines}}}\n"
    )
    with (folder / "output").open("wb") as output:
        command = [program, "-e", str(folder / "log"), "-p", str(folder), "-c", str(folder / "nginx.conf")]
        running = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        until(lambda: listens(port) or running.poll() is not None, "nginx listens")
        assert running.poll() is None, (folder / "output").read_text()
        yield Proxy(port, ssl.create_default_context(cadata=authority.pem))
    finally:
        running.terminate()
        running.wait(DEADLINE_S)


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex((HOST, port)) == 0


@pytest.fixture(scope="module")
def api(shared_world: Settings) -> Iterator[Api]:
    with everything(shared_world) as running:
        yield running


@pytest.fixture
def proxy(api: Api, tmp_path: Path) -> Iterator[Proxy]:
    with nginx(tmp_path, api.server.port) as running:
        yield running


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[tuple[Proxy, socket.socket]]:
    """In front of what takes every connection and answers nothing."""
    with (
        socket.create_server((HOST, 0), backlog=500) as listening,
        nginx(tmp_path, listening.getsockname()[1]) as proxy,
    ):
        listening.setblocking(False)
        yield proxy, listening


@pytest.fixture
def client(proxy: Proxy) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=proxy.url, verify=proxy.trusted, timeout=DEADLINE_S) as client:
        yield client


@pytest.mark.slow
def test_a_command_and_a_row_come_through_whatever_is_in_the_streams_name(client: httpx.Client) -> None:
    opened = client.post("/accounts/through%2Fit/open-account", json={"overdraft_limit": 0, "on": DAY})
    assert (opened.status_code, opened.json()["stream"]) == (200, "accounts/through/it")
    row = client.get("/views/balances/through%2Fit", params={"after": opened.json()["position"]})
    assert (row.status_code, row.json()["row"]["account"]) == (200, "through/it")
    refused = client.post("/accounts/through%2Fit/withdraw", json={"cents": 1, "on": DAY})
    assert refused.status_code == 409
    for one in (opened, row, refused, client.get("/nothing")):
        assert one.headers["Strict-Transport-Security"] == "max-age=31536000"
        assert one.headers.get_list("X-Content-Type-Options") == ["nosniff"]
        assert one.headers["Server"] == "nginx"


@pytest.mark.slow
def test_live_rows_come_through_at_once_and_go_on_behind_the_last_one_seen(api: Api, client: httpx.Client) -> None:
    api.open("watched")
    with live(client) as events:
        first = next(events)
        api.post("watched", "deposit", cents=5)
        assert (first["cents"], next(events)["cents"]) == (0, 5)
        seen = first["id"]
    with live(client, {"Last-Event-ID": seen}) as events:
        assert next(events)["cents"] == 5


@contextmanager
def live(client: httpx.Client, headers: dict[str, str] | None = None) -> Iterator[Iterator[dict[str, Any]]]:
    def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
        fields: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(": ")
            fields[name] = value
            if not line and "data" in fields:
                yield {"id": fields["id"]} | json.loads(fields.pop("data"))["row"]

    with client.stream("GET", "/views/balances/watched/live", headers=headers) as answer:
        assert answer.status_code == 200
        yield events(answer.iter_lines())


@pytest.mark.slow
def test_a_request_that_arrives_slowly_is_cut_off_and_never_reaches_the_api(
    silent: tuple[Proxy, socket.socket],
) -> None:
    proxy, listening = silent
    with ExitStack() as stack:
        slow = [stack.enter_context(proxy.connection()) for _ in range(2)]
        for one, begun in zip(slow, (HALF_A_HEAD, HALF_A_BODY), strict=True):
            one.sendall(begun)
        assert [one.recv(1) for one in slow] == [b"", b""]
    with pytest.raises(BlockingIOError):
        listening.accept()


@pytest.mark.slow
def test_one_address_may_have_only_so_many_requests_at_once(silent: tuple[Proxy, socket.socket]) -> None:
    proxy, listening = silent
    request = head("GET", "/views/balances/ada/live")
    with ExitStack() as stack:

        def has_reached_the_api() -> bool:
            with suppress(BlockingIOError):
                stack.enter_context(listening.accept()[0])
                return True
            return False

        for _ in range(100):
            stack.enter_context(proxy.connection()).sendall(request)
            until(has_reached_the_api, "the request comes through")
        assert proxy.status(request) == 429
        stack.enter_context(proxy.connection(OTHER_HOST)).sendall(request)
        until(has_reached_the_api, "another address has its own share")


@pytest.mark.slow
def test_one_address_may_send_only_so_many_requests_a_second(tmp_path: Path) -> None:
    """Before nothing: nginx answers 502 itself, and so fast that they come within a second or two on any machine."""
    [nobody] = free_ports(1)
    with nginx(tmp_path, nobody) as proxy:

        def statuses(source: str = HOST) -> list[int]:
            with proxy.connection(source) as opened:
                opened.sendall(100 * head("GET", "/health/live"))
                return [answer(opened).status for _ in range(100)]

        counted = Counter(status for _ in range(12) for status in statuses())
        assert counted.keys() == {429, 502}
        assert counted[502] >= 400
        assert statuses(OTHER_HOST) == [502] * 100


@pytest.mark.slow
def test_a_process_that_was_away_gets_requests_as_soon_as_it_is_back(tmp_path: Path) -> None:
    """Of two: nginx never leaves out the only one."""
    ports = free_ports(2)
    with nginx(tmp_path, *ports) as proxy:
        assert proxy.status(head("GET", "/health/live")) == 502
        with HTTPServer((HOST, ports[0]), BaseHTTPRequestHandler) as back, ThreadPoolExecutor(1) as pool:
            pool.submit(back.serve_forever)
            try:
                assert proxy.status(head("GET", "/health/live")) == 501
            finally:
                back.shutdown()


@pytest.mark.slow
def test_what_is_too_large_ends_at_nginx_and_a_command_that_is_too_large_at_the_api(
    proxy: Proxy, client: httpx.Client
) -> None:
    assert proxy.status(head("GET", "/views", [("X", "x" * 17_000)])) in {400, 431}
    assert proxy.status(head("GET", f"/views?after={'x' * 17_000}")) == 414
    assert client.get("/views", headers={"Authorization": "Bearer " + "x" * MAX_TOKEN_BYTES}).status_code == 200
    assert proxy.status(post("/accounts/large/deposit", b" " * 600_000)) == 413
    large = client.post("/accounts/large/deposit", content=b" " * 300_000, headers={"Content-Type": "application/json"})
    problem(large, 413, "too-large")


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_the_times_and_sizes_of_both_proxies_fit_those_of_the_api() -> None:
    of_nginx = dict(re.findall(r"(\w+) (\S+);", NGINX))
    [listener], [cluster] = ENVOY["static_resources"]["listeners"], ENVOY["static_resources"]["clusters"]
    connections, manager = (one["typed_config"] for one in listener["filter_chains"][0]["filters"])
    [buffer] = [one["typed_config"] for one in manager["http_filters"] if "max_request_bytes" in one["typed_config"]]
    pool = next(iter(cluster["typed_extension_protocol_options"].values()))
    patient = max(LONGEST_WAIT_S, feeds.HEARTBEAT_S)
    assert min(seconds(of_nginx["proxy_read_timeout"]), seconds(manager["stream_idle_timeout"])) > patient
    assert (
        min(int(of_nginx["client_max_body_size"].removesuffix("k")) * 1_024, buffer["max_request_bytes"])
        > MAX_COMMAND_BYTES
    )
    assert manager["max_request_headers_kb"] * 1_024 > 1.5 * MAX_TOKEN_BYTES
    assert seconds(pool["common_http_protocol_options"]["idle_timeout"]) < server.KEEP_ALIVE_S
    assert max(int(re.findall(r"max_conns=(\d+)", NGINX)[0]), connections["max_connections"]) < server.MAX_CONNECTIONS
    assert "Strict-Transport-Security" in str(manager["route_config"]["response_headers_to_add"])
