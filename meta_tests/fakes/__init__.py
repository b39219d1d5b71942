"""What stands in for engines, nodes and clocks."""
