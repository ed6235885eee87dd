"""The tree keeps its shape: packages listed, imports pointing down, files of a readable size, commands documented."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ptxtrain.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
FOLDERS = ("cli", "data", "engine", "presets", "ptx")

# Who may import whom. The engine takes shards and the loader from `data`, and their errors; a model knows no corpora.
MAY_IMPORT = {
    "cli": {"cli", "engine", "data", "ptx"},
    "engine": {"engine", "ptx", "data.shards", "data.loader", "data.errors"},
    "data": {"data"},
    "ptx": {"ptx"},
    "presets": set(),
}
MOST_LINES = 500


def _python_files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_names_of_test_files_are_unique() -> None:
    """pytest imports them by name alone: of two that are called the same, one would not be run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def _own_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and dotted names of what a file imports of ours, without the leading `ptxtrain.`, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("ptxtrain."):
                yield node.lineno, name.removeprefix("ptxtrain.")


def test_the_packages_list_is_the_tree() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        "ptxtrain." + ".".join(path.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert sorted(settings["packages"]) == sorted(found)
    assert settings["package-dir"] == {f"ptxtrain.{folder}": folder for folder in FOLDERS}


def test_every_folder_with_files_is_a_package_whose_files_are_installed() -> None:
    """Data files are installed by pattern: one that no pattern takes would be missing outside a checkout."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_dir() or "__pycache__" in path.parts:
                continue
            assert (path.parent / "__init__.py").exists(), f"{path.parent} has files but no __init__.py"
            if path.suffix != ".py":
                package = "ptxtrain." + ".".join(path.parent.relative_to(ROOT).parts)
                assert any(path.match(pattern) for pattern in patterns.get(package, [])), f"{path} is not installed"


@pytest.mark.parametrize("path", _python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    allowed = MAY_IMPORT[path.relative_to(ROOT).parts[0]]
    for line, name in _own_imports(path):
        ok = any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)
        assert ok, f"{path.relative_to(ROOT)}:{line} imports ptxtrain.{name}"


@pytest.mark.parametrize("path", _python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_say_what_they_are_and_stay_readable(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES, "two files would be clearer"
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "no docstring says what the file does"
    if tree.body[1:]:
        assert "from __future__ import annotations" in text
    assert "# TODO" not in text and "NotImplementedError" not in text


def test_every_command_is_a_file_and_every_file_of_a_command_is_listed() -> None:
    exposed = {
        path.stem
        for path in (ROOT / "cli").glob("*.py")
        if any(
            isinstance(node, ast.FunctionDef) and node.name == "command"
            for node in ast.parse(path.read_text(encoding="utf-8")).body
        )
    }
    assert exposed == {name.replace("-", "_") for name in COMMANDS}


def test_the_readme_shows_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"ptxtrain {name}" in text, f"README.md does not mention `ptxtrain {name}`"


def test_the_top_level_is_fixed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout: what is generated cannot be told from what is shipped")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    files = {
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Makefile",
        ".ci",
        ".gitignore",
        "pyproject.toml",
    }
    assert top <= {*FOLDERS, "tests"} | files
