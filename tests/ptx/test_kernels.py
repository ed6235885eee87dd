"""What holds for every kernel's text: its contract, its partners, its rounding, its parameters' names and order."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ptxtrain.ptx import specs
from ptxtrain.ptx.render import REFERENCES, SOURCES, reference_source, render

ROOT = Path(__file__).parents[2]
CONTRACT = ("Grid", "Block", "Shared", "Owner", "Registers", "Source")
SECTIONS = ["where this thread works", "pointers", "prologue", "loop", "epilogue", "store"]
OPS = {path.stem for path in (ROOT / "engine" / "ops").glob("*.py")} - {"__init__", "checks", "scalars"}
OUTPUTS = {  # a kernel's parameters are outputs, inputs, sizes, scalars: how many of them are written
    "adamw_update": 4, "attention_dq": 2, "attention_forward": 2, "cross_entropy_forward": 2, "rmsnorm_backward": 2,
    "cross_entropy_rows": 3,
    "kv_append": 3,
    "swiglu_backward": 2, "layernorm_backward": 3, "layernorm_forward": 3, "rmsnorm_forward": 2,
}  # fmt: skip


def op_of(stem: str) -> str:
    """The op that a file belongs to: `rmsnorm_backward` is a part of `rmsnorm`. Attention's PTX is the fast way's."""
    if stem in OPS:
        return stem
    if stem in SOURCES and stem.startswith("attention_"):
        return "flash_attention"
    found = [op for op in OPS if stem == op or stem.startswith(op + "_")]
    assert len(found) == 1, f"{stem} belongs to {found or 'no op'}; ops are {sorted(OPS)}"
    return found[0]


@pytest.mark.parametrize("stem", SOURCES)
def test_contract_comes_first_and_in_order(stem: str) -> None:
    text = render(stem).split("\n", 1)[1].lstrip()
    header = text[: text.index(".version")]
    assert header.startswith(f"// {stem}: "), "the first line names the kernel and its formula"
    assert all(line.startswith("//") for line in header.splitlines())
    fields = [word for word in re.findall(r"^// (\w+) +", header, re.MULTILINE) if word in CONTRACT]
    assert fields == list(CONTRACT)


@pytest.mark.parametrize("stem", REFERENCES)
def test_references_have_a_contract(stem: str) -> None:
    header = REFERENCES[stem].read_text(encoding="utf-8").split("\n\n")[0]
    assert header.startswith("// ") and "Owner" in header and "Block" in header


@pytest.mark.parametrize("stem", SOURCES)
def test_sections_are_ruled_and_in_order(stem: str) -> None:
    titles = re.findall(r"^    // -{64} ([a-z ]+)", render(stem), re.MULTILINE)
    ranks = [SECTIONS.index(title) for title in titles]
    assert ranks[:2] == [0, 1] and ranks == sorted(ranks)


@pytest.mark.parametrize("stem", SOURCES)
def test_every_rounding_is_written(stem: str) -> None:
    """Without .rn the assembler may contract a multiplication and an addition."""
    text = re.sub(r"//.*", "", render(stem))
    loose = re.findall(r"\b((?:add|sub|mul|fma|mad|div|sqrt|rcp)\.(?!rn)[\w.]*f(?:32|64))\b", text)
    assert not loose
    assert re.search(r"^\.version 7\.0$", text, re.MULTILINE) and re.search(r"^\.target sm_80$", text, re.MULTILINE)


@pytest.mark.parametrize("stem", SOURCES)
def test_partners(stem: str) -> None:
    """A stem has its op and the op's test; every stem has a Spec."""
    op = op_of(stem)
    assert (ROOT / "tests" / "ops" / f"test_{op}.py").is_file()
    assert stem in specs.DEFAULTS


def test_every_op_has_kernels_and_a_test() -> None:
    owners = {op_of(stem) for stem in (*SOURCES, *REFERENCES)}
    assert owners == OPS
    assert {f"test_{op}.py" for op in OPS} <= {path.name for path in (ROOT / "tests" / "ops").glob("*.py")}
    assert set(specs.DEFAULTS) == set(SOURCES)


@pytest.mark.parametrize("stem", SOURCES)
def test_parameters_are_pointers_then_sizes_then_scalars(stem: str) -> None:
    types = re.findall(r"^    \.param \.(\w+) (\w+)", SOURCES[stem].read_text(encoding="utf-8"), re.MULTILINE)
    kinds = [kind for kind, _ in types]
    pointers = kinds.count("u64")
    assert pointers > OUTPUTS.get(stem, 1) - 1 and kinds[:pointers] == ["u64"] * pointers
    flags = {"bf16", "accumulate", "inverse", "has_copy", "gradient"}
    rest = ["flag" if name in flags else kind for kind, name in types[pointers:]]
    assert rest == sorted(rest, key=["u32", "f32", "flag"].index), "sizes, scalars, flags"


@pytest.mark.parametrize("stem", SOURCES)
def test_parameters_have_the_ops_names(stem: str) -> None:
    """The buffers of a kernel are called in PTX as in its op's signature."""
    names = re.findall(r"^    \.param \.u64 (\w+)", SOURCES[stem].read_text(encoding="utf-8"), re.MULTILINE)
    tree = ast.parse((ROOT / "engine" / "ops" / f"{op_of(stem)}.py").read_text(encoding="utf-8"))
    signatures = [[a.arg for a in f.args.args] for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
    assert any(set(names) <= set(signature) for signature in signatures), (names, signatures)


@pytest.mark.parametrize("stem", SOURCES)
def test_loads_and_stores_of_activations_are_written_for_both_dtypes(stem: str) -> None:
    text = render(stem)
    if ".param .u32 bf16" not in text:
        return
    assert re.search(r"setp\.ne\.u32 +%is_bf16, %bf16, 0;", text) and re.search(r"selp\.u32 +%size, 2, 4", text)
    for access in ("ld", "st"):
        narrow = len(re.findall(rf"@%i[sn]_bf16 {access}\.global\.[ub]16", text))
        wide = len(re.findall(rf"(?:@%in_f32|@!%is_bf16) {access}\.global\.[bf]32", text))
        assert narrow == wide
        assert narrow or access == "st" or stem == "rmsnorm_forward"


@pytest.mark.parametrize("stem", REFERENCES)
def test_references_are_whole(stem: str) -> None:
    text = reference_source(stem)
    assert "#include" not in re.sub(r"//.*", "", text) and "__device__ inline float to_f32(bf16 x)" in text
    assert "atomic" not in re.sub(r"//.*", "", text)
