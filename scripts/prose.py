"""Count the words of the sentences of README and docs, and name what is too long.

    python scripts/prose.py

Code, tables, captions of figures, headings and generated parts do not count. A link counts as the words that a reader
sees, and a piece of inline code as one. The exit status is 1 where a rule of `problems` is broken.
"""

import re
import sys
from pathlib import Path
from statistics import mean

from pages import MADE, without_tables

ROOT = Path(__file__).parent.parent
LONGEST, MEAN = 35, 18  # words of a sentence
LINES = {"README.md": 130}
LINES_OF_A_PAGE = 250
CLAUSES = re.compile(r"^#+ (?:What|Which|Where|How far)\b.*", re.MULTILINE)  # headings that are no nouns
NOT_PROSE = re.compile(r"^```.*?^```$|^#+ .*?$|^[ ]*\|.*?$|!\[.*?\]\([^)]*\)", re.MULTILINE | re.DOTALL)
RUN_IN = re.compile(r"^\*\*(?:\S+ ){0,3}\S+\.\*\*")  # a heading in front of a paragraph
ITEM = re.compile(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", re.MULTILINE)
END = re.compile(r"""(?<!\bal\.)(?<!\be\.g\.)(?<!\bi\.e\.)(?<=[.!?])[*"')]*\s+(?=[^a-z])""")


def pages() -> list[Path]:
    """Return README, and every page of docs that a person writes."""
    return [ROOT / "README.md", *sorted({*(ROOT / "docs").glob("*.md")} - {MADE})]


def sentences(text: str) -> list[str]:
    """Return the sentences of a page of Markdown, each on one line."""
    prose = re.sub(r"`[^`]+`", lambda code: re.sub(r"[\s.?!]", "_", code[0]), NOT_PROSE.sub("\n\n", text))
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)  # of a link its text
    items = (RUN_IN.sub("", " ".join(item.split())) for item in ITEM.split(prose))
    return [sentence for item in items for sentence in END.split(item.strip()) if words(sentence)]


def words(sentence: str) -> int:
    """Return the number of words of a sentence; signs alone are no words."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def problems(name: str, text: str) -> list[str]:
    """Return the rules that a page breaks, a line each."""
    found = sentences(without_tables(name, text))
    average = mean(map(words, found)) if found else 0
    lines, most = len(text.splitlines()), LINES.get(name, LINES_OF_A_PAGE)
    return [
        *(f"{name}: {words(one)} words: {one}" for one in found if words(one) > LONGEST),
        *([f"{name}: {average:.1f} words a sentence"] if average >= MEAN else []),
        *(f"{name}: a heading that is no noun: {heading}" for heading in CLAUSES.findall(text)),
        *([f"{name}: {lines} lines of {most}"] if lines > most else []),
    ]


def main() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in pages()}
    for name, text in texts.items():
        counts = [*map(words, sentences(without_tables(name, text)))]
        print(f"{name:24} {len(counts):4} sentences, longest {max(counts):3}, mean {mean(counts):4.1f}")
    every = [words(one) for name, text in texts.items() for one in sentences(without_tables(name, text))]
    print(f"{'all':24} {len(every):4} sentences, longest {max(every):3}, mean {mean(every):4.1f}")
    broken = [problem for name, text in texts.items() for problem in problems(name, text)]
    print(*broken, sep="\n")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
