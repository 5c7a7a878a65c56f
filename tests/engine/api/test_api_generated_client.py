"""make test-all: the generator takes seconds.

A client that a generator makes from the OpenAPI document works without edits.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.api.api import Api
from tools.testing.waiting import DEADLINE_S

GENERATE = ["--meta", "none", "--output-path", "bank", "--config", "generator.json", "--fail-on-warning"]

PROGRAM = """
import datetime, sys

from bank import Client
from bank.api.accounts import accounts_deposit, accounts_open_account, accounts_withdraw
from bank.api.views import views_balances_row
from bank.models import AccountsDeposit, AccountsOpenAccount, AccountsWithdraw, Accepted, Problem

client = Client(base_url=sys.argv[1], raise_on_unexpected_status=True)
today = datetime.date(2026, 11, 21)
ada = "ada/lovelace \\N{BANK}"

opened = accounts_open_account.sync(ada, client=client, body=AccountsOpenAccount(overdraft_limit=0, on=today))
assert isinstance(opened, Accepted), opened

body = AccountsDeposit(cents=5000, on=today)
for _ in range(2):  # the same key: once
    done = accounts_deposit.sync(ada, client=client, body=body, idempotency_key='"d-1"')
    assert isinstance(done, Accepted), done
assert (done.stream, done.version, done.command_id) == (f"accounts/{ada}", 2, "d-1"), done

refused = accounts_withdraw.sync(ada, client=client, body=AccountsWithdraw(cents=5001, on=today))
assert isinstance(refused, Problem) and refused.code == "insufficient-funds", refused

conflict = accounts_deposit.sync(ada, client=client, body=body, if_match='"1"')
assert isinstance(conflict, Problem) and conflict.status == 412, conflict

balance = views_balances_row.sync(ada, client=client, after=[done.position])
assert (balance.row.account, balance.row.cents, balance.row.opened_on) == (ada, 5000, today), balance
print("balance", balance.row.cents)
"""


@pytest.mark.slow
def test_a_generated_client_deposits_and_reads(api: Api, tmp_path: Path) -> None:
    def run(*program: str) -> str:
        done = subprocess.run(
            [sys.executable, *program], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    (tmp_path / "openapi.json").write_text(api.get("/openapi.json").text)
    (tmp_path / "generator.json").write_text('{"post_hooks": []}')
    run("-m", "openapi_python_client", "generate", "--path", "openapi.json", *GENERATE)
    (tmp_path / "program.py").write_text(PROGRAM)
    assert run("program.py", api.url) == "balance 5000\n"
