"""The machine: its identity, its state, its memory, and the rates that it can reach."""
