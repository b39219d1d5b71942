"""The one package that speaks HTTP to servers."""
