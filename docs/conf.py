"""Settings of the documentation site: `make docs` builds it, with warnings as errors, into build/site."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import neuronx_dist  # noqa: E402

project, author = "neuronx_dist", "The neuronx_dist authors"
version = release = neuronx_dist.__version__
copyright = author

extensions = ["myst_parser", "sphinx.ext.intersphinx", "sphinx_copybutton", "site_pages"]
root_doc = "index"
exclude_patterns = ["*.py"]
# Where sources can be read, as https://github.com/OWNER/neuronx_dist/blob/main; empty: links to them are plain paths.
repository = ""

myst_heading_anchors = 4  # as GitHub's: [text](page.md#some-heading)
myst_enable_extensions = ["colon_fence"]
highlight_language = "none"  # of blocks that name no language: output, messages
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# torch's names without internet: site_pages writes this inventory from the names that it lists.
intersphinx_mapping = {"torch": ("https://docs.pytorch.org/docs/stable", str(HERE / "_generated" / "torch.inv"))}
nitpicky = False  # annotations name private types

html_theme = "furo"
html_title = "neuronx_dist"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = html_copy_source = False
python_maximum_signature_line_length = 100
