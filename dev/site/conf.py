"""How the course becomes a website: Sphinx's settings. `python3 dev/setup.py site` builds it.

The pages are the repository's own files, which read as well on GitHub; what GitHub does not know, the menu, is added
here. Notebooks keep the outputs they were committed with: nothing runs, and nothing is fetched.
"""

from __future__ import annotations

from sphinx.application import Sphinx

project = "minisgl"
author = "the minisgl authors"
root_doc = "chapters/README"
extensions = ["myst_nb"]
include_patterns = ["chapters/**.md", "notebooks/*.ipynb", "solutions/*.md"]
exclude_patterns = ["**.ipynb_checkpoints"]

nb_execution_mode = "off"
myst_heading_anchors = 4  # GitHub makes an anchor of every heading, and the pages use them
myst_enable_extensions = ["dollarmath"]
# A link to a line or a test is a link to a file of code, which has no anchors
suppress_warnings = ["myst.xref_missing", "mystnb.unknown_mime_type"]

html_theme = "furo"
html_title = "minisgl: LLM serving in eight stages"
html_show_sphinx = False
html_copy_source = False

TITLES = {"chapters": "The chapter", "notebooks": "The notebook", "solutions": "Solutions"}  # others have their own


def setup(app: Sphinx) -> None:
    app.connect("source-read", _add_menu)


def _add_menu(app: Sphinx, docname: str, source: list[str]) -> None:
    """The start page lists all others, stage by stage: chapter, side pages, notebook, solutions."""
    if docname != root_doc:
        return
    pages = sorted(app.env.found_docs - {root_doc})
    for stage in sorted({page.split("/")[1] for page in pages if page.startswith("chapters/stage")}):
        of_stage = [page for page in pages if stage in page]
        pages = [page for page in pages if stage not in page]
        of_stage.sort(key=lambda page: (page.split("/")[0], not page.endswith("/README")))
        source[0] += _toctree(stage.replace("stage", "Stage ").replace("_", " · ", 1).replace("_", " "), of_stage)
    source[0] += _toctree("Beside the stages", pages)


def _toctree(caption: str, pages: list[str]) -> str:
    lines = ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *map(_entry, pages), "```", ""]
    return "\n".join(lines)


def _entry(page: str) -> str:
    folder, name = page.split("/")[0], page.split("/")[-1]
    is_main = name == "README" or (folder != "chapters" and name.startswith("stage"))
    return f"{TITLES[folder]} </{page}>" if is_main else f"/{page}"
