"""make test + prove: a wrong use takes no process, a demo minutes.

`samefold demo` on its own Kafka and PostgreSQL: what it proves, in words and as JSON, and that it leaves nothing running.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from demo import generate
from demo.data import read, real_data
from infra.settings import Settings
from tests.engine.pages.curl import curl
from tests.engine.service.oracle import Verdict, judge
from tools.dev.process import free_ports
from tools.dev.stack import Stack
from tools.testing.fixtures import ROOT, Samefold
from tools.testing.waiting import DEADLINE_S, until

LIMIT = Decimal(5_000)

whole = pytest.mark.prove(part="demos")
on_its_own = pytest.mark.xdist_group("demo")
"""Two demos at once are twenty processes."""


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """1,500 generated transactions."""
    made = tmp_path / "few.csv.gz"
    generate.write(made, generate.generate(accounts=40, transactions=1_500))
    return made


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Settings]:
    """A data folder for a demo; whatever a failed one left running there is stopped."""
    [port] = free_ports(1)
    settings = Settings(data_dir=tmp_path / "data", api_port=port)
    yield settings
    Stack(settings.data_dir / "demo").down()


def expected(verdict: Verdict, kills: int) -> dict[str, Any]:
    """The last line that the demo must print, all but the seconds."""
    over_http = verdict.answers[19::20]
    return {
        "accounts": len(verdict.balances),
        "accepted": sum(verdict.accepted.values()),
        "rejected": sum(not accepted for accepted in verdict.accepted.values()),
        "credits": f"{verdict.credits:.2f}",
        "debits": f"{verdict.debits:.2f}",
        "balance": f"{sum(verdict.balances.values()):.2f}",
        "statement": {
            "within_0_50": verdict.statement["within 0.50"],
            "within_1_00": verdict.statement["within 1.00"],
            "beyond": verdict.statement["beyond"],
        },
        "over_http": {"accepted": sum(over_http), "rejected": len(over_http) - sum(over_http)},
        "kills": {"handler": kills, "agent": kills, "policies": kills, "api": kills},
        "lost": 0,
        "doubled": 0,
        "differences": 0,
        "release": None,
    }


def running_in(folder: Path) -> list[list[str]]:
    """Processes that have to do with a folder: an argument or their environment names it."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        told = [*(process.info["cmdline"] or []), *(process.info["environ"] or {}).values()]
        if process.pid != os.getpid() and any(str(folder) in text for text in told):
            found.append(process.info["cmdline"])
    return found


