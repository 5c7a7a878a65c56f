"""What the framework alone can do: FastAPI under uvicorn as the API runs there, answering each command with a constant.

`python -m benchmarks.peers.constant --port 8001`, until SIGTERM. It reads the body and looks at nothing.
"""

from __future__ import annotations

from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response

from benchmarks.child import flags

ANSWER = (
    b'{"outcome":"accepted","stream":"accounts/000000","command_id":"00000000000000000000000000000000","version":1,'
    b'"position":"1.AAAAAAAAAAAAAAAAAAAAAA.0-0","at":"2026-01-02T00:00:00.000Z"}'
)
HEADERS = {"ETag": '"1"', "Idempotency-Key": '"00000000000000000000000000000000"'}

app = FastAPI(docs_url=None, redoc_url=None)


@app.post("/accounts/{account}/deposit")
async def deposit(request: Request) -> Response:
    await request.body()
    return Response(ANSWER, headers=HEADERS, media_type="application/json")


def main() -> None:
    quiet: dict[str, Any] = {"access_log": False, "log_config": None, "server_header": False}
    uvicorn.run(app, port=flags("port").port, loop="uvloop", http="httptools", ws="none", **quiet)


if __name__ == "__main__":
    main()
