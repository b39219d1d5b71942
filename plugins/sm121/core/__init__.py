"""What everything stands on: verdicts, errors, the profile, servers, files, redaction."""
