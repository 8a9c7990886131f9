"""What somebody who knows FSDP2 asks, and whether the docs answer it in two clicks: one from the README or the index to
a page, one to the section with the answer. Every link of the README and the docs leads to a page and a heading."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
STARTS = (ROOT / "README.md", ROOT / "docs" / "index.md")
QUESTIONS = {
    "What does my training loop look like?": "sw.shard(",
    "What is sharded, and how is that changed for some parameters?": "| `param` |",
    "How do I choose what is gathered together?": "{class: Block}",
    "How do I train in bf16 or fp16?": "precision: ",
    "How do I clip gradients, and read their norm?": "engine.gradient_norm",
    "How do I accumulate gradients?": "engine.no_sync()",
    "How do I read or change a parameter?": "engine.set(",
    "How do I save?": "engine.save(",
    "How do I resume on another number of GPUs, or with another plan?": "can read what any other wrote",
    "How do I read checkpoints of FSDP2?": "FSDP2",
    "How do I load weights of Hugging Face, and export them?": "from_pretrained",
    "How do I hand weights to a sampler or server while I train?": "engine.publish(",
    "How do I build a model that no rank can hold?": "deferred_init",
    "How do I see memory, and predict it?": "engine.rehearse(",
    "What if it does not fit?": "`zero1`",
    "How do I recompute activations?": "activations: recompute",
    "What if the logits do not fit?": "loss: chunked",
    "How do I log a metric?": "engine.log(",
    "How do I freeze parameters, and unfreeze them later?": "requires_grad_(",
    "Which optimizers work, and can I bring my own?": "optimizer",
    "How do I feed data to the ranks?": "engine.data_ranks",
    "How do I use it with Accelerate?": "Accelerator",
    "How do I use it with Transformers' Trainer?": "Trainer",
    "How do I launch on Slurm?": "--where slurm",
    "How do I compile?": "compile: inductor",
    "How do I use tensor parallelism with it?": "tensor:",
    "How do I evaluate and generate?": "engine.inference()",
    "Where does the time go?": "profile",
    "Why does my job hang?": "`deadlock`",
    "What happens when a rank is lost?": "the others continue",
    "How do I get the plain model back?": "engine.unshard()",
}
"""By question, words of its answer."""
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<!\[)`[^`\n]*`(?!\])")
"""Code in a line, which may look like a link, but not as the text of one."""
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")


@cache
def sections(page: Path) -> dict[str, str]:
    """The text below each heading, up to the next of its level, by the heading's anchor; the whole page by ''."""
    text = page.read_text()
    found = {"": text}
    without_code = FENCE.sub(lambda block: re.sub(r"[^\n]", "x", block[0]), text)
    heads = [(one.start(), len(one[1]), one[2]) for one in re.finditer(r"^(#+) (.+)$", without_code, re.MULTILINE)]
    for number, (start, level, title) in enumerate(heads):
        stop = next((later for later, deep, _ in heads[number + 1 :] if deep <= level), len(text))
        found[anchor(title)] = text[start:stop]
    return found


def anchor(title: str) -> str:
    """As GitHub and mkdocs make it of a heading."""
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


@cache
def links(page: Path, text: str | None = None) -> list[tuple[Path, str]]:
    """Where links within the repository lead: file and anchor."""
    prose = FENCE.sub("", page.read_text() if text is None else text)
    found = LINK.findall(CODE.sub("", prose))
    return [
        ((page.parent / name).resolve() if name else page, to) for name, to in found if "://" not in name and name + to
    ]


def answers() -> dict[str, list[tuple[Path, str]]]:
    """Where the page of questions sends each."""
    page = ROOT / "docs" / "questions.md"
    rows = re.findall(r"^\| (.+\?) \| (.+) \|$", page.read_text(), re.MULTILINE)
    return {question: links(page, answer) for question, answer in rows}


def test_the_page_asks_these_questions() -> None:
    assert list(answers()) == list(QUESTIONS)
    assert len(QUESTIONS) >= 20


@pytest.mark.parametrize("question", QUESTIONS)
def test_it_is_answered_in_two_clicks(question: str) -> None:
    to = answers()[question]
    said = "".join(sections(page)[where] for page, where in to)
    assert QUESTIONS[question] in said, f"{to} do not answer it"
    for start in STARTS:
        first = {page for page, _ in links(start)}
        assert ROOT / "docs" / "questions.md" in first or to[0][0] in first, f"{start.name} is too far away"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for to, where in links(page):
        assert to.exists(), f"{page.name} links to {to}"
        if to.suffix == ".md":
            assert where in sections(to), f"{page.name} links to {to.name}#{where}"


def test_what_would_be_found() -> None:
    assert anchor("Checking a machine: `shardwise doctor`") == "checking-a-machine-shardwise-doctor"
    assert "rules-other-rows-for-some-parameters" in sections(ROOT / "docs" / "plans.md")
    assert "no-such-heading" not in sections(ROOT / "docs" / "plans.md")
