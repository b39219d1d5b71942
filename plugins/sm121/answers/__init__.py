"""Compare a server's answers with golden files, the oracle, an exam, and each other."""
