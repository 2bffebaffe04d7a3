"""What timings of linear layers say."""

from collections.abc import Sequence

from outliers.report.section import Finding


def speed_findings(rows: Sequence[dict]) -> list[Finding]:
    """Which way is fastest, and which ways are faster or slower than 16 bits wherever they were timed.

    rows: `linear_layer.times_16_bits`. A way is faster, or slower, where its quartiles leave out 1.
    """
    ways = dict.fromkeys(row["way"] for row in rows)
    of_ways = {way: [row for row in rows if row["way"] == way] for way in ways}
    faster = {way: [row for row in own if row["q1"] > 1] for way, own in of_ways.items()}
    slower = [way for way, own in of_ways.items() if all(row["q3"] < 1 for row in own)]
    best = sorted((row for own in faster.values() for row in own), key=lambda row: -row["value"])[:1]
    sentences = [
        f"{row['way']} is {row['value']:.2f} times as fast as 16 bits at d = {row['dimension']}." for row in best
    ]
    always = {"Faster": [way for way, own in faster.items() if len(own) == len(of_ways[way])], "Slower": slower}
    sentences += [
        f"{how} than 16 bits at every d that was timed: {'; '.join(some)}." for how, some in always.items() if some
    ]
    return [Finding(sentence, "table5") for sentence in sentences]
