"""The functions by which the code around a checked kernel calls the native checks: at launches, blocks, barriers, exits."""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.checked import state
from ptxtrain.engine.ptxcpu.lower.runner import FIELDS


def shims() -> str:
    """`@checked.start`, `.block` and `.warp` (which give the order), `.arrive`, `.release` and `.leave`."""
    watch = {name: state.at(state.Watch, name) for name, *_ in state.Watch._fields_}
    return f"""
define internal void @checked.start(ptr %cta, ptr %task, i64 %first) {{
  %watch.p = getelementptr i8, ptr %task, i64 48
  %watch = load ptr, ptr %watch.p
  %checker = load ptr, ptr %watch
  %at = getelementptr i8, ptr %cta, i64 {FIELDS["checker"]}
  store ptr %checker, ptr %at
  %own = getelementptr i8, ptr %checker, i64 {state.at(state.Checker, "watch")}
  store ptr %watch, ptr %own
  %new = icmp eq i64 %first, 0
  br i1 %new, label %launch, label %done
launch:
{_function("launch_start", "%checker")}
  %r = call i32 %launch_start(ptr %cta)
  br label %done
done:
  ret void
}}
define internal i64 @checked.block(ptr %cta, i64 %b) {{
{_watch()}
{_load("blocks", "i64", watch["blocks"])}
{_load("factor", "i64", watch["block_factor"])}
{_load("offset", "i64", watch["block_offset"])}
  %scaled = mul i64 %b, %factor
  %moved = add i64 %scaled, %offset
  %block = urem i64 %moved, %blocks
{_function("block_start", "%checker")}
  %r = call i32 %block_start(ptr %cta, i64 %block)
  ret i64 %block
}}
define internal i32 @checked.warp(ptr %cta, i32 %w) {{
{_watch()}
{_load("warps", "i32", watch["warps"])}
{_load("factor", "i32", watch["warp_factor"])}
{_load("offset", "i32", watch["warp_offset"])}
{_load("stir", "i32", watch["warp_stir"])}
  %block.p = getelementptr i8, ptr %checker, i64 {state.at(state.Checker, "block")}
  %block = load i64, ptr %block.p
  %block32 = trunc i64 %block to i32
  %scaled = mul i32 %w, %factor
  %stirred = mul i32 %block32, %stir
  %stirred.m = urem i32 %stirred, %warps
  %moved = add i32 %scaled, %offset
  %all = add i32 %moved, %stirred.m
  %warp = urem i32 %all, %warps
  ret i32 %warp
}}
{_shim("arrive", "i32 %number, i32 %warp")}
{_shim("release", "i32 %number")}
{_shim("leave", "i32 %warp")}"""


def _watch() -> str:
    return f"""  %checker.p = getelementptr i8, ptr %cta, i64 {FIELDS["checker"]}
  %checker = load ptr, ptr %checker.p
  %watch.p = getelementptr i8, ptr %checker, i64 {state.at(state.Checker, "watch")}
  %watch = load ptr, ptr %watch.p"""


def _load(name: str, type_: str, offset: int) -> str:
    return f"  %{name}.p = getelementptr i8, ptr %watch, i64 {offset}\n  %{name} = load {type_}, ptr %{name}.p"


def _function(name: str, checker: str) -> str:
    index = state.FUNCTIONS.index(name)
    return f"  %{name}.p = getelementptr i8, ptr {checker}, i64 {8 * index}\n  %{name} = load ptr, ptr %{name}.p"


def _shim(name: str, parameters: str) -> str:
    """`@checked.NAME`, for the code around the kernel."""
    return f"""define internal void @checked.{name}(ptr %cta, {parameters}) {{
  %checker.p = getelementptr i8, ptr %cta, i64 {FIELDS["checker"]}
  %checker = load ptr, ptr %checker.p
{_function(name, "%checker")}
  %r = call i32 %{name}(ptr %cta, {parameters})
  ret void
}}"""
