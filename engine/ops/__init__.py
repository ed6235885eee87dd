"""One file per operation: shapes checked, kernel and grid chosen, launch recorded."""
