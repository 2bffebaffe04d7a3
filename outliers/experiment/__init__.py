"""An experiment file to cells to rows."""
