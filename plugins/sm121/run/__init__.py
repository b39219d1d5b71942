"""What a run writes down: its verdict file, its folder, one verdict of several parts."""
