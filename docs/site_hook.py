"""What mkdocs is told beyond mkdocs.yml: README and its fellows are pages too, and anchors are
GitHub's.

Links are written so that they work on GitHub and in an editor. README.md, CHANGELOG.md and the like
lie above docs/: they are put into the site, links to them and from them are turned, and a link to
what is no page (a folder, the licence) becomes its path in words.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ABOVE = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/README.md": "project/benchmarks.md",
}
"""Path from the root to the place in the site."""
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^):\s]+)\)")
"""One of ours, below docs/."""
LINK = re.compile(r"(?<!\!)\[([^\]]+)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def slug(title: str, separator: str = "-") -> str:
    """The anchor of a heading as GitHub makes it: lower case, no punctuation, blanks as hyphens."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", separator)


def turned(text: str, page: str) -> str:
    """The text of a page with the links that it has in the site; `page`: its path from the root."""
    place = ABOVE.get(page, page.removeprefix("docs/"))

    def from_root(path: str) -> str:
        return posixpath.normpath(posixpath.join(posixpath.dirname(page), path))

    def from_place(there: str) -> str:
        return posixpath.relpath(there, posixpath.dirname(place) or ".")

    def link(match: re.Match[str]) -> str:
        words, path, anchor = match[1], match[2], match[3] or ""
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        target = from_root(path)
        if page.startswith("docs/") and target.startswith("docs/"):
            return match[0]
        there = ABOVE.get(
            target, target.removeprefix("docs/") if target.startswith("docs/") else ""
        )
        if not there.endswith(".md"):
            return f"{words} (`{target}`)" if target not in words else f"`{target}`"
        return f"[{words}]({from_place(there)}{anchor})"

    def picture(match: re.Match[str]) -> str:
        return f"![{match[1]}]({from_place(from_root(match[2]).removeprefix('docs/'))})"

    return PICTURE.sub(picture, LINK.sub(link, text))


def on_config(config: Any) -> Any:
    """Anchors as on GitHub."""
    config["mdx_configs"].setdefault("toc", {})["slugify"] = slug
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn the links of a page below docs/ that lead above it; the others are turned already."""
    source = page.file.src_uri
    return markdown if source in ABOVE.values() else turned(markdown, f"docs/{source}")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from above docs/."""
    from mkdocs.structure.files import File

    for page, place in ABOVE.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=turned(text, page)))
    return files
