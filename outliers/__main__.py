"""`python -m outliers`: lists the commands."""

import outliers

COMMANDS = {
    "sweep": "what every 8-bit scheme costs, as in Table 1 of the paper",
}

if __name__ == "__main__":
    print(f"outliers {outliers.__version__}: {outliers.__doc__}\n\nCommands, each with --help:\n")
    for name, description in COMMANDS.items():
        print(f"  python -m outliers.{name:<8} {description}")
