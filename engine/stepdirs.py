"""The names in a run's `ckpt`: `step-…` for checkpoints, `.tmp-…` and `.gone-…` while one is written or removed, and
`.aside-step-…` for what resume set aside. Whatever has another name is not ours and is left alone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ptxtrain.engine.durable import Durable
from ptxtrain.engine.errors import PtxtrainError

_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.(tmp|gone)-\d{8,}-\d+")
_ASIDE = re.compile(r"\.aside-step-(\d{8,})-\d+")


def step_name(step: int) -> str:
    """The name of a step's directory: `step-00001514`."""
    return f"step-{step:08d}"


def list_steps(run: Path) -> list[int]:
    """Steps with a name in the run's `ckpt`, ascending; whether they are sound is not looked at. No `ckpt`: none.

    Raises PtxtrainError where `ckpt` cannot be read: a run must not begin anew because its disk did not answer.
    """
    try:
        names = os.listdir(run / "ckpt")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise PtxtrainError(
            f"cannot read {run / 'ckpt'}: {error.strerror}; nothing was changed, try again once it can be read"
        ) from error
    found = (int(matched[1]) for name in names if (matched := _STEP.fullmatch(name)))
    return sorted(step for step in found if step_name(step) in names)


def is_leftover(name: str) -> bool:
    """Whether an interrupted save or removal left this."""
    return _LEFTOVER.fullmatch(name) is not None


def aside_step(name: str) -> int | None:
    """The step that was set aside under this name; None for any other name."""
    matched = _ASIDE.fullmatch(name)
    return int(matched[1]) if matched else None


def set_aside(io: Durable, directory: Path) -> Path:
    """Renames a step's directory to the first `.aside-…` name that is free, and returns that. Raises OSError."""
    number = 1
    while os.path.lexists(aside := directory.with_name(f".aside-{directory.name}-{number}")):
        number += 1
    io.rename(directory, aside)
    return aside
