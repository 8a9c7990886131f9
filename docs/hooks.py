"""What the site does with links out of docs/: the files come along, in a folder `files`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
_FETCHED = re.compile(r"<script src=\"https://unpkg\.com/[^\"]*\"></script>")
_LINK = re.compile(r"\]\(\.\./([^)#\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    for page in [page for page in files.documentation_pages() if "/" not in page.src_uri]:
        source = Path(page.abs_src_path).read_text() if page.abs_src_path else ""
        for name in _LINK.findall(source):
            if files.get_file_from_path(f"files/{name}") is None and (ROOT / name).is_file():
                content = (ROOT / name).read_bytes()
                files.append(File.generated(config, _shown(name), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if "/" in page.file.src_uri:  # pages of a folder have no links out of docs/
        return markdown
    return _LINK.sub(lambda found: f"]({_shown(found[1])})", markdown)


def _shown(name: str) -> str:
    """Browsers show text, and would offer to save source."""
    is_shown = Path(name).suffix in (".png", ".svg", ".txt")
    return f"files/{name}" if is_shown else f"files/{name}.txt"


def on_post_page(output: str, **_: Any) -> str:
    """The theme would fetch the one script that searching needs where pages are opened as files."""
    return _FETCHED.sub("", output)


def on_post_template(output_content: str, **_: Any) -> str:
    """Likewise of the page for what is not found."""
    return _FETCHED.sub("", output_content)
