"""Explorers of a page: maps of layer by feature or projection, profiles, the text in colours, and the writers of a
feature.

An explorer is data (`Explorer` of `section.py`) that explorer.js draws with Plotly, all within the page. Its content:

    row, value, unit: words for what is down a map, and for what is in its cells. first: the number of the first row.
    scales: of "log", "linear", "clipped", those to choose from.
    threshold, colors: where the colours have a step, or null; colours below it and from it on.
    choice: what the maps differ in. maps, a list:
        name, said, group: maps of one group are drawn in one profile. column: what is across.
        values: array (rows, columns). share: how many features a column has, of which it shows the largest.
        columns: their names, or null where they are numbers. marked: features to choose with a click.
        positions: {features: numbers, or null for all; values: array (T, features)}, or null.
        text: {features, values: array (rows, T, features)}, or null.
    tokens: the text, token by token, or null.

That of origins has features in the place of maps; `at_places` are values after the first position and at the first:

    places: what these are called. bars: of each part its color, its pattern and how far it stands beside its layer.
    features, a list; left: how many more there are:
        feature: its number. readers: the places that read it. states: before each layer and after all, at_places.
        parts: layer, -1 before all, and part; values: what it writes, at_places; writers: of each its name, values and
            magnitude, and as `most` the tokens on which it writes most, [token, position, term].
        gates: layer, part, norm, gain, median, rank; before and behind it the feature, at_places.
"""
