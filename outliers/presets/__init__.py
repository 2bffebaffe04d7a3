"""The cells of a specification, a file a command."""
