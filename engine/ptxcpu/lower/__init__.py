"""PTX to textual LLVM IR. `function` drives; the other files hold one family of instructions each."""
