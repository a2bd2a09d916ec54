"""The course as a website: it builds without a warning, so every page is in its menu and every link leads somewhere."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("myst_nb", reason="the site is built with minisgl[site]")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-c", "dev/site", "."]
    built = subprocess.run(
        [*command, "-d", str(tmp_path / "cache"), str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert built.returncode == 0, built.stderr
    chapters = {path.parent.name for path in ROOT.glob("chapters/stage*/README.md")}
    pages = {path.parent.name for path in (tmp_path / "site").glob("chapters/stage*/README.html")}
    assert pages == chapters
    start = (tmp_path / "site" / "chapters" / "README.html").read_text()
    assert all(f'href="{name}/README.html">The chapter' in start for name in chapters)
