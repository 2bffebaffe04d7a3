"""The prose of README and docs: short sentences, nouns as headings, pages that a reader finishes."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import prose


@pytest.mark.parametrize("page", prose.pages(), ids=lambda page: page.name)
def test_a_page_reads_well(page):
    assert not prose.problems(page.relative_to(prose.ROOT).as_posix(), page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "One sentence. Two of them! `code. With` dots\nin it?\n",
            ["One sentence.", "Two of them!", "`code__With` dots in it?"],
        ),
        ("Yu et al. (2024) and e.g. this, i.e. one.", ["Yu et al. (2024) and e.g. this, i.e. one."]),
        (
            "- an item\n- the [next one](page.md#a) at 1.5\n\nA paragraph",
            ["an item", "the next one at 1.5", "A paragraph"],
        ),
        ("**A run-in heading.** A sentence.", ["A sentence."]),
        ("# Heading\n```sh\nno prose\n```\n| no | table |\n![no caption](x.png)\n", []),
    ],
)
def test_sentences(text, found):
    assert prose.sentences(text) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (" ".join(["word"] * 36), "36 words"),
        (" ".join(["word"] * 18) + ".", "18.0 words a sentence"),
        ("## What is measured\n", "a heading that is no noun: ## What is measured"),
        ("\n" * 251, "251 lines of 250"),
    ],
)
def test_a_rule_that_is_broken(text, said):
    assert any(said in problem for problem in prose.problems("docs/page.md", text))


def test_the_front_page_is_shorter():
    assert prose.problems("docs/page.md", "\n" * 131) == []
    assert prose.problems("README.md", "\n" * 131) == ["README.md: 131 lines of 130"]
