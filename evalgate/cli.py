"""The command line: parse, call one function, print, exit with the verdict's own code.

Heavy modules are imported inside the commands, so that ``evalgate --help`` answers at once. The
answer goes to stdout, progress and warnings to stderr.
"""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from evalgate import __version__
from evalgate.errors import (
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_INVALID,
    EXIT_PASS,
    EXIT_USAGE,
    EvalgateError,
)

EXIT_BROKEN_PIPE = 141  # 128 and the number of SIGPIPE, as shells have it
FORMATS = ("text", "json", "markdown", "html", "junit")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="evalgate")
def cli() -> None:
    """Did the served model get faster, and is it as accurate as the baseline build?

    Exit codes: 0 pass, 1 fail, 2 usage, 3 inconclusive, 4 invalid evidence, 5 internal error,
    130 interrupted.
    """


def format_option(default: str, choices: Sequence[str] = FORMATS) -> Any:
    return click.option(
        "--format",
        "kind",
        type=click.Choice(list(choices)),
        default=default,
        show_default=True,
        help="Form of the answer on stdout.",
    )


policy_option = click.option(
    "--policy", metavar="FILE", help="TOML file, or a shipped policy: submission, nightly."
)
calibration_option = click.option(
    "--calibration",
    metavar="DIR",
    help="A run made with --calibrate, whose noise is shown beside every delta.",
)


@cli.command()
@click.argument("spec", required=False)
@click.option("--out", metavar="DIR", help="The run directory to make (default: under results/).")
@click.option("--resume", "resume_dir", metavar="DIR", help="Continue an unfinished run.")
@click.option("--calibrate", is_flag=True, help="Baseline against baseline, same schedule.")
@click.option(
    "--until-decided",
    is_flag=True,
    help="Add launches until every rule is decided; the spec's blocks are the least.",
)
@click.option(
    "--max-minutes",
    metavar="M",
    type=click.FloatRange(min=0, min_open=True),
    help="Start no launch that would end later; what is left is for --resume.",
)
@calibration_option
@policy_option
@format_option("text")
@click.pass_context
def run(
    ctx: click.Context,
    spec: str | None,
    out: str | None,
    resume_dir: str | None,
    calibrate: bool,
    until_decided: bool,
    max_minutes: float | None,
    calibration: str | None,
    policy: str | None,
    kind: str,
) -> None:
    """Measure the arms of SPEC and judge them; without SPEC, the embedded default."""
    from evalgate.measure import measure

    # A CI system ends a job by SIGTERM: what was measured is kept, as at Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if resume_dir is not None and (out is not None or calibrate or until_decided):
        raise click.UsageError(
            "--resume continues a run as it was begun: drop --out, --calibrate, --until-decided"
        )
    if until_decided and max_minutes is None:
        raise click.UsageError("--until-decided needs an end: give --max-minutes too")
    if until_decided and calibrate:
        raise click.UsageError(
            "--calibrate shows the noise of a fixed number of launches: drop --until-decided"
        )
    answer = measure(
        spec=spec,
        out=out,
        resume_dir=resume_dir,
        calibrate=calibrate,
        calibration=calibration,
        policy=policy,
        until_decided=until_decided,
        max_minutes=max_minutes,
        kind=kind,
    )
    click.echo(answer.text)
    ctx.exit(answer.exit_code)


@cli.command()
@click.argument("baseline")
@click.argument("candidate")
@policy_option
@click.option("--allow", metavar="FIELD", multiple=True, help="A field that may differ.")
@click.option(
    "--profile",
    metavar="FILE",
    help="Kernel times (Kineto trace or rocprof CSV): the largest gain attention could give.",
)
@calibration_option
@format_option("text")
@click.option("--out", metavar="FILE", help="Write the answer here instead of stdout.")
@click.pass_context
def compare(
    ctx: click.Context,
    baseline: str,
    candidate: str,
    policy: str | None,
    allow: tuple[str, ...],
    profile: str | None,
    calibration: str | None,
    kind: str,
    out: str | None,
) -> None:
    """Judge two stored builds; each is DIR (a run with one arm) or DIR:ARM."""
    from evalgate.commands import compare_builds

    answer = compare_builds(baseline, candidate, policy, list(allow), calibration, kind, profile)
    _deliver(answer.text, out)
    ctx.exit(answer.exit_code)


@cli.command()
@click.argument("run_dir", metavar="RUN")
@policy_option
@calibration_option
@format_option("text")
@click.option("--explain", "explained", is_flag=True, help="Why the verdict is what it is.")
@click.pass_context
def gate(
    ctx: click.Context,
    run_dir: str,
    policy: str | None,
    calibration: str | None,
    kind: str,
    explained: bool,
) -> None:
    """Judge a stored run again; the exit code is the verdict's."""
    from evalgate.commands import judge_again

    if explained and kind != "text":
        raise click.UsageError("--explain answers in text: drop --format")
    answer = judge_again(run_dir, policy, calibration, kind, explained=explained)
    click.echo(answer.text)
    ctx.exit(answer.exit_code)


