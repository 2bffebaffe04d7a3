"""Generic presentation: values, tables, sections, wording, figures and the HTML page, independent of any metric."""
