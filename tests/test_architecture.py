"""The folders, the packaging and the arrows between packages are what docs/architecture.md says."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {name: ROOT / folder for name, folder in PYPROJECT["tool"]["setuptools"]["package-dir"].items()}

# What each package may import of the others, beside itself and the shared `dlaunch`.
ARROWS = {
    "dlaunch": set(),
    "dlaunch.launcher": {"dlaunch.agent"},
    "dlaunch.agent": {"dlaunch.rendezvous"},
    "dlaunch.rendezvous": set(),
    "dlaunch.simulation": {"dlaunch.agent", "dlaunch.rendezvous"},
    "dlaunch.worker": set(),
    "dlaunch.parallel": {"dlaunch.worker"},
}
# `python -m dlaunch` and the lazy public names stand at the front door and look inwards.
FRONT_DOOR = {("dlaunch/__main__.py", "dlaunch.launcher"), ("dlaunch/__init__.py", "dlaunch.parallel")}
HOMES = {
    "click": {"dlaunch.launcher"},
    "rich": {"dlaunch.launcher"},
    "psutil": {"dlaunch.agent"},
    "etcd3": {"dlaunch.rendezvous"},
    "grpc": {"dlaunch.rendezvous"},
    "google": {"dlaunch.rendezvous"},
    "torch": {"dlaunch.worker", "dlaunch.parallel"},
    "numpy": {"dlaunch.worker", "dlaunch.parallel"},
}


def sources() -> list[tuple[str, Path]]:
    owner = {folder: package for package, folder in FOLDERS.items()}
    everything = sorted({path for folder in FOLDERS.values() for path in own_files(folder)})
    return [(next(owner[parent] for parent in path.parents if parent in owner), path) for path in everything]


def own_files(folder: Path) -> list[Path]:
    found = []
    for directory, folders, files in os.walk(folder):  # does not follow the links in dlaunch/
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [Path(directory) / name for name in files if name.endswith(".py")]
    return found


def imported_modules(path: Path, package: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            names.add(package)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def house_of(module: str) -> str | None:
    """The package of ours, with all its rooms, that a module belongs to: arrows run between these."""
    if module.partition(".")[0] != "dlaunch":
        return None
    return max((name for name in ARROWS if module == name or module.startswith(name + ".")), key=len)


@pytest.mark.parametrize(("package", "path"), sources(), ids=lambda value: str(value).removeprefix(str(ROOT) + "/"))
def test_a_package_imports_another_only_along_an_arrow(package: str, path: Path) -> None:
    relative, house = str(path.relative_to(ROOT)), house_of(package)
    assert house
    for module in imported_modules(path, package):
        other = house_of(module)
        allowed = other in {None, house, "dlaunch"} | ARROWS[house] or (relative, other) in FRONT_DOOR
        assert allowed, f"{relative} imports {module}: no arrow from {house} to {other}"


@pytest.mark.parametrize(("package", "path"), sources(), ids=lambda value: str(value).removeprefix(str(ROOT) + "/"))
def test_a_third_party_package_is_imported_only_in_its_home(package: str, path: Path) -> None:
    for module in imported_modules(path, package):
        homes = HOMES.get(module.partition(".")[0])
        assert homes is None or house_of(package) in homes, f"{path} imports {module}, whose home is {homes}"


def test_disk_package_list_and_links_agree() -> None:
    listed = set(PYPROJECT["tool"]["setuptools"]["packages"])
    assert listed == set(FOLDERS)
    assert {name for name in listed if name.count(".") < 2} == set(ARROWS)
    links = {f"dlaunch.{path.name}": path for path in (ROOT / "dlaunch").iterdir() if path.is_symlink()}
    assert set(links) | {"dlaunch"} == set(ARROWS)
    for name, link in links.items():
        assert link.readlink() == Path("..") / FOLDERS[name].name, f"{link} must be relative to work in any checkout"


def test_every_folder_with_code_is_a_listed_package_or_its_data() -> None:
    data = PYPROJECT["tool"]["setuptools"]["package-data"]
    for package, folder in FOLDERS.items():
        for path in own_files(folder):
            if path.parent not in FOLDERS.values():
                inside = path.relative_to(folder)
                assert any(inside.match(pattern) for pattern in data.get(package, [])), f"{path} would miss in a wheel"


def test_the_launcher_and_the_agent_run_without_torch_rich_and_psutil_imported(tmp_path: Path) -> None:
    """Start-up cost is a promise: the heavy packages are imported only where they are needed."""
    import subprocess

    code = (
        "import sys; from dlaunch.launcher.main import main; import dlaunch.agent.run; "
        "print(*sorted({'torch', 'rich', 'psutil', 'numpy', 'asyncio', 'grpc'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.split() == []
