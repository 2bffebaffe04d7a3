"""The terminal: options, printing that ends no run, how far a run is."""
