"""The simulated GB10 (`machine`), and the expected verdicts on healthy and faulty ones."""
