"""The layout is the architecture: who may import whom, and what stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Layers of evalgate, lowest first; a module imports only from layers below its own.
MEASURING = [
    {"errors"},
    {"arguments", "metrics", "validation"},
    {"records", "redaction", "workers"},
    {"spec"},
    {"sse", "routes", "progress", "embedded", "gpu", "server_log", "log_probs", "looks", "store"},
    {"leftovers", "origin"},
    {"environment", "memory", "telemetry", "generation", "wire"},
    {"server", "client"},
    {"replay", "sizing", "task_data", "task_prompts"},
    {"fidelity", "tasks"},
    {"load"},
    {"preflight"},
    {"doctor", "live"},
    {"stopping"},
    {"block"},
    {"run"},
]
JUDGING_FORBIDDEN = {
    "spec", "server", "client", "store", "load", "tasks", "live", "block", "run", "stopping",
}  # fmt: skip


def modules(package: str) -> dict[str, Path]:
    folder = ROOT / package
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts): path
        for path in folder.rglob("*.py")
    }


def imports_of(path: Path) -> set[str]:
    """Dotted names of every import in the file, wherever it stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(path: Path) -> set[str]:
    """Top-level evalgate modules that the file imports."""
    return {name.split(".")[1] for name in imports_of(path) if name.startswith("evalgate.")}


def test_evalgate_never_imports_kernels_patch():
    for name, path in modules("evalgate").items():
        roots = {imported.split(".")[0] for imported in imports_of(path)}
        assert "kernels_patch" not in roots, name


def test_only_the_task_module_imports_the_tasks():
    for name, path in modules("evalgate").items():
        roots = {imported.split(".")[0] for imported in imports_of(path)}
        assert "evalgate_tasks" not in roots or name in ("tasks", "task_data"), name


def test_tasks_and_kernels_know_nothing_of_evalgate():
    for package in ("tasks", "kernels_patch"):
        for name, path in modules(package).items():
            roots = {imported.split(".")[0] for imported in imports_of(path)}
            assert "evalgate" not in roots, f"{package}.{name}"


def test_the_measuring_half_imports_downwards_only():
    level = {name: i for i, layer in enumerate(MEASURING) for name in layer}
    for name, path in modules("evalgate").items():
        if name not in level:
            continue
        for imported in own_imports(path) & level.keys():
            assert level[imported] < level[name], f"{name} imports {imported}"


@pytest.mark.parametrize(
    "name",
    [
        "stats",
        "columns",
        "sequential",
        "spread",
        "compare",
        "policy",
        "validity",
        "caveats",
        "gate",
        "ruling",
        "summary",
    ],
)
def test_the_judging_half_knows_no_server_and_no_file(name):
    for module, path in modules("evalgate").items():
        if module == name or module.startswith(f"{name}_"):
            assert not own_imports(path) & JUDGING_FORBIDDEN, module


def test_reports_measure_nothing():
    for name, path in modules("evalgate/report").items():
        assert not own_imports(path) & JUDGING_FORBIDDEN, name


def test_a_judgement_waits_for_nothing_that_it_does_not_need():
    # Together these would take longer to import than a hundred thousand requests to compare.
    code = (
        "import sys, evalgate.cli, evalgate.commands, evalgate.report.json_;"
        "heavy = {'httpx', 'jinja2', 'rich', 'pandas', 'statsmodels', 'scipy.stats', "
        "'scipy.optimize', 'evalgate.run', 'evalgate.client'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_base_install_imports_neither_torch_nor_vllm():
    code = (
        "import sys, evalgate.cli, evalgate.run, evalgate.gate, evalgate.report;"
        "heavy = {'torch', 'vllm', 'transformers'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
