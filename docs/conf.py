"""Sphinx's settings for ``make site``: all pages of the tree as they are, in both languages, and the reference.

``index.rst`` is the navigation. Nothing comes from a network, neither when the site is built nor when it is read.
"""

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

import softnpu  # noqa: F401 - before torch, which the reference imports

project = "kernels-ext-npu"
copyright = "the authors, under Apache 2.0"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*", "examples/*", "[!.]*/README.md", ".github/*.md"]
exclude_patterns = [".venv", "dist", "integration", "scripts", "site", "tests"]  # are not searched

myst_heading_anchors = 4  # as GitHub and the Hub call headings
nb_execution_mode = "off"  # notebooks hold their outputs
napoleon_use_ivar = True
default_role = "code"

html_theme = "furo"
html_title = project
html_copy_source = False
html_extra_path = ["index.html"]


def setup(app: Sphinx) -> None:
    """Show diagrams of mermaid by their source: its renderer would come from a network."""
    app.add_lexer("mermaid", TextLexer)
