"""Judging a server's answers: against golden files, the oracle, an exam, and each other."""
