"""The documents: what is generated in them is what the code gives now.

The figures of twenty inspections take minutes, which `make test-slow` has. `make test` takes one of them anew.
"""

from functools import partial
from pathlib import Path

import pytest

from documents import DocumentError, generated, parallel, ratios, savings
from tests.support.counted import pinned_release_only
from tests.support.transformers_files import modeling_files

INSPECTED = ("ranks", "ratios", "savings")
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part, and one document, that take no time."""
    monkeypatch.setattr(generated, "PARTS", {"words": lambda language: f"\nnew {language}\n\n"})
    monkeypatch.setattr(generated, "FILES", {"docs/bytes.png": lambda: b"\x89new"})
    monkeypatch.setattr(generated, "is_due", lambda name: True)


def written(name: str, language: str) -> str:
    """A part, as it stands in the first document of the language that has it."""
    pages = sorted(path for pattern in generated._DOCUMENTS for path in ROOT.glob(pattern))
    pages = [path for path in pages if path.name.endswith(".zh.md") == (language == "zh")]
    return next(part[3] for page in pages for part in generated._PART.finditer(page.read_text()) if part[2] == name)


def assert_up_to_date() -> None:
    stale = [str(path.relative_to(ROOT)) for path in generated.stale(ROOT)]
    assert not stale, f"`make docs` changes {', '.join(stale)}: run it and commit them"


@pytest.mark.long
@pytest.mark.software  # the notebook counts
def test_the_documents_are_what_make_docs_writes() -> None:
    assert_up_to_date()


@pytest.mark.software  # the notebook counts
def test_all_but_the_figures_of_inspections_is_what_make_docs_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling_files()  # imported sooner than by the survey
    for name in INSPECTED:
        monkeypatch.setitem(generated.PARTS, name, partial(written, name))
    assert_up_to_date()


@pinned_release_only
def test_the_figures_of_a_model_are_those_of_its_inspection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(savings, "MODELS", savings.MODELS[:1])
    for language in ("en", "zh"):
        heading, line, *rows = savings.table(language).splitlines()
        assert len(rows) == 2
        assert {heading, line, *rows} <= set(written("savings", language).splitlines())
    monkeypatch.setattr(ratios, "ROWS", ratios.ROWS[:1])  # of the same model: it is inspected once
    assert set(ratios.table("en").splitlines()) <= set(written("ratios", "en").splitlines())


@pytest.mark.long
@pinned_release_only
def test_the_figures_of_a_rank_are_those_of_its_inspection() -> None:
    """Of one mesh, in its column of the table that has several."""
    model, meshes = next(iter(parallel.MESHES.items()))
    table = written("ranks", "en").partition("\n\n")[0]
    (headings, *rows), (mine, *mine_rows) = (cells(text) for text in (table, parallel._table(model, meshes[1:2])))
    column = headings.index(mine[1])
    found = [(row[0], row[column]) for row in rows]
    assert len(mine_rows) > 15
    assert [pair for pair in found if pair in map(tuple, mine_rows)] == list(map(tuple, mine_rows))


def cells(table: str) -> list[list[str]]:
    return [line.strip("|").split("|") for line in table.splitlines() if not line.startswith("| ---")]


def test_what_is_between_markers_is_written_and_nothing_else(parts, tmp_path: Path) -> None:
    text = "# Title\n<!-- words:start (by make) -->\nold\nolder\n<!-- words:end -->\nrest `<!-- words:start -->`\n"
    (tmp_path / "README.md").write_text(text)
    (tmp_path / "README.zh.md").write_text(text)
    (tmp_path / "CONTRIBUTING.md").write_text("without markers\n")
    stale = generated.stale(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in stale} == {"README.md", "README.zh.md", "docs/bytes.png"}
    for path, content in stale.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    written = "# Title\n<!-- words:start (by make) -->\n\nnew {}\n\n<!-- words:end -->\nrest `<!-- words:start -->`\n"
    assert (tmp_path / "README.md").read_text() == written.format("en")
    assert (tmp_path / "README.zh.md").read_text() == written.format("zh")
    assert (tmp_path / "docs/bytes.png").read_bytes() == b"\x89new"
    assert generated.stale(tmp_path) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- words:start -->\n", "needs a <!-- name:end -->"),
        ("<!-- words:end -->\n", "needs a <!-- name:end -->"),
        ("<!-- words:start -->\n<!-- other:end -->\n", "needs a <!-- name:end -->"),
        ("<!-- other:start -->\n<!-- other:end -->\n", "nothing generates <!-- other:start -->, only words"),
    ],
)
def test_markers_that_cannot_be_understood_are_named(parts, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(DocumentError, match=message) as error:
        generated.stale(tmp_path)
    assert "README.md" in str(error.value)
