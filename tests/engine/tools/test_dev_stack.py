"""make test + test-all + prove: one stack of its own; kills and starts take longer.

The embedded stack: idempotent, alone on loopback, whole again after kill -9, and gone when told to go."""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from pydantic import SecretStr

from infra.settings import DEV_ENV, Settings
from tests.engine.api.front import free_port
from tools.dev.kafka import Kafka
from tools.dev.postgres import Postgres
from tools.dev.process import StartFailed
from tools.dev.stack import Stack
from tools.testing.fixtures import ROOT, Samefold
from tools.testing.waiting import DEADLINE_S, until

LONGEST_SOCKET_PATH = 103  # bytes, on macOS; Linux has 107
UP = [sys.executable, "-c", "from tools.cli import main; main()", "dev", "up"]


@pytest.fixture(scope="module")
def own_stack() -> Iterator[Stack]:
    """A stack to be mistreated, in a folder whose name is too long for a socket. Each test calls `up()` first."""
    root = Path(tempfile.mkdtemp(prefix="samefold-"))
    root.chmod(0o711)
    folder = root / ("long" * 30) / "data"
    stack = Stack(folder)
    yield stack
    stack.down()
    shutil.rmtree(root)


def processes_of(stack: Stack) -> list[psutil.Process]:
    """Everything that runs out of the stack's folder: by arguments, by working directory."""
    found = psutil.process_iter(["cmdline", "cwd"])
    folder = str(stack.folder)
    return [p for p in found if any(folder in text for text in (*(p.info["cmdline"] or ()), p.info["cwd"] or ""))]


def environment(stack: Stack) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "SAMEFOLD_DATA_DIR": str(stack.folder)}


def binds(thief: socket.socket, host: str, port: int) -> bool:
    """False as long as a killed process still has it."""
    with suppress(OSError):
        thief.bind((host, port))
        return True
    return False


def pids(stack: Stack) -> tuple[int, int]:
    broker, server = stack.kafka.process(), stack.postgres.process()
    assert broker is not None
    assert server is not None
    return broker.pid, server.pid


def topics(stack: Stack) -> set[str]:
    return set(AdminClient({"bootstrap.servers": stack.kafka.bootstrap}).list_topics(timeout=DEADLINE_S).topics)