def assert_the_page_shows(printed: str) -> None:
    """The blocks in which docs/demo.md shows the proof and the next release have the rows that are printed, under these names."""
    blocks = re.findall(
        r"^```\n((?:The next release|Killed).*?)^```", (ROOT / "docs" / "demo.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) == 2
    labels = {
        label for block in blocks for label in re.findall(r"^  ([a-z]+(?: [a-z]+)?)  +[0-9]", block, re.MULTILINE)
    }
    assert labels >= {"accounts", "lost", "commands", "caught up", "deposited"}
    for label in labels - {"at", "killed"}:  # nobody is killed in this one
        assert re.search(rf"^  {label}  +[0-9]", printed, re.MULTILINE), f"docs/demo.md shows {label}"


def answered(line: str) -> dict[str, Any]:
    """What a printed curl line answers, as soon as it is answered well."""
    found: list[dict[str, Any]] = []

    def is_answered() -> bool:
        with suppress(httpx.TransportError):
            answer = curl(line)
            found.extend([answer.json()] if answer.status_code == 200 else [])
        return bool(found)

    until(is_answered, f"an answer to {line}")
    return found[0]


def assert_the_printed_lines_work(place: Settings, printed: str) -> None:
    """The stack is up again with what is in it, and a command and a read over HTTP are answered."""
    lines = [line.strip().partition("  ")[0] for line in printed.partition("Next:\n")[2].splitlines()]
    send, look = (line for line in lines if line.startswith("curl"))
    [export] = (line for line in lines if line.startswith("export"))
    name, _, folder = export.removeprefix("export ").partition("=")
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | place.environment() | {name: folder}

    def start(line: str) -> subprocess.Popen[bytes]:
        assert line in lines, printed
        program = [sys.executable, "-c", "from tools.cli import main; main()", *line.split()[1:]]
        return subprocess.Popen(program, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert start("samefold dev up").wait(DEADLINE_S) == 0
    everything = start("samefold run all")
    try:
        before = answered(look)["row"]["cents"]
        assert answered(send)["outcome"] == "accepted"
        assert answered(look)["row"]["cents"] == before + 100
    finally:
        everything.terminate()
        everything.wait(DEADLINE_S)
        assert start("samefold dev down").wait(DEADLINE_S) == 0


def demo(samefold: Samefold, place: Settings, *arguments: str) -> tuple[dict[str, Any], str]:
    """The last line that it printed, without the seconds, and all that it printed. It has left nothing running."""
    done = samefold("demo", *arguments, "--json", settings=place, process_s=10 * DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert running_in(place.data_dir) == []
    last = json.loads(done.stdout.splitlines()[-1])
    assert last.pop("seconds") > 0
    transfers = last.pop("transfers")
    assert transfers["requested"] == min(2_000, (last["accepted"] + last["rejected"]) // 8)
    assert transfers["completed"] > transfers["failed"] > 0
    assert transfers["completed"] + transfers["failed"] == transfers["requested"]
    assert transfers["in_flight"] == 0
    return last, done.stdout


@on_its_own
@whole
@pytest.mark.integration
def test_processes_are_killed_and_nothing_is_lost_or_doubled(
    place: Settings, samefold: Samefold, tmp_path: Path
) -> None:
    """Of the real bank; where its file is not, of one with a quarter as many transactions."""
    if (file := real_data()) is None:
        generate.write(file := tmp_path / "generated.csv.gz", generate.generate(accounts=150, transactions=6_000))
    last, printed = demo(samefold, place, "--data", str(file), "--kills", "5", "--no-release")
    assert last == expected(judge(file, LIMIT), kills=5)
    assert "Nothing was lost" in printed


@on_its_own
@whole
def test_the_next_release_takes_over_while_commands_keep_coming(few: Path, place: Settings, samefold: Samefold) -> None:
    last, printed = demo(samefold, place, "--data", str(few), "--kills", "0")
    found = last.pop("release")
    verdict = judge(few, LIMIT)
    assert found["commands"] > 100
    assert (found["lost"], found["doubled"], found["differences"]) == (0, 0, 0)
    assert found["rebuild"]["tables"] == {"balances": "balances_v3"}
    assert found["rebuild"]["engine"] == "spark"
    assert found["then"]["balance"] == f"{sum(verdict.balances.values()):.2f}"
    deposited = sum(one.cents for one in read(few) if one.direction == "credit" and one.purpose != "interest")
    assert found["then"]["deposited"] == f"{Decimal(deposited).scaleb(-2):.2f}"
    # deposits of 2.00 and withdrawals of 1.00 in turn
    pairs, odd = divmod(found["commands"], 2)
    assert Decimal(found["deposited"]) == Decimal(deposited).scaleb(-2) + 2 * (pairs + odd)
    assert Decimal(found["balance"]) == sum(verdict.balances.values()) + pairs + 2 * odd
    stored, as_read, new = found["event"].values()
    assert (stored["type"], as_read["type"], new["type"]) == ("MoneyDeposited", "MoneyDeposited/2", "MoneyDeposited/2")
    assert as_read["data"] == stored["data"] | {"currency": "CZK"}
    assert new["data"]["currency"] == "CZK"
    steps = {"check", "migrate", "beside", "rebuild", "handover", "stop", "verify", "as_of", "question"}
    assert set(found["seconds"]) == steps
    files = [one for one in read(few) if one.direction == "credit" and one.purpose != "interest"]
    assert {(one["year"], one["deposits"], one["cents"], one["currency"]) for one in found["years"]} == {
        (year, len(cents), sum(cents), "CZK")
        for year in {one.on.year for one in files}
        if (cents := [one.cents for one in files if one.on.year == year])
    }
    assert "group by year, currency" in printed
    assert "+    deposited: int" in printed
    assert "+    VERSION: ClassVar[int] = 2" in printed
    assert f"stored before    MoneyDeposited {json.dumps(stored['data'])}" in printed
    assert "samefold rebuild balances --as-of 20" in printed
    assert f"samefold views drop balances {found['then']['table']}" in printed
    assert_the_page_shows(printed)


@on_its_own
@whole
def test_without_kills_and_without_overdraft_a_second_demo_takes_the_first_ones_place(
    few: Path, place: Settings, samefold: Samefold
) -> None:
    """The second one generates its data. What it prints to be typed next works."""
    printed = ""
    for source in (("--data", str(few)), ("--seed", "7")):
        options = ("--kills", "0", "--no-release", "--overdraft-limit", "0")
        last, printed = demo(samefold, place, *source, *options)
        generated = place.data_dir / "demo" / "transactions.csv.gz"
        verdict = judge(few if "--data" in source else generated, Decimal(0))
        assert last == expected(verdict, kills=0)
        assert last["rejected"] > 0
    assert_the_printed_lines_work(place, printed)


@on_its_own
@whole
@pytest.mark.parametrize(
    ("number", "moment", "spark"),
    [
        pytest.param(signal.SIGTERM, "the API at work", False, id="sigterm"),
        pytest.param(signal.SIGINT, "in parallel to the old ones", True, id="ctrl-c while Spark starts"),
    ],
)
def test_interrupted_it_leaves_nothing_running(
    number: signal.Signals, moment: str, spark: bool, few: Path, place: Settings
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "from tools.cli import main; main()", "demo", "--data", str(few), "--kills", "0"],
        env=os.environ | place.environment() | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as demo:
        assert demo.stdout
        said = ""
        for line in demo.stdout:
            said += line
            if moment in line:
                if spark:
                    until(lambda: "spark.deploy.SparkSubmit" in str(running_in(place.data_dir)), "Spark's JVM is there")
                demo.send_signal(number)
                break
        said += demo.stdout.read()
        assert demo.wait(DEADLINE_S) == 130, said
    assert moment in said
    assert "Traceback" not in said
    # Spark's JVM ends when it reads that its driver has ended
    until(lambda: running_in(place.data_dir) == [], "nothing is left running")


@pytest.mark.parametrize("limit", ["-1", "1.005", "a lot", "NaN", "1e30"])
def test_a_limit_that_is_no_amount_is_refused(limit: str, place: Settings, samefold: Samefold) -> None:
    done = samefold("demo", f"--overdraft-limit={limit}", settings=place)
    assert done.returncode == 2
    assert "--overdraft-limit" in done.stderr
    assert not place.data_dir.exists()


def test_a_file_that_is_none_is_named_before_anything_starts(place: Settings, samefold: Samefold) -> None:
    done = samefold("demo", "--data", "nowhere.csv", settings=place)
    assert done.returncode == 1
    assert "nowhere.csv" in done.stderr
    assert not place.data_dir.exists()


def test_two_demos_in_one_folder_are_refused(place: Settings, samefold: Samefold) -> None:
    import fcntl

    place.data_dir.mkdir()
    with (place.data_dir / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = samefold("demo", settings=place)
    assert done.returncode == 1
    assert "demo-runs" in done.stderr
    assert running_in(place.data_dir) == []
