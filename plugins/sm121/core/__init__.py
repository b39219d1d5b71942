"""The bottom layer: verdicts, errors, profiles, servers, data files, redaction."""