@cli.command()
@click.argument("run_dir", metavar="RUN")
@policy_option
@calibration_option
@format_option("html", FORMATS)
@click.option("--out", metavar="FILE", help="Write the report here instead of stdout.")
def report(
    run_dir: str, policy: str | None, calibration: str | None, kind: str, out: str | None
) -> None:
    """Render the report of a stored run; exits 0 whatever the verdict."""
    from evalgate.commands import judge_again

    _deliver(judge_again(run_dir, policy, calibration, kind).text, out)


@cli.command()
@click.argument("results_dir")
@click.option("--pinned", metavar="RUN", help="The run that counts as right (default: the oldest).")
@format_option("text", ("text", "json", "html"))
@click.option("--out", metavar="FILE", help="Write the answer here instead of stdout.")
def trend(results_dir: str, pinned: str | None, kind: str, out: str | None) -> None:
    """The nights in a results folder, with change points."""
    from evalgate.commands import show_trend

    _deliver(show_trend(results_dir, pinned, kind).text, out)


@cli.command()
@click.argument("spec", required=False)
@format_option("text", ("text", "json"))
@click.pass_context
def doctor(ctx: click.Context, spec: str | None, kind: str) -> None:
    """What would stand in the way of a run of SPEC; exits 1 when something would end it."""
    from evalgate.measure import diagnose_all

    answer = diagnose_all(spec, kind)
    click.echo(answer.text)
    ctx.exit(answer.exit_code)


@cli.command()
@format_option("text", ("text", "json"))
@click.pass_context
def selftest(ctx: click.Context, kind: str) -> None:
    """Plant faults and show that each is caught; exits 1 when one is not."""
    from evalgate.selftest import compute_exit_code, render_json, render_text, run_selftest

    found = run_selftest()
    click.echo(render_json(found) if kind == "json" else render_text(found))
    ctx.exit(compute_exit_code(found))


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("action", type=click.Choice(["check", "bench"]))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def kernels(ctx: click.Context, action: str, arguments: tuple[str, ...]) -> None:
    """Correctness, then speed, of the patch on this machine (python -m kernels_patch)."""
    command = [sys.executable, "-m", "kernels_patch", action, *arguments]
    ctx.exit(subprocess.run(command, check=False).returncode)


@cli.command()
@click.argument("task")
@click.argument("file")
def score(task: str, file: str) -> None:
    """Score stored predictions (JSON lines) and print JSON."""
    from evalgate.tasks import score_file

    click.echo(json.dumps(score_file(task, Path(file)), ensure_ascii=False, allow_nan=False))


@cli.group()
def tasks() -> None:
    """The tasks: what they ask, how they score, their embedded samples."""


@tasks.command("list")
def tasks_list() -> None:
    """One line for each task."""
    from evalgate.tasks import list_tasks

    for line in list_tasks():
        click.echo(line)


@tasks.command("show")
@click.argument("task")
def tasks_show(task: str) -> None:
    """Prompt, scoring rule, version and one embedded sample of TASK."""
    from evalgate.tasks import show_task

    click.echo(show_task(task))


@tasks.command("export")
@click.argument("task")
@click.option("--samples", default=10, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=0, show_default=True, type=int)
@click.option("--out", metavar="FILE", help="Write here instead of stdout.")
def tasks_export(task: str, samples: int, seed: int, out: str | None) -> None:
    """Embedded samples of TASK as JSON lines in the LongBench shape."""
    from evalgate.tasks import export_task

    _deliver("\n".join(export_task(task, samples, seed)), out)


def _deliver(text: str, out: str | None) -> None:
    """Print the answer, or write it to a new file."""
    if out is None:
        click.echo(text)
        return
    try:
        Path(out).write_text(text + ("" if text.endswith("\n") else "\n"), encoding="utf-8")
    except OSError as exc:
        raise click.UsageError(f"--out {out} cannot be written ({exc.strerror})") from None


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: every failure has its own exit code and one sentence on stderr."""
    sys.exit(_run(argv))


def _run(argv: Sequence[str] | None) -> int:
    try:
        # Without standalone mode click returns the code of ctx.exit, or what the command returned.
        code = cli.main(args=argv, prog_name="evalgate", standalone_mode=False)
        return code if isinstance(code, int) else EXIT_PASS
    except click.ClickException as exc:
        exc.show()
        return EXIT_USAGE
    except EvalgateError as exc:
        click.echo(f"evalgate: {exc}", err=True)
        return exc.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("evalgate: interrupted", err=True)
        return EXIT_INTERRUPTED
    except SystemExit:
        # How click says that whoever read the answer has gone, with a 1 that means "fail" here.
        return EXIT_BROKEN_PIPE
    except Exception as exc:
        if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
            click.echo(f"evalgate: the answer is cut, {exc.strerror}: free the disk", err=True)
            return EXIT_INVALID
        traceback.print_exc()
        click.echo(
            "evalgate: internal error (exit 5): please report it with the lines above", err=True
        )
        return EXIT_INTERNAL


if __name__ == "__main__":
    main()
