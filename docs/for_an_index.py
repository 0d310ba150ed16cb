"""`make release` runs this script on a copy of the repository: for_an_index.py COPY REPOSITORY.

A package index shows README.md without the files beside it. So its relative links and pictures become addresses in
REPOSITORY, the web page of the repository, at the tag of the version. The same addresses become the project's URLs.
"""

from __future__ import annotations

import configparser
import re
import sys
from pathlib import Path

VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
# The targets of Markdown links and of HTML attributes that are neither addresses nor places within the page.
TARGETS = re.compile(r'(?P<before>\]\(|\b(?:src|srcset|href)=")(?!https?:|mailto:|#)(?P<path>[^)"\s]+)')
PICTURES = (".png", ".gif", ".webp", ".svg", ".jpg")


def with_addresses(page: str, repository: str, tag: str) -> str:
    """Return a page of Markdown with addresses instead of relative paths."""

    def address(target: re.Match[str]) -> str:
        kind = "raw" if target["path"].endswith(PICTURES) else "blob"
        return f"{target['before']}{repository}/{kind}/{tag}/{target['path']}"

    return TARGETS.sub(address, page)


def project_urls(repository: str, tag: str) -> dict[str, str]:
    """Return what a package index shows as the project's links."""
    return {
        "Source": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/README.md",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def main(folder: Path, repository: str) -> None:
    """Rewrite README.md and setup.cfg in `folder`."""
    if not re.fullmatch(r"https://[^/\s]+/\S+[^/\s]", repository):
        raise SystemExit(f"REPOSITORY={repository}: expected an address such as https://github.com/owner/sparkring.")
    version = VERSION.search((folder / "extension/sparkring/__init__.py").read_text(encoding="utf-8"))
    assert version is not None
    tag = f"v{version[1]}"
    readme, setup = folder / "README.md", folder / "setup.cfg"
    readme.write_text(with_addresses(readme.read_text(encoding="utf-8"), repository, tag), encoding="utf-8")
    config = configparser.ConfigParser(interpolation=None)
    config.read(setup, encoding="utf-8")
    urls = project_urls(repository, tag)
    config["metadata"]["project_urls"] = "".join(f"\n{name} = {url}" for name, url in urls.items())
    with setup.open("w", encoding="utf-8") as file:
        config.write(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
