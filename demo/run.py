"""The demo: a bank's transactions and transfers go through processes that are killed, and nothing is lost or doubled."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args

from demo import data, report, tree
from demo.bank import OVERDRAFT_LIMIT, Bank, bank
from demo.crew import HOST, Crew, Role
from demo.load import Load, Loaded
from demo.proof import Proof, counted_in, prove, rows_of
from demo.release import Released, release
from demo.report import Reporter
from demo.sending import Sending
from demo.transfers import Moved, Transfers
from demo.watch import Watch
from infra.errors import SamefoldError
from infra.log import topics
from infra.log.records import Command
from infra.settings import Settings
from projections.engine.operate.verify import Verified, verify
from projections.engine.rebuild.rebuild import Rebuilt, rebuild
from projections.engine.views.core_views import all_views
from tools.dev.process import free_ports
from tools.dev.stack import Stack, make_folder
from tools.migrations import migrate
from tools.terminal import progress

FOLDER = "demo"
REBUILT = "balances"
SESSION_TIMEOUT_MS = 2_500


class DemoRuns(SamefoldError):
    """Another demo works in the same data folder."""


@dataclass(frozen=True, slots=True)
class Options:
    """`overdraft_limit` in cents; `kills` of handlers, as many of agents, policies and the API; a `seed` asks for generated data.

    `release` is whether the next release is rolled out behind the proof.
    """

    data: Path | None = None
    overdraft_limit: int = OVERDRAFT_LIMIT
    kills: int = 0
    seed: int | None = None
    release: bool = True


@dataclass(slots=True)
class Result:
    """What the demo found. `took` is in seconds, by what was done, in order; `released` is there at the end, if wanted.

    At `url` the API will be found that is started behind the demo, as it is configured.
    """

    options: Options
    folder: Path
    url: str
    bank: Bank
    loaded: Loaded
    proof: Proof
    transfers: Moved
    rebuilt: Rebuilt
    verified: Verified
    took: dict[str, float]
    released: Released | None = None

    @property
    def differences(self) -> int:
        """Rows that differ from a fold of the log, and sums that differ from each other or from the file, now or in a snapshot."""
        return self.verified.differences + len(self.proof.disagreements) + len(self.transfers.violations)

    @property
    def is_proven(self) -> bool:
        wrong = self.proof.lost, self.proof.doubled, self.differences
        return not any(wrong) and all(self.loaded.effective(role) == self.options.kills for role in get_args(Role))

    @property
    def holds(self) -> bool:
        return self.is_proven and (self.released is None or self.released.holds)

    def as_dict(self) -> dict[str, Any]:
        """The last line of `samefold demo --json`."""
        found = asdict(self.proof) | {
            name: money(getattr(self.proof, name)) for name in ("credits", "debits", "balance")
        }
        del found["disagreements"]
        return found | {
            "transfers": dict(list(self.transfers._asdict().items())[:4]),
            "kills": {role: self.loaded.effective(role) for role in get_args(Role)},
            "differences": self.differences,
            "seconds": round(self.loaded.seconds, 2),
            "release": _released(self.released) if self.released else None,
        }


def _released(found: Released) -> dict[str, Any]:
    told: dict[str, Any] = {name: getattr(found, name) for name in ("lost", "doubled", "differences")}
    now, then = (
        {"balance": money(sums.balance), tree.COLUMN: money(sums.deposited)} for sums in (found.now, found.then)
    )
    past = {"as_of": found.as_of.isoformat(), "table": found.table_then, **then}
    rebuild = dict(found.rebuilt)
    told["event"] = found.bodies._asdict()
    told["years"] = [one._asdict() for one in found.years]
    return {"commands": found.sent, **told, **now, "then": past, "rebuild": rebuild, "seconds": found.took}


def run(settings: Settings, options: Options, reporter: Reporter) -> Result:
    """Run the demo in a folder of its own below the data folder, removed first if it is there.

    The proof is shown before the next release is rolled out. Everything that it starts is stopped when it returns or raises; the
    data stays. Raises DemoRuns and whatever keeps the parts from working.
    """
    given = data.read(options.data) if options.data else None  # a wrong file is refused before anything starts
    folder = settings.data_dir.expanduser().resolve() / FOLDER
    with _stack(folder, reporter) as stack:
        demo = stack.settings(
            session_timeout_ms=SESSION_TIMEOUT_MS,
            # this very stack, whatever else the environment says of another one
            kafka_security_protocol="PLAINTEXT",
            replication_factor=1,
        )
        with reporter.timed("tables and topics made"):
            migrate.upgrade(demo)
            topics.ensure(demo)
        with reporter.timed("transactions read"):
            read = bank(folder, options.data, given, overdraft_limit=options.overdraft_limit, seed=options.seed)
        [port] = free_ports(1)
        day = max((transaction.on for transaction in read.transactions), default=date.min)
        transfers = Transfers(demo, len(read.transactions), day)
        with Crew(demo, folder / "logs", api_port=port) as crew, Watch(demo) as watch, reporter.until_the_end():
            with Sending(demo, HOST, port) as sending, transfers:
                with reporter.timed("2 handlers, 2 agents, policies and the API at work"):
                    others = [*crew.agents, *crew.policies]
                    watch.wait_until(lambda: watch.is_ready(crew.handlers, others) and sending.is_served(), crew)
                    transfers.open_accounts()
                loaded, rebuilt = _load(demo, read.commands, crew, watch, sending, transfers, options.kills, reporter)
            with reporter.timed("all rows compared with a fold of the log (verify)"):
                verified = verify(demo, all_views())
            with reporter.timed("file, log and rows compared"):
                log = counted_in(demo)
                proof = prove(read.transactions, read.commands, log, rows_of(demo, log), read.expected, sending.answers)
            url = f"http://{settings.api_host}:{settings.api_port}"
            result = Result(
                options, folder, url, read, loaded, proof, transfers.moved(), rebuilt, verified, reporter.took
            )
            report.show_proof(result)
            if options.release and result.is_proven and read.transactions:
                result.released = release(demo, folder, crew, watch, read, proof, reporter)
    return result


def money(cents: int) -> str:
    """`-1234.50`, exactly."""
    return str(Decimal(cents).scaleb(-2))


@contextmanager
def _stack(folder: Path, reporter: Reporter) -> Iterator[Stack]:
    """One demo at a time in a data folder: the next one would remove the data under this one's feet. Raises DemoRuns."""
    make_folder(folder.parent)
    stack = Stack(folder)
    with folder.with_suffix(".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoRuns(f"A demo runs in {folder} already.", "Wait for it, or set SAMEFOLD_DATA_DIR.") from None
        if folder.exists():
            with reporter.timed("an older demo removed"):
                stack.reset()
                shutil.rmtree(folder)
        try:
            with reporter.until_the_end():
                with reporter.timed("Kafka and PostgreSQL up"):
                    stack.up()
                yield stack
        finally:
            stack.down()


def _load(
    settings: Settings,
    commands: Sequence[Command],
    crew: Crew,
    watch: Watch,
    sending: Sending,
    transfers: Transfers,
    kills: int,
    reporter: Reporter,
) -> tuple[Loaded, Rebuilt]:
    """Send everything. Rebuild a view and switch to it during the end of the load, or after it if no process is killed."""
    rebuilding: list[Future[Rebuilt]] = []

    def rebuild_it() -> Rebuilt:
        with reporter.timed(f"'{REBUILT}' rebuilt from the log, and switched to"):
            return rebuild(settings, [REBUILT], all_views())

    with ThreadPoolExecutor(1) as aside:

        def begin() -> None:
            rebuilding.append(aside.submit(rebuild_it))

        with progress("visible", len(commands)) as advance:
            after_kills = begin if kills else lambda: None

            def visible(count: int) -> None:
                advance(count)
                transfers.advance(load.visible / len(commands))

            load = Load(sending, commands, crew, watch, kills=kills, advance=visible, after_kills=after_kills)
            loaded = load.run()
            sending.finish()
        reporter.done(f"{len(commands):,} commands sent and visible", loaded.seconds)
        with reporter.timed(f"{len(transfers.requests):,} transfers have ended"):
            transfers.finish(watch)
        if not rebuilding:
            begin()
        return loaded, rebuilding[0].result()
