"""Figure 1 of the paper: zero-shot accuracy by task, and its mean over the tasks by model size."""

from outliers.paper.published import BLOG, Artefact, Key, Published, grid, key_of
from outliers.presets.zeroshot import ZeroShot
from outliers.views.zeroshot import PREFIX

PUBLISHED = Published(
    f"{BLOG} (the paper's figure prints no numbers)",
    ("model", "task", "metric", "scheme"),
    grid(
        {
            ("opt-175b", "hellaswag", "acc_norm"): (0.7849, 0.7849),
            ("opt-175b", "hellaswag", "acc"): (0.5921, 0.5931),
            ("opt-175b", "piqa", "acc"): (0.7965, 0.7959),
            ("opt-175b", "piqa", "acc_norm"): (0.8101, 0.8107),
            ("opt-175b", "lambada_openai", "perplexity"): (3.0142, 3.0152),
            ("opt-175b", "lambada_openai", "acc"): (0.7464, 0.7466),
            ("opt-175b", "winogrande", "acc"): (0.7174, 0.7245),
            ("bloom", "hellaswag", "acc_norm"): (0.7274, 0.7303),
            ("bloom", "hellaswag", "acc"): (0.5563, 0.5584),
            ("bloom", "piqa", "acc"): (0.7835, 0.7884),
            ("bloom", "piqa", "acc_norm"): (0.7922, 0.7911),
            ("bloom", "lambada_openai", "perplexity"): (3.9191, 3.9310),
            ("bloom", "lambada_openai", "acc"): (0.6808, 0.6718),
            ("bloom", "winogrande", "acc"): (0.7048, 0.7048),
        },
        ["llm.int8", "fp32"],
    ),
)


def measured(rows: list[dict]) -> dict[Key, float]:
    """Accuracies and perplexities by the keys of the published ones."""
    return {
        (key_of(row["model"]), row["task"], row["metric"].removeprefix(PREFIX), row["scheme"]): row["value"]
        for row in rows
    }


ARTEFACTS = {"figure1": Artefact("Figure 1", ZeroShot, PUBLISHED, measured)}
