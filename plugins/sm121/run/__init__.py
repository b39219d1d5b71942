"""What a run keeps: its verdict file, its report directory, and the merge of several parts."""
