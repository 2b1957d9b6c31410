"""Makes the site show what the repository shows: its README first, and the results beside the docs.

Links in the pages are those of the repository, so that they work there. On the site the folder
`docs` is the root (`docs/x.md` is `x.md`), the README is the first page, and the files of `PAGES`
and `FOLDERS` have the names that they have in the repository.
"""

import os
import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
FOLDERS = ("benchmarks/results",)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:)[^)\s#]+|(?<=src=\")[^\"]+")


def name_on_site(path: str) -> str:
    """The name on the site of a file of the repository; both relative to their roots."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the repository's pages and results to the files of `docs`."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    for path in [*(ROOT / name for name in PAGES), *found]:
        if path.is_file():
            name = name_on_site(path.relative_to(ROOT).as_posix())
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns a page's links within the repository into links within the site."""
    del config, files
    source = page.file.abs_src_path
    assert source is not None
    folder = pathlib.Path(source).parent
    here = os.path.dirname(page.file.src_uri) or "."

    def on_site(link: re.Match[str]) -> str:
        target = pathlib.Path(os.path.normpath(folder / link[0]))
        if not target.is_file() or not target.is_relative_to(ROOT):
            return link[0]
        return os.path.relpath(name_on_site(target.relative_to(ROOT).as_posix()), here)

    return _LINK.sub(on_site, markdown)
