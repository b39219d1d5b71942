"""Sends loads of many kinds to a server, and checks each answer and the state of the server."""
