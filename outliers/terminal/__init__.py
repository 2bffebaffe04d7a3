"""The terminal: options, output that cannot break a run, and progress."""
