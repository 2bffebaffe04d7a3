"""`python -m outliers`: lists the commands, and the models that are there."""

import outliers
from outliers.models.names import PACKAGED, packaged_file, pocket_models
from outliers.terminal.printing import printing

COMMANDS = {
    "get": "a trained language model, out of a package of the package index",
    "trace": "which features are outliers, where, and how large",
    "ablate": "what a model loses without its outlier features",
    "emergence": "outlier features along a family of models or along training, Figures 3 and 4",
    "sweep": "what every 8-bit scheme costs, as in Table 1 of the paper",
    "zeroshot": "zero-shot accuracy under 8-bit schemes, as in Figure 1",
    "memory": "bytes that models need, and the largest that some GPUs hold, as in Table 3",
    "latency": "milliseconds a generated token, 16-bit against int8, as in Table 6",
    "report": "every table and figure of the paper, measured beside published",
}


def overview() -> None:
    """Print the commands and the models."""
    print(f"outliers {outliers.__version__}: {outliers.__doc__}\n\nCommands, each with --help:\n")
    for name, description in COMMANDS.items():
        print(f"  python -m outliers.{name:<10} {description}")
    print("\nModels by name; others are a hub id, a local folder, or a GGUF file:\n")
    for name in pocket_models():
        print(f"  {name:<20} trained for this project, embedded")
    for name, packaged in PACKAGED.items():
        place = packaged_file(name) or f"`python -m outliers.get {name}` gets it"
        print(f"  {name:<20} {packaged.size / 1e6:.0f} MB, {packaged.licence}: {place}")


if __name__ == "__main__":
    with printing():
        overview()
