"""The README's first screen: two set-up commands, each enough on a fresh machine, and both real."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCREEN = 40  # lines


def _first_screen() -> str:
    return "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:SCREEN])


def test_the_first_screen_has_exactly_two_set_up_commands() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", _first_screen(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1, "one block holds the set-up commands"
    commands = [line.partition("#")[0].strip() for line in blocks[0].splitlines() if line.strip()]
    assert commands == ["make demo", "make test"]


def test_make_knows_both() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test", "lint"} <= set(targets)


def test_files_that_the_readme_points_at_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"`((?:cli|engine|ptx|data|tests|presets)/[\w./]+\.\w+)`", text):
        assert (ROOT / path).exists(), path


def test_the_examples_of_the_kit_run_and_show_every_function() -> None:
    """In order, as one session: they print what they say, and no function of the kit is left out."""
    from ptxtrain.engine import kit

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text[text.index("## The training kit") :]
    section = section[: section.index("\n## ")]
    examples = doctest.DocTestParser().get_doctest(section, {}, "README.md", "README.md", 0)
    assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(examples).failed == 0
    shown = "".join(example.source for example in examples.examples)
    for name in set(kit.__all__) - {"ContractError"}:
        assert f"kit.{name}(" in shown, f"{name} has no example"
        assert name == "on" or f"`{name}`" in section, f"{name} is not in the table"
