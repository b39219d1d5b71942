"""What ran, and the evidence for it: kernel path, failure causes, reproducibility record."""
