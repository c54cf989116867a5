"""Hook of mkdocs that adds pages from outside docs/ to the site and converts links.

Links in the pages work on GitHub and in an editor. README.md, CHANGELOG.md and other pages are
above docs/. This hook adds them to the site and converts the links to and from them. A link to
something that is not a page (a folder, the license) becomes its path as text. The anchors of
headings are those of GitHub.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES_ABOVE_DOCS = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/README.md": "project/benchmarks.md",
}
"""Pages above docs/: path in the site by path from the root."""
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^):\s]+)\)")
"""Link to a picture below docs/."""
LINK = re.compile(r"(?<!\!)\[([^\]]+)\]\(([^)\s#]*)(#[^)\s]*)?\)")
"""Link to a page, with its words, path and anchor."""


def make_anchor(title: str, separator: str = "-") -> str:
    """Return the anchor of a heading as GitHub makes it.

    It is in lower case, without punctuation, and with hyphens for blanks.
    """
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", separator)


def convert_links(text: str, page: str) -> str:
    """Return the text of a page with the links that it has in the site.

    Args:
        text: Markdown of the page.
        page: Path of the page from the root.
    """
    site_page = PAGES_ABOVE_DOCS.get(page, page.removeprefix("docs/"))

    def resolve_from_root(path: str) -> str:
        return posixpath.normpath(posixpath.join(posixpath.dirname(page), path))

    def make_relative(site_path: str) -> str:
        return posixpath.relpath(site_path, posixpath.dirname(site_page) or ".")

    def convert_link(match: re.Match[str]) -> str:
        words, path, anchor = match[1], match[2], match[3] or ""
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        target = resolve_from_root(path)
        # Pages below docs/ have the same relative paths in the site.
        if page.startswith("docs/") and target.startswith("docs/"):
            return match[0]
        site_path = PAGES_ABOVE_DOCS.get(
            target, target.removeprefix("docs/") if target.startswith("docs/") else ""
        )
        # The target is not in the site: show its path, unless the words of the link name it.
        if not site_path.endswith(".md"):
            return f"{words} (`{target}`)" if target not in words else f"`{target}`"
        return f"[{words}]({make_relative(site_path)}{anchor})"

    def convert_picture(match: re.Match[str]) -> str:
        return f"![{match[1]}]({make_relative(resolve_from_root(match[2]).removeprefix('docs/'))})"

    return PICTURE.sub(convert_picture, LINK.sub(convert_link, text))


def on_config(config: Any) -> Any:
    """Make anchors as GitHub makes them."""
    config["mdx_configs"].setdefault("toc", {})["slugify"] = make_anchor
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Convert the links of a page below docs/; pages from above docs/ are converted already."""
    source = page.file.src_uri
    return (
        markdown
        if source in PAGES_ABOVE_DOCS.values()
        else convert_links(markdown, f"docs/{source}")
    )


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from above docs/."""
    from mkdocs.structure.files import File

    for page, place in PAGES_ABOVE_DOCS.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=convert_links(text, page)))
    return files
