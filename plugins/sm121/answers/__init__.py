"""Judgement of a server's answers: against a golden file, and each other."""
