"""``python -m kernels_patch check | bench``: correctness of the patch here, then its speed.

On a Hopper GPU where there is one (``kernels_patch.gpu``), else on the CPU; ``--device`` chooses.
Parses, calls, prints; exits 0 when all is well, 1 when a case failed, a shape regressed or the
kernels are not there, 2 for wrong usage.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib import import_module
from types import ModuleType

import click
import torch
from click.core import ParameterSource

from kernels_patch import bench as speed
from kernels_patch import check as correctness
from kernels_patch import native, torch_form

DEVICE = click.option(
    "--device",
    type=click.Choice(["cpu", "gpu"]),
    help="Whose kernels; without it the GPU's where a Hopper GPU is, else the CPU's.",
)
QUICK = click.option("--quick", is_flag=True, help="The small cases and shapes only.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Correctness, then speed, of the INT8 KV kernels on this machine."""


@main.command()
@DEVICE
@click.option(
    "--impl",
    type=click.Choice(["native", "torch"]),
    default="native",
    show_default=True,
    help="The compiled kernels (every instruction set of this CPU), or the plain torch form.",
)
@QUICK
@click.pass_context
def check(ctx: click.Context, device: str | None, impl: str, quick: bool) -> None:
    """Compare the kernels with float64; exits 1 when a case is out of bounds."""
    if _is_for_gpu(ctx, device):
        sys.exit(_import_gpu("check").main())
    implementations: dict[str, native.NativeKernels | ModuleType] = {"torch": torch_form}
    if impl == "native":
        implementations = {isa: native.load(isa) for isa in native.list_instruction_sets()}
    failed = [name for name, i in implementations.items() if not _check(name, i, quick)]
    if not quick:
        _print_budget()
    if failed:
        click.echo(f"FAILED: {', '.join(failed)}")
        sys.exit(1)
    click.echo("every case is within its bounds")


@main.command()
@DEVICE
@click.option(
    "--heads",
    type=click.Choice(list(speed.HEADS)),
    multiple=True,
    default=list(speed.HEADS),
    show_default=True,
    help="Query heads / KV heads x head size; may be repeated.",
)
@click.option(
    "--route",
    "routes",
    type=click.Choice(speed.ROUTES),
    multiple=True,
    default=list(speed.ROUTES),
    show_default=True,
    help="May be repeated.",
)
@QUICK
@click.pass_context
def bench(
    ctx: click.Context,
    device: str | None,
    heads: tuple[str, ...],
    routes: tuple[str, ...],
    quick: bool,
) -> None:
    """Time the routes against stock and SDPA, after a check; exits 1 when a shape is slower."""
    if _is_for_gpu(ctx, device):
        sys.exit(_import_gpu("bench").main())
    kernels = native.load()
    if not _check(kernels.isa, kernels, quick=True):
        click.echo("FAILED: no speed is reported for kernels that are not right")
        sys.exit(1)
    click.echo(f"\n{'heads':10}{'route':13}{'query':>6}{'history':>8}", nl=False)
    click.echo(f"{'patch ms':>10}{'stock ms':>10}{'SDPA ms':>10}{'patch/stock':>12}{'/SDPA':>7}")
    timings = []
    for name in heads:
        shapes = [s for s in speed.list_shapes(name, quick) if s.route in routes]
        for t in speed.measure(shapes, 0.3 if quick else 2.0):
            timings.append(t)
            s = t.shape
            click.echo(
                f"{s.heads:10}{s.route:13}{s.query_tokens:6}{s.history_tokens:8}{t.patch_ms:10.3f}"
                f"{_number(t.stock_ms, 10)}{t.sdpa_ms:10.3f}{_number(t.ratio, 12)}"
                f"{t.patch_ms / t.sdpa_ms:7.3f}"
            )
    slower = speed.find_regressions(timings)
    yardstick = (
        "stock" if timings[0].stock_ms is not None else "SDPA (vLLM's CPU build is not here)"
    )
    click.echo(
        f"{len(slower)} of {len(timings)} shapes regress against {yardstick}"
        if slower
        else f"no shape regresses against {yardstick}"
    )
    line = {
        "command": " ".join(["python -m kernels_patch", *sys.argv[1:]]),
        "machine": speed.describe_machine(kernels),
        "no_shape_regresses": not slower,
        "timings": [asdict(t) for t in timings],
    }
    click.echo(json.dumps(line, separators=(",", ":")))
    sys.exit(1 if slower else 0)


def _is_for_gpu(ctx: click.Context, device: str | None) -> bool:
    """Whether the GPU's kernels are meant. Options of the CPU's choose the CPU."""
    of_cpu = [
        parameter.opts[0]
        for parameter in ctx.command.params
        if parameter.name != "device"
        and ctx.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
    has_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if device != "gpu":
        return device is None and has_hopper and not of_cpu
    if of_cpu:
        raise click.UsageError(f"{', '.join(of_cpu)} chooses among the CPU's: leave it out")
    if not has_hopper:
        raise click.UsageError("there is no Hopper GPU that PyTorch sees here: give --device cpu")
    return True


def _import_gpu(name: str) -> ModuleType:
    """A module of ``kernels_patch.gpu``; the answer begins with what it is about."""
    try:
        module = import_module(f"kernels_patch.gpu.{name}")
    except ImportError as error:
        raise click.ClickException(
            f"the GPU kernels need {error.name}, which comes with PyTorch's CUDA wheels: install "
            "those, or give --device cpu"
        ) from error
    click.echo(f"on {torch.cuda.get_device_name()} (--device cpu for the CPU's kernels)")
    return module


def _check(name: str, implementation: native.NativeKernels | ModuleType, quick: bool) -> bool:
    """Check and print one implementation; True when every case passed."""
    passed = True
    click.echo(f"\n{name}: errors as shares of the largest |V| (exact: RMS, of the exact output)")
    click.echo(f"{'case':26}{'route':13}{'bytes':>7}{'median':>10}{'worst':>10}{'exact':>10}")
    for case in correctness.list_cases(quick):
        for r in correctness.check_case(implementation, correctness.make_batch(case)):
            passed &= r.passed
            click.echo(
                f"{r.case:26}{r.route:13}{'same' if r.same_bytes else 'DIFFER':>7}"
                f"{r.median_error:10.1e}{r.worst_error:10.1e}{r.exact_rms:10.1e}"
                f"{'' if r.passed else '  FAILED'}"
            )
    return passed


def _print_budget() -> None:
    """What each rounding costs by itself, on normal activations."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*s, generator=g).numpy() for s in ((16, 9, 64), *[(2048, 3, 64)] * 2))
    budget = correctness.compute_error_budget(q, k, v, 0.125)
    parts = "  ".join(f"{name.upper()} {error:.1e}" for name, error in budget.items())
    click.echo(f"\nerror budget (RMS of the output, each rounding alone): {parts}")


def _number(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.3f}"


if __name__ == "__main__":
    try:
        main(prog_name="python -m kernels_patch")
    except native.NativeUnavailable as error:
        click.echo(f"kernels_patch: NO NATIVE KERNELS: {error}", err=True)
        sys.exit(1)