def make_topic(stack: Stack, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": stack.kafka.bootstrap})
    admin.create_topics([NewTopic(name, 1, 1)])[name].result(DEADLINE_S)


def test_up_again_changes_nothing(stack: Stack) -> None:
    before = pids(stack)
    stack.up()
    assert pids(stack) == before


def test_nothing_listens_beyond_loopback(stack: Stack) -> None:
    family = [p for pid in pids(stack) for p in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))]
    listening = [c.laddr for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    # Java listens on ::ffff:127.0.0.1, the same address as an IPv6 socket sees it
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    assert len(listening) == 2  # for clients, for the controller; PostgreSQL has a Unix socket only


def test_the_database_server_is_durable_and_sorts_by_code_point(stack: Stack) -> None:
    with psycopg.connect(stack.postgres.url()) as connection:
        row = connection.execute(
            "select current_setting('fsync'), current_setting('server_version_num')::int / 10000,"
            " (select string_agg(x, '' order by x) from unnest(array['a', 'B', 'é', 'z']) x)"
        ).fetchone()
    assert row == ("on", 18, "Bazé")


def test_a_topic_is_never_made_by_asking_for_it(stack: Stack) -> None:
    AdminClient({"bootstrap.servers": stack.kafka.bootstrap}).list_topics("asked-for", timeout=DEADLINE_S)
    assert "asked-for" not in topics(stack)


def test_somebody_elses_kafka_on_our_port_is_not_taken_for_ours(stack: Stack, tmp_path: Path) -> None:
    ours = Kafka(tmp_path)
    shutil.copy(stack.kafka.configuration, ours.configuration)
    shutil.copy(stack.kafka.folder / "cluster-id", tmp_path)
    assert ours.answers()
    (tmp_path / "cluster-id").write_text("another")
    assert not ours.answers()


def test_the_data_of_a_newer_kafka_are_refused_with_what_to_do(tmp_path: Path) -> None:
    kafka = Kafka(tmp_path)
    for name, text in (("cluster-id", "x"), ("version", "1000.0.0")):
        (tmp_path / name).write_text(text)
    with pytest.raises(StartFailed, match=r"made by Kafka 1000\.0\.0.*samefold dev reset"):
        kafka.start()


def test_a_world_begins_empty(world: Settings, empty_world: Settings, stack: Stack) -> None:
    assert world.events_topic not in topics(stack)
    with psycopg.connect(empty_world.database) as connection:
        assert connection.execute("select 1 from pg_tables where schemaname = 'public'").fetchone() is None
    with psycopg.connect(world.database) as connection:
        assert connection.execute("select 1 from topics").fetchone() is None, "migrated, and without a row"
    assert len({world.database, empty_world.database, stack.postgres.url()}) == 3


@pytest.mark.parametrize("folder", [Path("/data"), Path("/", "x" * 70, "y" * 120), Path("/", "ü" * 60)])
def test_the_sockets_path_is_short_enough_whatever_the_folder(folder: Path) -> None:
    assert len(os.fsencode(Postgres(folder).socket_folder / ".s.PGSQL.5432")) <= LONGEST_SOCKET_PATH


@pytest.mark.slow
def test_a_folder_may_have_any_name_under_any_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    broker = Kafka(tmp_path / "Prüfung ☃" / "kafka")
    try:
        broker.start()
    finally:
        broker.stop()
    assert (broker.folder / "data" / "meta.properties").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["Prüfung ☃"]


@pytest.mark.slow
def test_killed_servers_come_back_once_with_their_data_however_many_start_them_on_another_port_if_need_be(
    own_stack: Stack,
) -> None:
    own_stack.up()
    make_topic(own_stack, "kept")
    with psycopg.connect(own_stack.postgres.url(), autocommit=True) as connection:
        connection.execute("create table kept ()")
    host, port = own_stack.kafka.bootstrap.split(":")
    stale = (own_stack.postgres.data / "postmaster.pid").read_text().splitlines()
    for pid in pids(own_stack):
        psutil.Process(pid).kill()
    until(lambda: not own_stack.postgres.process() and not own_stack.kafka.process(), "they have ended")
    # The pid was given to another process meanwhile: to this one's parent, say.
    (own_stack.postgres.data / "postmaster.pid").write_text("\n".join([str(os.getppid()), *stale[1:]]) + "\n")
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        until(lambda: binds(thief, host, int(port)), "the broker's port is free")
        thief.listen()
        runs = [subprocess.Popen(UP, env=environment(own_stack), stdout=subprocess.PIPE, text=True) for _ in range(3)]
        said = {run.communicate(timeout=DEADLINE_S)[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert len(said) == 1
    servers = [p for p in processes_of(own_stack) if p.name() == "java" or "-D" in p.cmdline()]
    assert {p.pid for p in servers} == set(pids(own_stack))
    assert psutil.pid_exists(os.getppid())
    assert own_stack.kafka.bootstrap != f"{host}:{port}"
    assert f"SAMEFOLD_KAFKA_BOOTSTRAP={own_stack.kafka.bootstrap}" in (own_stack.folder / DEV_ENV).read_text()
    assert "kept" in topics(own_stack)
    with psycopg.connect(own_stack.postgres.url()) as connection:
        assert connection.execute("select to_regclass('kept')::text").fetchone() == ("kept",)


@pytest.mark.slow
def test_a_folder_removed_under_running_processes_is_no_trap(own_stack: Stack) -> None:
    own_stack.up()
    before = set(processes_of(own_stack))
    shutil.rmtree(own_stack.folder, ignore_errors=True)
    own_stack.down()
    own_stack.up()
    assert topics(own_stack) == set()
    assert before & set(processes_of(own_stack)) == set()


@pytest.mark.prove(part="chaos")
@pytest.mark.parametrize("moment", ["formatting", "broker"])
def test_up_that_was_killed_half_way_is_completed_by_the_next(own_stack: Stack, moment: str) -> None:
    reached: dict[str, Callable[[], object]] = {
        "formatting": own_stack.kafka.orphans,
        "broker": own_stack.kafka.process,
    }
    own_stack.reset()
    with subprocess.Popen(UP, env=environment(own_stack), stdout=subprocess.DEVNULL) as first:
        until(reached[moment], moment)
        first.kill()
    assert not (own_stack.folder / DEV_ENV).exists()
    own_stack.up()
    assert own_stack.kafka.answers()
    assert own_stack.postgres.answers()


@pytest.mark.slow
def test_down_leaves_nothing_running_status_tells_it_and_the_next_command_what_to_do(
    own_stack: Stack, samefold: Samefold
) -> None:
    own_stack.up()
    settings = Settings(data_dir=own_stack.folder)
    assert settings.kafka == own_stack.kafka.bootstrap
    assert os.getsid(pids(own_stack)[0]) != os.getsid(0)  # a Ctrl-C here would not have reached it
    up = samefold("dev", "status", "--json", settings=settings)
    status = json.loads(up.stdout)
    assert (up.returncode, status["kafka"]["endpoint"]) == (0, own_stack.kafka.bootstrap)
    assert (status["kafka"]["pid"], status["postgres"]["pid"]) == pids(own_stack)
    own_stack.down()
    assert processes_of(own_stack) == []
    assert not own_stack.postgres.socket_folder.exists()
    down = samefold("dev", "status", "--json", settings=settings)
    assert (down.returncode, json.loads(down.stdout)["kafka"]["running"]) == (1, False)
    done = samefold("topics", settings=Settings(data_dir=own_stack.folder))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("not-configured: ")
    assert "samefold dev up" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_reset_asks_and_removes_the_stacks_own_and_what_was_formatted_half_way_is_formatted_anew(
    own_stack: Stack, samefold: Samefold
) -> None:
    own_stack.up()
    (own_stack.folder / "mine.txt").write_text("kept")
    settings = Settings(data_dir=own_stack.folder)
    assert samefold("dev", "reset", settings=settings, given="n\n").returncode == 1
    assert own_stack.kafka.answers()
    assert samefold("dev", "reset", "--yes", settings=settings).returncode == 0
    assert processes_of(own_stack) == []
    assert {path.name for path in own_stack.folder.iterdir()} == {"lock", "mine.txt", "run.lock"}
    (half := own_stack.kafka.folder / "data" / "meta.properties").parent.mkdir(parents=True)
    half.write_text("version=1\ncluster.id=half-done\nnode.id=1\n")
    own_stack.up()
    assert topics(own_stack) == set()


@pytest.mark.parametrize("command", ["up", "run"])
def test_nothing_is_started_where_the_settings_name_other_services_or_a_folder_that_cannot_be_made(
    samefold: Samefold, tmp_path: Path, command: str
) -> None:
    production = SecretStr("postgresql://production/bank")
    elsewhere = samefold("dev", command, settings=Settings(data_dir=tmp_path / "data", database_url=production))
    assert (elsewhere.returncode, "other-services" in elsewhere.stderr) == (1, True)
    assert not (tmp_path / "data").exists()
    (tmp_path / "file").touch()
    nowhere = samefold("dev", command, settings=Settings(data_dir=tmp_path / "file" / "data"))
    assert nowhere.returncode == 1
    assert nowhere.stderr.startswith(f"folder-unusable: The data folder {tmp_path}/file/data can't be written to")


def test_a_second_dev_run_and_a_reset_are_refused_and_stop_nothing(tmp_path: Path, samefold: Samefold) -> None:
    with (tmp_path / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        require_refused(samefold, Settings(data_dir=tmp_path), "already-running")
        assert "already-running" in samefold("dev", "reset", "--yes", settings=Settings(data_dir=tmp_path)).stderr


def test_dev_run_names_a_port_that_is_in_use(tmp_path: Path, samefold: Samefold) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        require_refused(samefold, Settings(data_dir=tmp_path, api_port=port), f"Port {port}")


def require_refused(samefold: Samefold, settings: Settings, why: str) -> None:
    """`samefold dev run` says why not, and starts nothing."""
    done = samefold("dev", "run", settings=settings)
    assert (done.returncode, why in done.stderr) == (1, True), done.stderr
    assert [file.name for file in settings.data_dir.iterdir()] == ["run.lock"]


STARTING = """
import sys, time
from tools.cli import main
from tools.dev.stack import Stack

def up(self):
    print("starting", flush=True)
    time.sleep(60)

Stack.up = up
sys.argv = ["samefold", "dev", "run"]
main()
"""


def test_dev_run_refuses_the_port_of_a_service_that_has_just_started(tmp_path: Path, samefold: Samefold) -> None:
    port = free_port()
    (tmp_path / "second").mkdir()
    settings = {"SAMEFOLD_DATA_DIR": str(tmp_path / "first"), "SAMEFOLD_API_PORT": str(port)}
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | settings
    with subprocess.Popen([sys.executable, "-c", STARTING], env=environment, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        first.stdout.readline()
        require_refused(samefold, Settings(data_dir=tmp_path / "second", api_port=port), f"Port {port}")
        first.kill()


@pytest.mark.prove(part="chaos")
def test_the_end_of_the_terminal_stops_everything(own_stack: Stack) -> None:
    own_stack.down()
    port = free_port()

    def is_served() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    heeding = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # these tests may run under nohup
    command = [sys.executable, "-c", f"{heeding}; from tools.cli import main; main()", "dev", "run"]
    with subprocess.Popen(command, env=environment(own_stack) | {"SAMEFOLD_API_PORT": str(port)}) as run:
        try:
            until(is_served, "it is served")
            run.send_signal(signal.SIGHUP)
            assert run.wait(60) == 0
        finally:
            run.terminate()
    assert processes_of(own_stack) == []
