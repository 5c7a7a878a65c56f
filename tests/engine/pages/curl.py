"""The curl lines of documents, done by httpx: a machine that runs the tests need not have curl."""

from __future__ import annotations

import argparse
import shlex

import httpx

from tools.testing.waiting import DEADLINE_S


def curl(line: str, base_url: str | None = None) -> httpx.Response:
    """What a line with `--json BODY` and `-H 'Name: value'` asks for, at its own URL or at the same path of another server."""
    parser = argparse.ArgumentParser("curl", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("url", type=httpx.URL)
    parser.add_argument("--json")
    parser.add_argument("-H", action="append", default=[])
    given = parser.parse_args(shlex.split(line.removeprefix("curl ")))
    headers = dict(header.split(": ", 1) for header in given.H)
    url: httpx.URL = given.url if base_url is None else httpx.URL(base_url).join(given.url.raw_path.decode())
    if given.json is None:
        return httpx.get(url, headers=headers, timeout=DEADLINE_S)
    headers |= {"Content-Type": "application/json", "Accept": "application/json"}  # as curl's --json does
    return httpx.post(url, headers=headers, content=given.json, timeout=DEADLINE_S)
