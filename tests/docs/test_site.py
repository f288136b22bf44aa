"""The site: it is made of the tree alone, every page is in its navigation, and a broken link ends it."""

from __future__ import annotations

import html
import re
import shlex
import socket
from pathlib import Path

import pytest
from sphinx.cmd.build import build_main

import kernels_ext_npu
import softnpu

pytestmark = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # for Sphinx 11
ROOT = Path(__file__).resolve().parents[2]
(COMMAND,) = re.findall(r"sphinx-build (.+) \. site/html$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def build(source: Path, folder: Path, *more: str) -> int:
    """Build as `make site` does, from another place into another one, and return the exit code."""
    places = {"docs": str(ROOT / "docs"), "site/doctrees": str(folder / "doctrees")}
    options = [places.get(word, word) for word in shlex.split(COMMAND)]
    return build_main([*options, *more, str(source), str(folder / "html")])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def refuse(*arguments: object) -> None:
        raise AssertionError(f"the network was asked for {arguments}")

    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", refuse)
        patch.setattr(socket.socket, "connect", refuse)
        assert build(ROOT, folder) == 0
    return folder / "html"


def pages(site: Path) -> dict[str, str]:
    return {str(path.relative_to(site)): path.read_text() for path in site.rglob("*.html")}


def test_each_page_is_in_one_navigation_with_both_languages(site: Path) -> None:
    made = pages(site)
    (sidebar,) = re.findall(r'<div class="sidebar-tree">(.*?)</div>', made["docs/index.html"], re.DOTALL)
    assert re.findall(r'caption-text">([^<]+)', sidebar)[-2:] == ["中文", "For contributors"]
    linked = {(site / "docs" / link).resolve() for link in re.findall(r'href="([^"#]+)"', sidebar)}
    written = [path for pattern in ("*.md", "docs/*.md", "examples/*.[mi]*") for path in ROOT.glob(pattern)]
    written += [path.with_name("README.md") for path in ROOT.glob("*/build.toml")]
    assert {site / path.relative_to(ROOT).with_suffix(".html") for path in written} <= linked
    assert linked <= {site / name for name in made}
    assert 'url=README.html"' in made["index.html"]


def test_pages_take_nothing_of_others_and_lead_to_pages(site: Path) -> None:
    for name, page in pages(site).items():
        assert not re.findall(r'<(?:link|script|img|iframe)[^>]+(?:href|src)="(?:https?:)?//', page), name
        assert not re.findall(r'href="(?!https?:)[^"]+\.md[#"]', page), name


def test_the_reference_has_every_public_name_with_errors_and_fields(site: Path) -> None:
    page = pages(site)["docs/reference.html"]
    for package in (kernels_ext_npu, softnpu):
        assert set(re.findall(rf'id="{package.__name__}\.(\w+)"', page)) == set(package.__all__)
    text = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", page)))
    assert "UnsupportedEnvironmentError – kernels cannot work on this machine; the message says what to do." in text
    assert "reason (str | None) – why not, or why not as fast as it could be" in text


def test_the_notebook_is_a_page_with_its_report(site: Path) -> None:
    assert "<td>→ SwiGLUMLP</td>" in pages(site)["examples/quick_start.html"]


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("[x](missing.md)", "missing.md"),
        ("[x](docs/other.md#missing)", "missing"),
        ("[x](#missing)", "missing"),
        ("[x](missing.py)", "missing.py"),
        ("![x](missing.png)", "missing.png"),
    ],
)
def test_a_link_that_leads_nowhere_ends_the_build(link: str, message: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.rst").write_text("Contents\n========\n\n.. toctree::\n\n   ../README\n   other\n")
    (tmp_path / "docs/other.md").write_text("# Other\n")
    (tmp_path / "README.md").write_text("# Title\n\n[good](docs/other.md#other)\n")
    assert build(tmp_path, tmp_path, "-b", "dummy") == 0
    (tmp_path / "README.md").write_text(f"# Title\n\n{link}\n")
    assert build(tmp_path, tmp_path, "-b", "dummy") == 1
    assert re.search(rf"README.md:3: WARNING.*{message}", capsys.readouterr().err)
