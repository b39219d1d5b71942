"""What a server answers, and how answers are judged: against a golden file, and each other."""
