"""The process of the policies, `python -m policies.engine.process`: an agent for each policy, the relay, and the webhooks.

Each source has a receiver beside its agent, and all of them a relay of their own: what others say in bulk holds up no policy. A
policy or receiver that stops with an error is started again, while the others go on.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
from collections.abc import Callable, Collection, Coroutine, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NoReturn

from infra.errors import SamefoldError
from infra.processes.process_end import Parts
from infra.processes.serving import serve
from infra.settings import Settings
from policies.engine.policy import Policy, discover
from policies.engine.receiver import Receiver
from policies.engine.relay import Relay
from policies.engine.webhooks import Webhooks
from policies.engine.worker import policy_agent
from projections.engine.live.agent import Agent

log = logging.getLogger(__name__)

RESTART_S = (0.5, 30.0)
HEALTHY_S = 30.0
COLLECTED = 25
"""Starts of one policy's agent after which what is left of the earlier ones is collected."""


class Policies:
    """Runs these policies until `stop`. `run` raises the relay's error that ended it."""

    def __init__(self, settings: Settings, policies: Collection[Policy], name: str) -> None:
        self.settings = settings
        self.name = name
        self.policies = policies
        self.error: BaseException | None = None
        self.parts = Parts(f"policies {name}", self.stop)
        self._agents: dict[str, Agent] = {}
        self._ended = asyncio.Event()
        self._webhooks = Webhooks(settings, name)
        self._receivers: dict[str, Receiver] = {}
        sources = {one.name for one in policies if one.source}
        others = {one.name for one in policies} - sources
        self._relays = {"relay": Relay(settings, name, partial(self.partitions, others), self._webhooks.kick)}
        if sources:
            mine = partial(self.partitions, sources)
            self._relays["relay of sources"] = Relay(settings, f"{name} of sources", mine, yields=True)

    async def run(self) -> None:
        self.parts.callbacks()
        # each relay and receiver has one, each agent may wait in one for Kafka, and each endpoint in some for a name
        threads = 10 + 3 * len(self.policies) + sum(one.in_flight for one in self.settings.webhooks.values())
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads))
        relays = [self.parts.task(what, asyncio.to_thread(one.run)) for what, one in self._relays.items()]
        starts = {f"policy {one.name}": partial(self._react, one) for one in self.policies}
        starts |= {f"source {one.name}": partial(self._receive, one) for one in self.policies if one.source}
        hosted = [self.parts.task(who, self._host(who, start), may_return=True) for who, start in starts.items()]
        webhooks = self.parts.task("webhooks", self._webhooks.run())
        await self._ended.wait()
        self.parts.over()
        for agent in self._agents.values():
            agent.stop()
        for receiver in self._receivers.values():
            receiver.stop()
        for relay in self._relays.values():
            relay.stop()
        webhooks.cancel()
        await asyncio.gather(*relays, webhooks, *hosted, return_exceptions=True)
        await self.parts.cancel()
        if self.error is not None:
            raise self.error

    def stop(self, error: BaseException | None = None) -> None:
        """End with an error or cleanly. Only the first call counts."""
        if not self._ended.is_set():
            self.error = error
            self._ended.set()

    def partitions(self, of: Set[str]) -> set[tuple[str, int]]:
        """The (policy, partition) of these policies that this process has now. Thread-safe."""
        agents = [(name, agent) for name, agent in [*self._agents.items()] if name in of]
        return {(name, partition) for name, agent in agents for partition in agent.reader.own_partitions}

    def _react(self, policy: Policy) -> Coroutine[None, None, None]:
        """The policy's agent, as it runs."""
        agent = self._agents[policy.name] = policy_agent(self.settings, policy, self.name)
        return agent.run()

    def _receive(self, policy: Policy) -> Coroutine[None, None, None]:
        """The source's receiver, as it runs."""
        receiver = self._receivers[policy.name] = Receiver(
            self.settings, policy, self.name, lambda: self._agents[policy.name].reader.assigned_partitions
        )
        return asyncio.to_thread(receiver.run)

    async def _host(self, who: str, start: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run what this starts, and start it again after an error."""
        failures = starts = 0
        while not self._ended.is_set():
            starts += 1
            if starts % COLLECTED == 0:
                gc.collect()  # its predecessors are in cycles, with Kafka clients, their threads and sockets
            began = asyncio.get_running_loop().time()
            running = start()
            try:
                await running
            except SamefoldError as error:
                log.error("%s: %s: %s %s", who, error.code, error.message, error.hint)
            except Exception:
                log.exception("%s: a defect ended it", who)
            healthy = asyncio.get_running_loop().time() - began > HEALTHY_S
            failures = 0 if healthy else failures + 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), min(RESTART_S[0] * 2 ** min(failures, 10), RESTART_S[1]))


def main() -> NoReturn:
    """`python -m policies.engine.process --name NAME`."""
    parser = argparse.ArgumentParser(prog="python -m policies.engine.process")
    parser.add_argument("--name", default="policies")
    name = parser.parse_args().name
    serve(f"policies {name}", lambda settings: Policies(settings, discover().values(), name), log)


if __name__ == "__main__":
    main()
