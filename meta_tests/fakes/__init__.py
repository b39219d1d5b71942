"""Stand-ins for engines, nodes and clocks."""
