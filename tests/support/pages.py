"""Read the code blocks and headings of a page."""

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
_HEADING = re.compile(r"#+ (.*)")


@dataclass(frozen=True)
class Block:
    """Describe a fenced block: under which heading (counted from 0), in which language, and the last text before it."""

    heading: int
    language: str
    before: str
    text: str


@dataclass(frozen=True)
class Page:
    headings: list[str]
    blocks: list[Block]

    def code(self, heading: str, language: str = "python", before: str = "") -> str:
        """Find the one block in a language under a heading, or the one after a line that has ``before`` in it."""
        number = self.headings.index(heading)
        found = [b.text for b in self.blocks if (b.heading, b.language) == (number, language) and before in b.before]
        assert len(found) == 1, (heading, language, before, len(found))
        return found[0]


def read(path: Path) -> Page:
    headings: list[str] = []
    blocks: list[Block] = []
    before, fence, lines = "", None, []
    for line in path.read_text().splitlines():
        if line.startswith("```"):
            if fence is None:
                fence, lines = line[3:], []
            else:
                blocks.append(Block(len(headings) - 1, fence, before, "\n".join(lines) + "\n"))
                fence = None
        elif fence is not None:
            lines.append(line)
        elif heading := _HEADING.fullmatch(line):
            headings.append(heading[1])
        elif line:
            before = line
    assert fence is None
    return Page(headings, blocks)
