"""A PTX compiler for CPUs: PTX text -> syntax tree -> LLVM IR -> native code. Useful alone: `load(path)`."""
