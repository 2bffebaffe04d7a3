"""What an experiment asks: the kinds of specifications, their files, and what is looked at before it runs."""
