"""The command line, `samefold`. Samefold's: an update replaces it.

Each module of this package, and each `cli.py` in a folder next to `tools` such as `demo`, holds one group of commands. Modules are
found by presence and have a function `register(app: typer.Typer) -> None`. They import heavy modules inside their commands, since
every command pays for the imports of all.

Exit codes:
    0    done
    1    an error, or a difference found
    2    wrong usage or wrong settings
    130  interrupted
"""

import sys
import traceback
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from tempfile import NamedTemporaryFile
from typing import Annotated

import typer

from infra.errors import SamefoldError, in_words, printable

INTERRUPTED = 130

# options that several commands have
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
EngineName = Annotated[str, typer.Option("--engine", help="auto, local or spark; auto chooses by the log's size.")]
Master = Annotated[str | None, typer.Option(help="Where Spark runs: spark://…, k8s://…, yarn, local[2].")]
Processes = Annotated[int | None, typer.Option(min=1, help="Worker processes of the local engine.")]
Wait = Annotated[float, typer.Option("--wait", min=0, help="Seconds for queries that lock a SQL view to end.")]
StreamName = Annotated[str, typer.Argument(help="A stream's name, e.g. rooms/12.")]
ViewName = Annotated[str, typer.Argument(help="A view.")]


def build() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(
        name="samefold",
        help="The same fold, live and rebuilt, applied once.",
        epilog="Exit codes: 0 done, 1 an error or a difference found, 2 wrong usage or settings, 130 interrupted.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    groups = {found.name: f"{__name__}.{found.name}" for found in iter_modules(__path__)}
    import_module("tools.former_names")
    groups |= {file.parent.name: f"{file.parent.name}.cli" for file in Path(__file__).parents[2].glob("*/cli.py")}
    for _, module in sorted(groups.items()):
        import_module(module).register(app)
    return app


class UnexpectedError(SamefoldError):
    """A defect, of Samefold or of the service's own code."""


def main() -> None:
    """The console script: prints an error in two lines. A defect's traceback goes to a file; of `samefold run`, to stderr."""
    try:
        build()()
    except SamefoldError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if sys.argv[1:2] == ["run"]:  # its output is a log
            raise
        # only this user may read it, and its name is the error's id
        with NamedTemporaryFile(
            "w", prefix="samefold-", suffix=".txt", errors="backslashreplace", delete=False
        ) as file:
            traceback.print_exception(error, file=file)
        print_error(
            UnexpectedError(in_words(error), f"Samefold or this service has a defect: its traceback is in {file.name}.")
        )
        sys.exit(UnexpectedError.exit_code)


def print_error(error: SamefoldError) -> None:
    """Print to stderr what happened, in red, and below it what to do."""
    message, hint = printable(error.message, keep="\n"), printable(error.hint, keep="\n")
    typer.secho(f"{error.code}: {message}", fg="red", err=True)
    if hint:
        typer.echo(f"  → {hint}", err=True)
