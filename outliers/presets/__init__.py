"""Which cells a specification asks for, a file a command."""
