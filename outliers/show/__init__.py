"""Values, tables, sections, words, figures and the page: the showing of anything; nothing here knows a metric."""
