"""Configures Sphinx: `sphinx-build -W docs build/docs` writes the documents as HTML that loads
nothing from elsewhere.
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

project = "Duet"
copyright = "the authors of Duet; Apache-2.0"
release = version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser", "diagrams", "repository"]
root_doc = "index"
exclude_patterns = ["_ext", "_static"]
nitpicky = True
# Anchors of headings are those of a repository page, so that one link works in both.
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
# Pages of source files are written after the documents; extension `repository` makes their
# addresses.
myst_url_schemes = {"http": None, "https": None, "mailto": None, "source": "{{path}}"}
html_theme = "alabaster"
html_theme_options = {
    "description": "Reinforcement learning and post-training of language models in JAX",
    "fixed_sidebar": True,
    "page_width": "1060px",
    "sidebar_width": "230px",
    "font_family": "system-ui, sans-serif",
    "head_font_family": "system-ui, sans-serif",
}
html_title = f"Duet {release}"
html_static_path = ["_static"]
html_css_files = ["duet.css"]
html_sidebars = {"**": ["about.html", "searchfield.html", "navigation.html"]}
html_show_sourcelink = False
