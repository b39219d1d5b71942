"""The machine: its identity, its state, its memory and the rates that they allow."""
