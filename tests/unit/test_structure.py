"""The house: arrows point one way, the service knows no torch, and public names are the ones that are listed."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What each room may import of ours, the longest matching name first.
ARROWS = {
    "l3store.layout": {"l3store.layout"},
    "l3store.errors": set(),
    "l3store.loopback": set(),
    "l3store.backend": {"l3store.backend", "l3store.layout", "l3store.errors"},
    "l3store.index": {"l3store.index", "l3store.backend", "l3store.layout", "l3store.errors"},
    "l3store.service": {
        "l3store", "l3store.service", "l3store.index", "l3store.backend", "l3store.layout", "l3store.errors",
        "l3store.loopback",
    },
    "l3store.config": {"l3store.backend"},
    "l3store.cli.bench": {"l3store.cli", "l3client.bench"},
    "l3store.cli.demo": {"l3store.cli", "l3client.demo"},
    "l3store.cli": {
        "l3store", "l3store.cli", "l3store.service", "l3store.index", "l3store.backend", "l3store.layout",
        "l3store.errors", "l3store.config",
    },
    "l3client": {"l3client", "l3store.layout", "l3store.errors", "l3store.loopback"},
}  # fmt: skip


def modules() -> Iterator[tuple[str, Path]]:
    for base in (ROOT / "l3store", ROOT / "gpu" / "l3client"):
        for path in sorted(base.rglob("*.py")):
            parts = [base.name, *path.relative_to(base).with_suffix("").parts]
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def room(name: str, rooms: set[str]) -> str | None:
    """The longest of ``rooms`` that ``name`` is in."""
    return max((r for r in rooms if name == r or name.startswith(r + ".")), key=len, default=None)


MODULES = dict(modules())


@pytest.mark.parametrize("name", MODULES)
def test_arrows_point_one_way(name: str) -> None:
    own = room(name, set(ARROWS)) or "l3store.cli"
    for imported in imports(MODULES[name]):
        if imported.split(".")[0] in {"l3store", "l3client"}:
            assert room(imported, ARROWS[own] - {"l3store"}) or imported in ARROWS[own], f"{name} imports {imported}"


@pytest.mark.parametrize("name", [n for n in MODULES if n.startswith("l3store")])
def test_the_service_knows_no_torch(name: str) -> None:
    assert not {i.split(".")[0] for i in imports(MODULES[name])} & {"torch", "triton", "numpy"}


@pytest.mark.parametrize(
    "imported", ["l3store.service.server", "l3store.cli", "l3store.layout", "l3client", "l3client.transport"]
)
def test_what_runs_without_torch_does_not_load_it(imported: str) -> None:
    code = f"import sys, {imported}; sys.exit(bool({{'torch', 'triton', 'numpy'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", [n for n, p in MODULES.items() if p.name == "__init__.py"])
def test_public_names_are_sorted_and_exist(name: str) -> None:
    module = importlib.import_module(name)
    names = getattr(module, "__all__", [])
    assert list(names) == sorted(names)
    assert all(hasattr(module, public) for public in names)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_for(name: str) -> None:
    assert ast.get_docstring(ast.parse(MODULES[name].read_text())), f"{name} has no docstring"
