"""How a long-running process ends: with one line that says why, and a code that its supervisor sees."""

from __future__ import annotations

import logging
from collections.abc import Callable

from infra.errors import SamefoldError


def exit_code_of(work: Callable[[], object], log: logging.Logger, who: str) -> int:
    """Do the work of a process and say what ended it: 0, the exit code of a named error, 1 for a defect, with its traceback.

    Logging is over then. The caller leaves by `os._exit`: `sys.exit` would wait for requests to what is away.
    """
    code = 0
    try:
        work()
    except SamefoldError as error:
        log.error("%s stops: %s: %s", who, error.code, error)
        code = error.exit_code
    except BaseException:
        log.exception("%s stops: a defect", who)
        code = 1
    logging.shutdown()
    return code
