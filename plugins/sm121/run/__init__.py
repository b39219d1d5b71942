"""The verdict file of a run, its report directory, and the merge of several parts."""
