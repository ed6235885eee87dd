"""The command line: one file per command, thin (parse, call the engine, draw)."""
