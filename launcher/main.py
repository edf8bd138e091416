"""The ``dlaunch`` command: a thin shell of click around the table of options, and the one place that ends in a code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from dlaunch import __version__
from dlaunch.errors import DlaunchError, ExitCode

from .options import OPTIONS, Group, Option
from .text import say

if TYPE_CHECKING:
    from .summary import OtherEnd

_SETTINGS = {
    "token_normalize_func": lambda name: name.replace("_", "-"),
    "allow_interspersed_args": False,  # what stands after the script is the script's
    "help_option_names": ["-h", "--help"],
}
_SUMMARY = """Run SCRIPT in one process per worker, restart them when one fails, and stop them all together.

Everything after SCRIPT is handed to it. Every flag can also be set by DLAUNCH_<FLAG> or, as for torchrun, PET_<FLAG>
in the environment, and be written with underscores."""


class _RunCommand(click.Command):
    """Its help shows the options under the headings of the table."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group in Group:
            with formatter.section(group.value):
                formatter.write_dl([_help_row(option) for option in OPTIONS if option.group is group])


class _DefaultsToRun(click.Group):
    """``dlaunch train.py`` is ``dlaunch run train.py``; the help of ``dlaunch`` itself lists the flags of run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *ctx.help_option_names, "--version"):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(80)) for name, command in self.commands.items()])
        self.commands["run"].format_options(ctx, formatter)
        with formatter.section("Also"):
            formatter.write_dl([("-h, --help", "This text."), ("--version", "The version.")])


def _help_row(option: Option) -> tuple[str, str]:
    names = ", ".join(filter(None, (option.short, option.synonym, option.name)))
    if option.negative:
        names = f"{option.name}/{option.negative}"
    default = f"  [{option.default}]" if option.default else ""
    return f"{names} {option.metavar}".strip(), option.help + default


def _click_option(option: Option) -> click.Option:
    if option.is_flag:
        names = f"{option.name}/{option.negative}" if option.negative else option.name
        return click.Option([names, *filter(None, (option.short,)), option.dest], is_flag=True, default=None)
    return click.Option([*option.spellings, option.dest], type=click.UNPROCESSED, default=None)


def command_line() -> click.Group:
    """The commands, made from the table of options."""
    command = click.Argument(["command"], nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
    run = _RunCommand(
        "run",
        callback=_run,
        params=[*map(_click_option, OPTIONS), command],
        help=_SUMMARY,
        short_help="Run a script on this node (the default).",
        context_settings=_SETTINGS,
        options_metavar="[FLAGS]",
    )
    return _DefaultsToRun(
        "dlaunch",
        commands={"run": run},
        params=[_version_option()],
        help=_SUMMARY,
        context_settings=_SETTINGS,
        options_metavar="[run] [FLAGS]",
        subcommand_metavar="SCRIPT [ARGS]...",
    )


def _version_option() -> click.Option:
    return click.Option(["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_print_version)


def _print_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"dlaunch {__version__}")
        ctx.exit()


def _run(command: Sequence[str], **given: Any) -> int:
    from .run import run_job, specify_from_here  # noqa: PLC0415  -- the help does without

    return run_job(specify_from_here(given, command))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (without the program's name; None: sys.argv) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_standard_descriptors()
    try:
        code = command_line().main(arguments, prog_name="dlaunch", standalone_mode=False)
        return code if isinstance(code, int) else ExitCode.OK
    except click.ClickException as error:
        from .mistakes import as_usage_error  # noqa: PLC0415

        return _refuse(as_usage_error(error, arguments), arguments)
    except DlaunchError as error:
        return _refuse(error, arguments)
    except (click.Abort, KeyboardInterrupt):
        say("dlaunch: interrupted.")
        return _end("refused", ExitCode.INTERRUPTED, "Interrupted outside of the job.", arguments)
    except Exception as error:
        return _report_bug(error, arguments)


def _open_standard_descriptors() -> None:
    """Put /dev/null where a standard stream was closed (``dlaunch ... >&-``), lest a pipe of ours lands there."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _refuse(error: DlaunchError, arguments: Sequence[str]) -> int:
    say(f"dlaunch: {error}")
    return _end("refused", error.exit_code, str(error), arguments)


def _report_bug(error: Exception, arguments: Sequence[str]) -> int:
    import traceback  # noqa: PLC0415  -- only a bug pays for it

    say("".join(traceback.format_exception(error)).rstrip("\n"), one_line=False)
    say(f"dlaunch: this is a bug of dlaunch {__version__}: please report it with the lines above.")
    reason = f"A bug of dlaunch: {type(error).__name__}: {error}"
    return _end("crashed", ExitCode.INTERNAL, reason, arguments)


def _end(state: OtherEnd, code: ExitCode, reason: str, arguments: Sequence[str]) -> int:
    """Tell programs too, where the command line or the environment names the file of the summary."""
    from .mistakes import summary_file  # noqa: PLC0415

    if path := summary_file(arguments, os.environ):
        from .summary import write_other_end  # noqa: PLC0415

        write_other_end(path, state, code, reason)
    return code
