"""Send HTTP requests to servers, and read the answers."""
