"""The application: its commands, and how errors become exit codes."""

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sordino.cli.attacks import AuditGroup
from sordino.cli.console import print_error
from sordino.cli.options import COMMANDS
from sordino.commands.running import check_single_process_command, is_rank_zero
from sordino.errors import BudgetExceeded, InvalidArgument, MissingDeclaration, SordinoError


def exit_code(error: BaseException) -> int:
    """2 for usage, 3 for a refused budget, 1 for the rest."""
    if isinstance(error, InvalidArgument | MissingDeclaration):
        return 2
    return 3 if isinstance(error, BudgetExceeded) else 1


class Commands(TyperGroup):
    """A group that ends every failure in one clean line.

    The message of an exception that isn't ours may quote a record, so it is withheld unless SORDINO_DEBUG is set.
    """

    def main(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the program; a line that can't be read is one line on stderr, a document with ``--json``, and code 2."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **extra)
        given = sys.argv[1:] if args is None else list(args)
        try:
            code = super().main(given, prog_name, complete_var, False, **extra)
        except typer.Abort:
            print_error("Interrupted", "Interrupted.", as_json="--json" in given)
            sys.exit(130)
        except Exception as error:
            message = getattr(error, "format_message", None)
            if message is None:
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()  # pyright: ignore[reportAttributeAccessIssue]
                sys.exit(2)
            context = getattr(error, "ctx", None)
            words = f"{message().rstrip('.')}. See `{context.command_path if context else 'sordino'} --help`."
            print_error("UsageError", words, as_json="--json" in given and is_rank_zero())
            sys.exit(2)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: typer.Context) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the command."""
        try:
            return super().invoke(ctx)
        except SordinoError as error:
            print_error(type(error).__name__, str(error), as_json=_speaks_json(ctx))
            raise typer.Exit(exit_code(error)) from error
        except KeyboardInterrupt as error:
            print_error("Interrupted", "Interrupted.", as_json=_speaks_json(ctx))
            raise typer.Exit(130) from error
        except BrokenPipeError as error:
            # Anyone who read the output has seen enough; what is left in the buffer goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from error
        except OSError as error:
            if os.environ.get("SORDINO_DEBUG") or error.filename is None:
                raise
            message = (
                f"a file or folder must be there and open to you, got {str(error.filename)!r} ({error.strerror}). "
                "Check the path."
            )
            print_error(type(error).__name__, message, as_json=_speaks_json(ctx))
            raise typer.Exit(2 if error.errno in _PATHS else 1) from error
        except Exception as error:
            if os.environ.get("SORDINO_DEBUG") or not _is_foreign(error):
                raise
            message = f"{type(error).__name__} was raised unexpectedly. Set SORDINO_DEBUG=1 to see where and why."
            print_error("Unexpected", message, as_json=_speaks_json(ctx))
            raise typer.Exit(1) from error


_PATHS = (
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EROFS, errno.EEXIST, errno.ENAMETOOLONG
)  # fmt: skip
"""What a path that was given wrongly raises; a full disk is another matter."""


def _speaks_json(ctx: typer.Context) -> bool:
    """Of several processes one writes the document."""
    return bool(ctx.meta.get("sordino.json")) and is_rank_zero()


def _is_foreign(error: Exception) -> bool:
    """Typer's own exceptions carry an exit code and print themselves."""
    return not hasattr(error, "exit_code") and not isinstance(error, typer.Abort)


app = typer.Typer(
    name="sordino",
    cls=Commands,
    help="Differentially private machine learning on PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from sordino import __version__

        sys.stdout.write(f"sordino {__version__}\n")
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001 (its callback prints it)
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Differentially private machine learning on PyTorch."""
    check_single_process_command(ctx.invoked_subcommand)


_ORDER = (
    "demo", "train", "tune", "compare", "federate", "describe", "synthesize", "plan", "account", "recipes", "predict",
    "export", "report", "verify", "learn", "attack", "diagnose", "explain",
)  # fmt: skip
_GROUPS = {
    "audit": typer.Typer(
        cls=AuditGroup, help="What an attacker can show about ε: audits, replays, checks.", no_args_is_help=True
    ),
    "data": typer.Typer(help="The named public datasets: which there are, what they hold, where they lie."),
    "schema": typer.Typer(help="The declared schema of your table: draft it, check it.", no_args_is_help=True),
    "runs": typer.Typer(help="Look at run folders.", no_args_is_help=True),
    "ledger": typer.Typer(help="Who spent what on which dataset, and what is left.", no_args_is_help=True),
}


def _add_commands() -> None:
    """Make the commands and put them into the application, those of two words into their groups."""
    for module in ("documentation", "ledger", "planning", "runs", "tables", "training"):
        import_module(f"sordino.cli.{module}")
    for words in _ORDER:
        app.command(words)(COMMANDS[words])
    for words, run in COMMANDS.items():
        group, _, name = words.partition(" ")
        if name:
            _GROUPS[group].command(name)(run)
    for name, group in _GROUPS.items():
        app.add_typer(group, name=name)


_add_commands()


def main() -> None:
    """Entry point of the console script."""
    # Read when torch is loaded: how long its threads spin before they sleep, in rounds of GNU's OpenMP library. At the
    # default of some milliseconds they wait for each other many times as long as they work where other programs run.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    app(prog_name="sordino")
