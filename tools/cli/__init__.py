"""The command line, `samefold`. Samefold's: an update replaces it.

Each module of this package holds the command of its name, a function, or the group of commands of its name, `app`. It is imported
when that command is run, or its own help asked for.

A `cli.py` in a folder next to `tools`, such as `demo`, adds commands with a function `register(app: typer.Typer) -> None`. It is
found by presence, and imports heavy modules inside its commands: every command pays for its imports.

Exit codes:
    0    done
    1    an error, or a difference found
    2    wrong usage or wrong settings
    130  interrupted
"""

import ast
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from tempfile import NamedTemporaryFile
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from infra.errors import SamefoldError, in_words, printable

INTERRUPTED = 130

# options that several commands have
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
EngineName = Annotated[str, typer.Option("--engine", help="auto, local or spark; auto chooses by the log's size.")]
Master = Annotated[str | None, typer.Option(help="Where Spark runs: spark://…, k8s://…, yarn, local[2].")]
Tasks = Annotated[
    int | None, typer.Option(min=1, max=4096, help="Tasks of the load, at most one for each 10,000 records.")
]
Processes = Annotated[int | None, typer.Option(min=1, help="Worker processes of the local engine.")]
Wait = Annotated[float, typer.Option("--wait", min=0, help="Seconds for queries that lock a SQL view to end.")]
StreamName = Annotated[str, typer.Argument(help="A stream's name, e.g. rooms/12.")]
ViewName = Annotated[str, typer.Argument(help="A view.")]


class OfModule(TyperCommand):
    """A command of this package, whose module is imported when the command is run or its own help is asked for."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Of the module's command or group, in place of this one."""
        module = import_module(f"{__name__}.{self.name}")
        if (app := getattr(module, "app", None)) is None:
            app = new_app()
            app.command()(getattr(module, str(self.name)))
        return get_command(app).make_context(*arguments, **options)

    def get_short_help_str(self, limit: int = 45) -> str:
        """For the list of commands: from the docstring of the module's function of its name, or of the module."""
        module = ast.parse(Path(__file__).with_name(f"{self.name}.py").read_text())
        functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
        self.help = ast.get_docstring(functions.get(str(self.name), module))
        return super().get_short_help_str(limit)


def new_app(doc: str | None = None, **options: Any) -> typer.Typer:
    """The help of a group of commands is its module's docstring, of one command its function's."""
    return typer.Typer(help=doc, add_completion=False, rich_markup_mode=None, **options)


def build() -> typer.Typer:
    """The application with all its commands."""
    app = new_app(
        "The same fold, live and rebuilt, applied once.",
        name="samefold",
        epilog="Exit codes: 0 done, 1 an error or a difference found, 2 wrong usage or settings, 130 interrupted.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    import_module("tools.former_names")
    others = {file.parent.name for file in Path(__file__).parents[2].glob("*/cli.py")}
    for name in sorted(others | {found.name for found in iter_modules(__path__)}):
        if name in others:
            import_module(f"{name}.cli").register(app)
        else:
            app.command(name, cls=OfModule)(lambda: None)
    return app


class NotConfirmed(SamefoldError):
    """A command asked, and nobody answered yes."""


def confirm(question: str, *, yes: bool) -> None:
    """Ask on the terminal, unless with `--yes`. Raises NotConfirmed."""
    with suppress(typer.Abort):  # Ctrl-C, or there is nobody to answer
        if yes or typer.confirm(question, err=True):
            return
    raise NotConfirmed("Nothing was done.", "Answer y, or add --yes.")


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
