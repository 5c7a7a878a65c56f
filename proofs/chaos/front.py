"""Clients of the HTTP API, which ask until they have an answer; each answer is compared with the log at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import httpx

from demo.background_thread import BackgroundThread
from proofs.chaos.ledger import Key, Sent
from proofs.chaos.load import DAY

CLIENTS = 4
PAUSE_S = 0.1
TIMEOUT_S = 5.0
RECORDED = {200: "accepted", 409: "rejected"}
"""Final answers, and the outcome that the log must hold then."""
OPEN = frozenset({202, 429, 500, 502, 503, 504})
"""Answers after which a client asks again, with the same key."""


class Front(BackgroundThread):
    """A few clients in threads of their own, one command after the other. `newest` is when one began that has its answer."""

    def __init__(self, port: int, sent: dict[Key, Sent], acknowledged: set[Key]) -> None:
        super().__init__("front")
        self.url = f"http://127.0.0.1:{port}"
        self.sent, self.acknowledged = sent, acknowledged
        self.answers: dict[Key, str] = {}
        self.violations: list[str] = []
        self.newest = 0.0

    def stop(self) -> None:
        """No more commands."""
        self._end(2 * TIMEOUT_S)

    def judge(self, logged: Mapping[Key, str]) -> list[str]:
        """Answers to clients that the log does not hold."""
        wrong = {key: (told, logged.get(key)) for key, told in self.answers.items() if logged.get(key) != told}
        return [f"D: answered over HTTP, and in the log: {wrong}"] if wrong else []

    def _work(self) -> None:
        with ThreadPoolExecutor(CLIENTS) as pool:
            for done in [pool.submit(self._client, number) for number in range(CLIENTS)]:
                done.result()

    def _client(self, number: int) -> None:
        with httpx.Client(base_url=self.url, timeout=TIMEOUT_S, trust_env=False) as http:
            turn = 0
            while not self._ended.wait(PAUSE_S):
                stream = f"accounts/http-{number}-{turn // 20}"
                kind = "Deposit" if turn % 20 else "OpenAccount"
                self._ask(http, Sent(stream, f"http-{number}-{turn}", kind, 1 + turn % 50, str(DAY)))
                turn += 1

    def _ask(self, http: httpx.Client, command: Sent) -> None:
        """Until there is an answer, or the run ends: then the log decides alone what became of it."""
        key, began = (command.stream, command.id), time.monotonic()
        self.sent[key] = command
        route, amount = ("open-account", "overdraft_limit") if command.type == "OpenAccount" else ("deposit", "cents")
        while not self._ended.is_set():
            try:
                answer = http.post(
                    f"/{command.stream}/{route}",
                    json={amount: command.cents, "on": command.on},
                    headers={"Idempotency-Key": f'"{command.id}"'},
                )
            except httpx.TransportError:
                self._ended.wait(PAUSE_S)  # between two tries
                continue
            if answer.status_code in RECORDED:
                self.answers[key] = RECORDED[answer.status_code]
                self.acknowledged.add(key)
                self.newest = max(self.newest, began)
                return
            if answer.status_code not in OPEN:
                self.violations.append(f"HTTP answered {answer.status_code}: {answer.text[:500]}")
                return
            self._ended.wait(PAUSE_S)  # between two tries
