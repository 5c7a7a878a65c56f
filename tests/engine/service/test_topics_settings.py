"""make test: all processes in one, on a broker whose settings somebody changes meanwhile.

Settings of topics that lose history: a running process says so, goes on, and says when they are right again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

from infra.log import clients, topics
from infra.observability.metrics import REGISTRY
from infra.settings import Settings
from policies.engine.process import Policies
from policies.engine.public_schema import publication
from policies.engine.publisher import Publisher
from tests.engine.api.api import agent, in_a_loop, served
from tests.engine.policies.test_policies import FORWARD
from tests.engine.spine import handler, set_up
from tools import doctor
from tools.testing.fixtures import Samefold
from tools.testing.waiting import until


def alter(world: Settings, topic: str, **settings: str | None) -> None:
    """Set these settings of a topic; None: remove them. Underscores stand for dots."""
    entries = [
        ConfigEntry(
            name.replace("_", "."),
            value,
            incremental_operation=AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET,
        )
        for name, value in settings.items()
    ]
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
    admin = clients.admin(world)
    admin.incremental_alter_configs([resource])[resource].result(10)


def unfit(topic: str) -> float | None:
    return REGISTRY.get_sample_value("samefold_topic_unfit", {"topic": topic})


@contextmanager
def publishing(world: Settings) -> Iterator[None]:
    one = Publisher(world, publication(), "p1")
    running = threading.Thread(target=one.run)
    running.start()
    try:
        yield
    finally:
        one.stop()
        running.join(30)


def test_a_running_process_tells_settings_that_lose_history(
    world: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, samefold: Samefold
) -> None:
    caplog.set_level("INFO")
    for module in ("commands.handler", "projections.engine.live.agent", "policies.engine.publisher"):
        monkeypatch.setattr(f"{module}.CHECK_S", 0.2)
    monkeypatch.setattr("api.stores.COMPARE_S", 0.2)
    for name, value in world.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("api.stores.has_personal_fields", lambda: True)
    topics.ensure_keys(world)
    set_up(world)
    with ExitStack() as processes:
        for process in (handler(world, "h1"), agent(world, "a1"), publishing(world)):
            processes.enter_context(process)
        processes.enter_context(in_a_loop(lambda: Policies(world, [FORWARD], "forward"), "forward"))
        api = processes.enter_context(served(world, "api1"))
        for topic, setting, bad, right, who in [
            (world.events_topic, "retention_ms", "604800000", "-1", ["handler h1", "agent a1", "publisher p1", "api1"]),
            (world.events_topic, "cleanup_policy", "compact", "delete", ["handler h1", "agent a1", "api1"]),
            (world.commands_topic, "max_message_bytes", "1000", "1148576", ["handler h1", "api1"]),
            (world.policies_topic, "cleanup_policy", "compact", "delete", ["agent forward"]),
            (world.public_topic, "unclean_leader_election_enable", "true", "false", ["publisher p1"]),
            (world.keys_topic, "max_compaction_lag_ms", "86400000", "21600000", ["api1"]),
        ]:
            until(lambda topic=topic: unfit(topic) == 0.0, "it is fit")  # type: ignore[misc]
            caplog.clear()
            alter(world, topic, **{setting: bad})
            told = f"Topic '{topic}' has {setting.replace('_', '.')}={bad}"
            for one in who:
                until(lambda one=one, told=told: f"{one}: topic-unfit: {told}" in caplog.text, f"{one} tells {told}")  # type: ignore[misc]
            assert unfit(topic) == 1.0
            if "api1" in who:
                answer = api.client.get("/health/ready")
                assert (answer.status_code, answer.json()["unfit_topics"]) == (200, [topic])
            [found] = [one for one in doctor.examine() if one.name == "topics"]
            assert (found.ok, told in found.found) == (False, True)
            assert told in samefold("topics", settings=world).stderr
            alter(world, topic, **{setting: right})
            for one in who:
                well = f"{one}: topic '{topic}' has the settings that it must have again"
                until(lambda well=well: well in caplog.text, well)  # type: ignore[misc]
            until(lambda topic=topic: unfit(topic) == 0.0, "it is fit again")  # type: ignore[misc]
        assert "unfit_topics" not in api.client.get("/health/ready").json()
        [found] = [one for one in doctor.examine() if one.name == "topics"]
        assert found.ok, found
        assert samefold("topics", settings=world).returncode == 0


def test_all_that_is_wrong_with_topics_is_told_at_once(world: Settings) -> None:
    set_up(world)
    alter(world, world.events_topic, retention_ms="1000", cleanup_policy="compact")
    alter(world, world.commands_topic, retention_ms="1000")
    with pytest.raises(topics.TopicUnfit) as error:
        topics.check(world)
    assert "cleanup.policy=compact; the broker would remove records" in error.value.message
    assert ", and retention.ms=1000; history would be deleted" in error.value.message
    assert f"Topic '{world.commands_topic}' has retention.ms=1000" in error.value.message
    commands, events = error.value.hint.splitlines()
    assert (world.commands_topic in commands, world.events_topic in events) == (True, True)
    assert events.endswith("--add-config cleanup.policy=delete,retention.ms=-1")
