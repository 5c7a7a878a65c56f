"""The errors that a user of Samefold can get.

    SamefoldError                 what happened, and what to do
    ├── NotConfigured             no Kafka or no database is set
    ├── BadSettings               a setting has a wrong value, or a name that does not exist
    └── …                         each part of Samefold derives its own, next to the code that raises it

A subclass is a name; an error has a message (what happened) and a `hint` (what to do). `samefold` prints them in two lines, without
a traceback. Any other exception is a defect: its traceback goes to a file, and of a process into the log.
"""

import re
from typing import Any, ClassVar

MOST_WORDS = 500
"""The most characters that are kept of another library's error."""
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class SamefoldError(Exception):
    """Base of all named errors: `raise TopicMissing("There is no topic 'events'.", "Run `samefold db upgrade`.")`.

    `code` is the class's name in kebab case, for JSON output, logs and HTTP bodies. It is part of the public face:
    renaming a class renames its code.
    """

    code: ClassVar[str] = "samefold-error"
    exit_code: ClassVar[int] = 1
    is_public: ClassVar[bool] = False
    """Whether clients of the API may read message and hint: they hold no address, no path and no text of another program."""

    is_defect: ClassVar[bool] = False
    """Whether the service's own code is wrong: a client that asks again gets the same."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "code" not in cls.__dict__:
            cls.code = _HUMP.sub("-", cls.__name__).lower()

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are unpickled by calling the class with `args`; subclasses that ask for more would be lost on the
        # way out of a worker process.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[SamefoldError], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> SamefoldError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(attributes)
    return error


def in_words(error: BaseException) -> str:
    """Another library's error on one line, as any database, log and terminal can hold it."""
    kind = type(error).__name__
    try:
        text = " ".join(str(error)[:MOST_WORDS].split())
    except Exception:  # its own __str__ fails
        return kind
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return f"{kind}: {text}" if text else kind


def printable(text: str, keep: str = "") -> str:
    """The text with what is not printable escaped, but for `keep`: line breaks of every kind, and what a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


class PartEnded(SamefoldError):
    """A thread or task ended that must run as long as the process."""


class NotConfigured(SamefoldError):
    """Kafka or PostgreSQL is needed, and no setting says where it is."""


class BadSettings(SamefoldError):
    """A setting has a value outside its bounds, or its name is unknown."""

    exit_code = 2
