"""The site: README first, the pages of docs, the notebooks as they were kept, and a reference of what is public.

    make docs

Its source is the repository itself, so that every relative link and picture of a page means on the site what it means
in a plain view of its files.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(Path(__file__).parent / "extensions")]

import outliers  # noqa: E402

project = "outliers"
release = outliers.__version__
author = copyright = "the authors of outliers"
language = "en"
smartquotes = False  # which make a dash of the two of an option

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "navigation",
    "notebook_pages",
    "public_names",
    "repository_files",
]

root_doc = "README"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "docs/**",
    "kernels/README.md",
    "notebooks/*.ipynb",
    "outliers/**/README.md",
]
exclude_patterns = [".*", "build", "dist"]

myst_heading_anchors = 4
highlight_language = "none"  # of what a page does not name the language of
default_role = "py:obj"  # what stands in backticks in a docstring: a link where it is a public name

autodoc_default_options = {"exclude-members": "model_config"}  # of pydantic
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
maximum_signature_line_length = 100
python_use_unqualified_type_names = True
napoleon_use_rtype = False
viewcode_line_numbers = True

html_theme = "furo"
html_title = "outliers"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_search_summary = False  # which a browser fetches, and may not from a folder
