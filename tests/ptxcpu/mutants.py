"""PTX text with small mistakes: what a slip of the keyboard or a wrong generator makes of a right file."""

from __future__ import annotations

import re

import numpy as np

_TOKEN = re.compile(r"//[^\n]*|\s+|[%$.\w]+|.", re.DOTALL)
_STRANGE = [
    "%r1",
    "%rd1",
    "%f1",
    "%p1",
    "0",
    "-1",
    "0f3F800000",
    "4294967296",
    "{",
    "}",
    ";",
    ",",
    "[",
    "]",
    "@%p1",
    "ret",
]
_STRANGE += [
    ".u32",
    ".f32",
    ".b64",
    ".pred",
    ".v2",
    ".wide",
    ".shared",
    "bar",
    "bra",
    "tid",
    "%tid.x",
    "$L__BB0_1",
    "_",
]


def mutant(text: str, seed: int) -> str:
    """`text` with one to three tokens of a function's body deleted, doubled, exchanged or replaced, or lines moved."""
    rng = np.random.default_rng(seed)
    start = text.index("{")
    head, tokens = text[:start], _TOKEN.findall(text[start:])
    places = [i for i, t in enumerate(tokens) if not t.isspace() and not t.startswith("//")]
    for _ in range(int(rng.integers(1, 4))):
        at, other = (places[int(i)] for i in rng.integers(len(places), size=2))
        match rng.integers(6):
            case 0:
                tokens[at] = ""
            case 1:
                tokens[at] = f"{tokens[at]} {tokens[at]}"
            case 2:
                tokens[at], tokens[other] = tokens[other], tokens[at]
            case 3:
                tokens[at] = str(rng.choice(_STRANGE))
            case 4:
                tokens[at] = tokens[other]
            case _:
                del tokens[int(rng.integers(len(tokens) // 2, len(tokens))) :]
                break
    return head + "".join(tokens)


_KINDS = [re.compile(p) for p in (r"%r\d+$", r"%rd\d+$", r"%f\d+$", r"%p\d+$", r"\$L__BB\w+$", r"\d+$")]


def cousin(text: str, seed: int, changes: int = 3) -> str:
    """`text` with some registers, labels or numbers of its bodies exchanged for others of their kind: it still parses."""
    rng = np.random.default_rng(seed)
    start = text.index("{")
    head, tokens = text[:start], _TOKEN.findall(text[start:])
    groups = [[i for i, t in enumerate(tokens) if kind.match(t)] for kind in _KINDS]
    groups = [group for group in groups if len(group) > 1]
    for _ in range(changes):
        group = groups[int(rng.integers(len(groups)))]
        at, other = (group[int(i)] for i in rng.integers(len(group), size=2))
        following = tokens[at + 1] if at + 1 < len(tokens) else ""
        if following != ":" and tokens[at - 1] not in ("<", "."):  # not a declaration
            tokens[at] = tokens[other]
    return head + "".join(tokens)


_ZEROS = {"r": "b32 {}, 0", "rd": "b64 {}, 0", "rs": "b16 {}, 0", "p": "pred {}, 0"}
_ZEROS |= {"f": "f32 {}, 0f00000000", "fd": "f64 {}, 0d0000000000000000"}


def relabelled(text: str, entry: str, seed: int) -> str:
    """The file's entry with one to three branches led to other labels; its registers start at zero."""
    rng = np.random.default_rng(seed)
    parts = re.split(r"(?=\.visible \.entry)", text)
    own = next(part for part in parts[1:] if re.search(rf"entry {entry}\b", part))
    head, tokens = own[: own.index("{")], _TOKEN.findall(own[own.index("{") :])
    labels = [i for i, t in enumerate(tokens) if _KINDS[4].match(t)]
    branches = [i for i in labels if tokens[i + 1] != ":"]
    for _ in range(int(rng.integers(1, 4))):
        at, other = branches[int(rng.integers(len(branches)))], labels[int(rng.integers(len(labels)))]
        tokens[at] = tokens[other]
    body = "".join(tokens)
    registers = sorted(set(re.findall(r"%(?:rd|rs|r|fd|f|p)\d+\b", body)))
    zeros = [f"mov.{_ZEROS[re.sub('[%0-9]', '', r)].format(r)};" for r in registers]
    declared = max(m.end() for m in re.finditer(r"\.(reg|shared) [^;]*;", body))
    return "\n".join((parts[0] + head + body[:declared], *zeros, body[declared:]))
