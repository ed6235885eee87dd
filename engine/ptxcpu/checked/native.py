"""The checks as native code: made and compiled once, kept in the object cache, the same for every kernel."""

from __future__ import annotations

from functools import cache

from ptxtrain.engine.ptxcpu import jit
from ptxtrain.engine.ptxcpu.checked import access, copies, entries, sync, view
from ptxtrain.engine.ptxcpu.checked.code import Library
from ptxtrain.engine.ptxcpu.checked.state import FUNCTIONS, IN_GLOBAL, IN_SHARED


def library() -> Library:
    """All checks as IR."""
    made = Library()
    view.define_report(made)
    view.define_resolve(made)
    for name, records in (("shared", IN_SHARED), ("global", IN_GLOBAL)):
        access.define_quick(made, f"quick_{name}", records)
        access.define_exact(made, f"exact_{name}", records)
    access.define_single(made)
    access.define_span(made)
    entries.define_uniform(made)
    entries.define_run(made)
    entries.define_lanes(made)
    sync.define_starts(made)
    sync.define_meetings(made)
    sync.define_fail(made)
    sync.define_barrier(made)
    sync.define_warp(made)
    copies.define_copies(made)
    assert sorted(made.names) == sorted(FUNCTIONS), set(made.names) ^ set(FUNCTIONS)
    return made


@cache
def functions() -> tuple[jit.Native, tuple[int, ...]]:
    """The code, to be kept alive, and the addresses in the order of `FUNCTIONS`."""
    native = jit.load(library().ir(), FUNCTIONS, vectorise=True)
    return native, tuple(native.addresses[name] for name in FUNCTIONS)
