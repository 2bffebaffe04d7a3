"""The views, one file per topic: they turn rows into frames, figures, tables, findings and explorers."""
