"""The site: it is made of the tree alone, every page is in its navigation, and a broken link ends it."""

import html
import multiprocessing
import re
import shlex
import socket
import sys
from pathlib import Path

import pytest
from sphinx.cmd.build import build_main

import kernels_ext_npu
import softnpu

ROOT = Path(__file__).resolve().parents[2]
(COMMAND,) = re.findall(r"sphinx-build (.+) \. site/html$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def build(source: Path, folder: Path) -> int:
    """Build as `make site` does, from another place into another one, and return the exit code.

    In a process of its own: extensions of Sphinx change the one that they run in, such as where metadata is found.
    """
    places = {"docs": str(ROOT / "docs"), "site/doctrees": str(folder / "doctrees")}
    options = [places.get(word, word) for word in shlex.split(COMMAND)]
    arguments = [*options, str(source), str(folder / "html")]
    process = multiprocessing.get_context("fork").Process(target=build_without_network, args=[arguments])
    process.start()
    process.join(300)
    return process.exitcode


def build_without_network(arguments: list[str]) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError(f"the network was asked for {arguments}")

    socket.getaddrinfo = socket.socket.connect = refuse
    sys.exit(build_main(arguments))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
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


def test_links_that_lead_nowhere_end_the_build(tmp_path: Path, capfd) -> None:
    links = ["missing.md", "missing.py", "missing.png", "docs/other.md#missing", "#nothing"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.rst").write_text("Contents\n========\n\n.. toctree::\n\n   ../README\n   other\n")
    (tmp_path / "docs/other.md").write_text("# Other\n")
    lines = ["# Title", "[good](docs/other.md#other)", "![bad](missing.png)", *(f"[bad]({link})" for link in links)]
    (tmp_path / "README.md").write_text("\n\n".join(lines))
    assert build(tmp_path, tmp_path) == 1
    warnings = re.findall(r"README.md:(\d+): WARNING: ", capfd.readouterr().err)
    assert sorted({int(line) for line in warnings}) == list(range(5, 2 * len(lines), 2))
