"""What rows say in sentences: one file a kind of measurement. A sentence is there only if it is beyond its scatter."""
