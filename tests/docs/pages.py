"""The Markdown pages of the repository: their links, anchors and code blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from conftest import ROOT

DIRECTIVE = re.compile(r"<!-- test: (add|skip)\b,? ?(.*?) -->")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block of a page, and the directive for tests in the HTML comment above it."""

    language: str
    text: str
    skip: str = ""  # the reason not to run it
    add: str = ""  # arguments appended to its last command

    @property
    def file(self) -> str:
        """The file that the first line names, as `# file: path`; empty if none."""
        match = re.match(r"# file: (\S+)\n", self.text)
        return match[1] if match else ""

    @property
    def commands(self) -> str:
        """The shell text to run."""
        return f"{self.text.rstrip()} {self.add}\n" if self.add else self.text


def list_pages() -> list[Path]:
    """Every Markdown page that is part of the project."""
    folders = ("docs", "benchmarks", ".github")
    found = [*ROOT.glob("*.md"), *(p for f in folders for p in (ROOT / f).rglob("*.md"))]
    return sorted(found)


def code_blocks(page: Path) -> list[CodeBlock]:
    """The fenced blocks of a page, in order."""
    text, blocks = page.read_text("utf-8"), []
    for fence in FENCE.finditer(text):
        line_above = text[: fence.start()].rstrip("\n").rpartition("\n")[2]
        directive = DIRECTIVE.fullmatch(line_above)
        kind, value = directive.groups() if directive else ("", "")
        block = CodeBlock(
            fence[1],
            fence[2],
            skip=value if kind == "skip" else "",
            add=value if kind == "add" else "",
        )
        blocks.append(block)
    return blocks


def prose(page: Path) -> str:
    """A page without its code blocks and HTML comments."""
    text = FENCE.sub("", page.read_text("utf-8"))
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ +(.*)$", prose(page), re.M)
    return {_anchor(heading) for heading in headings}


def _anchor(heading: str) -> str:
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


def links(page: Path) -> list[str]:
    """Targets of the links and pictures of a page."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))
