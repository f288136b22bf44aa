"""The reference of the public names: it is made from the tree alone, and says what docstrings say."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path

import kernels_ext_npu
import softnpu

ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import runpy, socket, sys
def refuse(*arguments, **options):
    raise AssertionError(f"the network was asked for {arguments}")
socket.socket.connect = socket.getaddrinfo = refuse
sys.argv[1:] = [sys.argv[2]]
runpy.run_path("scripts/reference.py", run_name="__main__")
"""


def test_it_needs_no_network_and_has_every_public_name_with_errors_and_fields(
    run_python: Callable, tmp_path: Path
) -> None:
    run_python(BUILD, "", str(tmp_path), directory=ROOT)
    assert {path.name for path in tmp_path.glob("*.html")} == {"index.html", "kernels_ext_npu.html", "softnpu.html"}
    for package in (kernels_ext_npu, softnpu):
        page = (tmp_path / f"{package.__name__}.html").read_text()
        documented = set(re.findall(r'<section id="(\w+)">', page))
        assert documented == set(package.__all__)
        assert not re.findall(r'<(?:link|script|img|iframe)[^>]+(?:href|src)="https?:', page)  # nothing of others
    text = html.unescape(re.sub(r"<[^>]+>", "", (tmp_path / "kernels_ext_npu.html").read_text()))
    assert re.search(r"Raises:\s+UnsupportedEnvironmentError:\s+kernels cannot work on this machine", text)
    assert re.search(r"reason:\s+why not, or why not as fast as it could be", text)
