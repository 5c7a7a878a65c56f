"""make test: files and one stack. `docs/before-you-deploy.md` is typed from the first line to the last."""

from __future__ import annotations

import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

from infra.settings import Settings
from tests.engine.api.api import serving
from tests.engine.infra.role_worlds import role_world
from tests.engine.pages.curl import curl
from tests.engine.pages.pages import blocks, matches, typed
from tests.engine.spine import set_up
from tools.dev.issuer import AUDIENCE, ISSUER
from tools.dev.stack import Stack
from tools.testing.fixtures import ROOT, Samefold

PAGE = (ROOT / "docs" / "before-you-deploy.md").read_text()


def test_the_checklist_from_the_first_line_to_the_last(
    stack: Stack, migrated: str, samefold: Samefold, tmp_path: Path
) -> None:
    of_issuer = {"auth": "jwt", "jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, "jwt_keys": str(stack.issuer.keys)}
    with role_world(stack, migrated, "samefold") as place, ExitStack() as running:
        common = place.admin.model_dump(exclude_none=True) | {"archive_url": str(tmp_path / "archive")} | of_issuer
        settings, url = Settings(**common), ""
        types = [line for language, block in blocks(PAGE) if language == "console" for line in typed(block)]
        for line, expected in types:
            words = line.removeprefix("$ ").partition(" <")[0].split()
            if words == ["samefold", "archive"]:  # the processes have been started by then
                set_up(place.admin)
            if words[0] == "export":
                [role] = re.findall(r"//(samefold_\w+)@", words[1])
                settings = place.settings(role, Settings(**common))
            elif words == ["samefold", "run", "api"]:
                url = running.enter_context(serving(settings)).url
            elif words[0] == "curl":
                token = samefold("dev", "token", "--subject", "ada", "--role", "teller", settings=settings).stdout
                answer = curl(line.removeprefix("$ ").replace("$TOKEN", token.strip()), url)
                assert matches(answer.text, expected), (line, answer.text)
            elif words[0] == "make":
                subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            else:
                done = samefold(*words[1:], settings=settings, given="secret\n")
                assert done.returncode == 0, (line, done.stdout, done.stderr)
                assert matches(done.stdout, expected), (line, done.stdout)
        assert len(types) == 23


def test_the_table_of_secrets_names_all_of_them() -> None:
    from infra.settings import PREFIX, SECRETS

    assert {f"{PREFIX}{name.upper()}_FILE" for name in SECRETS} <= set(re.findall(r"`(SAMEFOLD_\w+)[`=]", PAGE))
