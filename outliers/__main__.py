"""`python -m outliers`: lists the commands."""

import outliers

COMMANDS = {
    "trace": "which features are outliers, where, and how large",
    "ablate": "what a model loses without its outlier features",
    "emergence": "outlier features along a family of models or along training, Figures 3 and 4",
    "sweep": "what every 8-bit scheme costs, as in Table 1 of the paper",
}

if __name__ == "__main__":
    print(f"outliers {outliers.__version__}: {outliers.__doc__}\n\nCommands, each with --help:\n")
    for name, description in COMMANDS.items():
        print(f"  python -m outliers.{name:<10} {description}")
