"""Settings of the documentation, which `make docs` builds into site/."""

import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = Path(__file__).parents[1]
sys.path.insert(0, str(PROJECT))

import lightning_sparse  # noqa: E402

# A new page is a file in the section's folder, and one name here.
NAVIGATION = {
    "Start": ["Home <self>", "start/quickstart", "start/choose", "start/compare", "start/two-nodes", "start/migrating"],
    "Guides": [
        "guides/choosing-a-threshold",
        "guides/local-training",
        "guides/big-models",
        "guides/sparsifiers",
        "guides/simulated-workers",
        "guides/without-the-trainer",
        "guides/loggers",
        "guides/clusters",
        "guides/gpus",
        "guides/reliability",
    ],
    "Concepts": ["concepts/how-it-works", "concepts/theory"],
    "Evidence": [
        "evidence/results",
        "evidence/results-appendix",
        "evidence/tried",
        "evidence/paper",
        "evidence/performance",
    ],
    "Reference": ["troubleshooting", "reference"],
    "Contributing": ["contributing", "architecture", "changelog"],
}

project = "lightning-sparse"
project_copyright = author = "The lightning-sparse authors"
version = release = lightning_sparse.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["examples"]
smartquotes_action = "D"
highlight_language = "text"
myst_heading_anchors = 4

# A `name` in a docstring is a link to what the reference has under it; where it has nothing, the build fails.
default_role = "py:obj"
nitpicky = True
# Types in signatures that are other projects' or not public stay without a link.
nitpick_ignore_regex = [
    ("py:class", r"(torch|lightning|collections|datetime|lightning_sparse\.(?!theory)\w+)\..*|dict\[str|GradBucket$")
]
# Members of averagers that strategies and other modules call.
INTERNAL = "anchor may_have_unsent is_consistent obstacles own_metrics parameter_sizes parameters progress"
INTERNAL += " receive register_strategies restore snapshot warm_up watch_next"
autodoc_default_options = {"members": True, "exclude-members": INTERNAL.replace(" ", ",")}
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 72
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
pygments_style, pygments_dark_style = "friendly", "github-dark"
html_title = f"{project} {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = html_use_index = html_domain_indices = False
html_theme_options: dict[str, Any] = {}

# Set `Repository` in pyproject.toml's [project.urls], and the site links to it, and each page to its source there.
REPOSITORY = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"].get("urls", {}).get("Repository", "")
if REPOSITORY:
    html_theme_options["footer_icons"] = [{"name": "Repository", "url": REPOSITORY, "html": "Repository", "class": ""}]
if REPOSITORY.startswith(("https://github.com/", "https://gitlab.com/", "https://bitbucket.org/")):
    html_theme_options |= {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}


def _add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the navigation to the home page, whose file then reads as plain Markdown elsewhere."""
    if page == "index":
        for section, pages in NAVIGATION.items():
            source[0] += "\n".join(["\n\n```{toctree}", ":hidden:", f":caption: {section}", "", *pages, "```\n"])


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("source-read", _add_navigation)
