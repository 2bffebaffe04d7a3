"""What others than the paper published for public models, as data."""

from typing import NamedTuple

from outliers.report.paper.published import key_of
from outliers.report.tables import Table


class Elsewhere(NamedTuple):
    """A value that others published for a public model, under a protocol of their own."""

    model: str
    quantity: str
    value: str
    source: str


MASSIVE, REPLICATION, GUIDE, VENDOR, SMOOTHQUANT = (
    "refine_massive_activations, raw figures data",
    "third-party replication",
    "transformers' perplexity guide",
    "a vendor's benchmark table",
    "SmoothQuant",
)
LARGEST = "largest features of the mean residual stream"
ELSEWHERE = [
    Elsewhere(
        "gpt2",
        "residual stream, feature 447, position 0, layers 2–9 (from 0), 1,024 tokens without BOS, bfloat16",
        "2480 2656 2800 2896 2960 2992 3008 3024",
        MASSIVE,
    ),
    Elsewhere("gpt2", LARGEST, "138 378 447", REPLICATION),
    Elsewhere("gpt2-medium", LARGEST, "9 238 268 428 580 608", REPLICATION),
    Elsewhere("gpt2-large", LARGEST, "8 24 248 440 792 870", REPLICATION),
    Elsewhere("opt-125m", LARGEST, "130 353 422", REPLICATION),
    Elsewhere("opt-1.3b", LARGEST, "236 572 1177 1192 1359", REPLICATION),
    Elsewhere("opt-2.7b", LARGEST, "13 198 319 1102 1454 1625 1802", REPLICATION),
    Elsewhere("opt-6.7b", "feature 2394, layers 0–15, 2,048 tokens", "148 rising to 334", MASSIVE),
    Elsewhere("opt-66b", "outlier channels", "6353 (positive), 8725 (negative)", "Outlier Suppression+"),
    Elsewhere("llama-2-7b", "massive activations, layers 1–29", "1415 (−1502), 2533 (2547)", "massive-activations"),
    Elsewhere("gpt2", "perplexity on WikiText-2, bfloat16; on C4", "30.22; 37.33", "refine_massive_activations"),
    Elsewhere("gpt2", "perplexity on WikiText-2 (raw, test), stride 1024", "29.94", GUIDE),
    Elsewhere("gpt2-large", "perplexity on WikiText-2 (raw, test), stride 1024; 512", "19.44; 16.44", GUIDE),
    Elsewhere("gpt2", "LAMBADA perplexity; accuracy", "40.06; 0.3256", "lm-eval"),
    Elsewhere("opt-125m", "perplexity on WikiText-2, float16; int8 per tensor", "27.65; 30.18", VENDOR),
    Elsewhere("opt-13b", "perplexity on WikiText-2, float16; int8 per tensor", "10.12; 4135.99", VENDOR),
    Elsewhere(
        "opt-13b", "LAMBADA accuracy (1,000 examples), float16; int8; SmoothQuant", "0.786; 0.048; 0.793", SMOOTHQUANT
    ),
    Elsewhere(
        "opt-175b",
        "perplexity on WikiText-2, float16; int8; LLM.int8(); SmoothQuant-O1",
        "10.99; 93080; 11.10; 11.11",
        f"{SMOOTHQUANT}, Table 3",
    ),
    *(
        Elsewhere(model, "attention sink at position 0, ε 0.3, 64 tokens, %", value, "Attention-Sink paper")
        for model, value in (("gpt2-xl", "77.0"), ("mistral-7b", "97.5"), ("llama-2-7b", "92.5"))
    ),
]


def elsewhere(models: list[str]) -> Table | None:
    """What others published for these models; None where nothing is known."""
    names = {key_of(model) for model in models}
    known = [list(value) for value in ELSEWHERE if value.model in names]
    caption = "Published elsewhere, each under the protocol that it names."
    headers = ["model", "quantity", "published", "source"]
    return Table.of_words("elsewhere", caption, headers, known) if known else None
