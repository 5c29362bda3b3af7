"""What MkDocs does with our pages beyond Markdown: links that leave docs/, formulas and generated pages.

The pages of docs/ are also read where the repository is shown, so their links to code are relative paths. A site
has no repository beside it. A page outside of docs/ (README.md, ...) becomes a page of the site, and any other
file that a page links to is copied into `source/`.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import mathml
import notebooks
import settings_page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {  # pages that are elsewhere in the repository, because people look for them there
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contribute.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "deploy/README.md": "deploy.md",
    "notebooks/README.md": "notebooks.md",
    "examples/README.md": "examples.md",
    "examples/momentum/README.md": "examples-momentum.md",
}
SHIM = (
    "https://unpkg.com/iframe-worker/shim"  # what the theme loads for a search without a server; ours is worker.js
)
LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?(?P<after>\))")
FENCE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)

log = logging.getLogger("mkdocs.plugins.fedbilevel")  # a warning there ends a strict build


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.append(mathml.Formulas())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from elsewhere, the generated ones, and the files that pages link to."""
    for origin, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / origin).read_text()))
    files.append(File.generated(config, "worker.js", content=(ROOT / "website" / "worker.js").read_text()))
    written = [(f"notebooks/{source.stem}.md", notebooks.page(source)) for source in notebooks.sources()]
    for uri, content in (*settings_page.pages(), *written):
        files.append(File.generated(config, uri, content=content))
    for uri in sorted({uri for page in files.documentation_pages() for uri in _sources(page)}):
        files.append(File.generated(config, f"source/{uri}.txt", content=(ROOT / uri).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links of a page lead to where their targets are on the site."""

    def moved(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        uri = _on_site(_origin(page.file), target)
        if uri is None:
            return match[0]
        here = os.path.relpath(uri, Path(page.file.src_uri).parent)
        return f"{match['before']}{here}{anchor}{match['after']}"

    return _outside_of_code(markdown, lambda text: LINK.sub(moved, text))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Let the page load nothing from elsewhere."""
    if SHIM not in output:
        log.warning(f"{page.file.src_uri} does not load {SHIM}: has the theme changed?")
    return output.replace(SHIM, os.path.relpath("worker.js", Path(page.file.dest_uri).parent))


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same for pages that are no Markdown, such as 404.html."""
    return output_content.replace(SHIM, "worker.js")


def _outside_of_code(markdown: str, change: Any) -> str:
    return "".join(part if i % 2 else change(part) for i, part in enumerate(FENCE.split(markdown)))


def _origin(file: File) -> Path:
    """The file of the repository that a page was made from."""
    elsewhere = {uri: ROOT / origin for origin, uri in PAGES.items()}
    return elsewhere.get(file.src_uri, DOCS / file.src_uri)


def _on_site(origin: Path, target: str) -> str | None:
    """The address on the site of what a link points to; None if it is a link of another kind."""
    if not target or re.match(r"[a-z]+:", target):
        return None
    path = Path(os.path.normpath(origin.parent / target))
    if path.is_dir() and (path / "README.md").exists():
        path /= "README.md"
    if not path.is_relative_to(ROOT) or not path.exists():
        return None if path.is_relative_to(DOCS) else _lost(origin, target)
    uri = path.relative_to(ROOT).as_posix()
    if uri in PAGES:
        return PAGES[uri]
    if path.is_relative_to(DOCS) and not path.is_dir():
        return path.relative_to(DOCS).as_posix()
    if path.is_dir():
        index = _index_of(path)
        return f"source/{index.relative_to(ROOT).as_posix()}.txt" if index else _lost(origin, target)
    return f"source/{uri}.txt"


def _index_of(folder: Path) -> Path | None:
    """The file that stands for a folder without a README."""
    return next((folder / name for name in ("__init__.py", "README.md") if (folder / name).exists()), None)


def _lost(origin: Path, target: str) -> None:
    log.warning(f"{origin.relative_to(ROOT)} links to {target}, which is not there")


def _sources(file: File) -> set[str]:
    """The files outside of docs/ that a page links to."""
    found = set()
    for i, part in enumerate(FENCE.split(file.content_string)):
        for match in LINK.finditer(part) if i % 2 == 0 else ():
            uri = _on_site(_origin(file), match["target"])
            if uri is not None and uri.startswith("source/"):
                found.add(uri.removeprefix("source/").removesuffix(".txt"))
    return found
