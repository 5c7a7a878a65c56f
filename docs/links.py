"""A hook of mkdocs. Pages that a service gets name the others by their address at GitHub; in the site these are pages, too."""

from typing import Any

PAGES = "https://github.com/samefold/samefold/blob/main/docs/"


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    return markdown.replace(PAGES, "../" * page.file.src_uri.count("/"))
