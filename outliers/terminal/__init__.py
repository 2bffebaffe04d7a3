"""What a person meets at a terminal: options, printing that ends no run, how far a run is."""
