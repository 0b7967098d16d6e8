"""HTML that needs no network: templates, packed scripts and their hashes, a frame in a notebook, a file."""

import base64
import gzip
import hashlib
import html
from functools import cache, lru_cache
from pathlib import Path

import jinja2

from ..errors import InputError
from ..records import refuse_file_of_run

_LOADER = """(async () => {
  if (!window.%s) {
    const packed = Uint8Array.from(atob("%s"), (one) => one.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }
  %s
})();"""
_ENDINGS = (".html", ".htm")


@cache
def template_environment(folder: Path = Path(__file__).parent) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def unpacking_script(bundle: str, *, name: str, then: str) -> str:
    """Return JavaScript that runs the script ``bundle`` if the global ``name`` is undefined, and then ``then``."""
    return _LOADER % (name, gzip_base64(bundle), then)


@lru_cache(maxsize=4)
def gzip_base64(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def script_hashes(*scripts: str) -> str:
    """Return the hashes of scripts, as a page's content security policy lists them."""
    digests = (hashlib.sha256(text.encode()).digest() for text in scripts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def write_page(text: str, path: str | Path) -> Path:
    """Write a page to a file that ends with .html and belongs to no run, and return its path; folders are made."""
    path = Path(path)
    if path.suffix.lower() not in _ENDINGS:
        raise InputError(
            f"{path} ends with {path.suffix or 'nothing'}; need .html for a page. Figures as .png, .svg and .pdf are "
            "drawn by circuit_of(run).save(...) and by sink-lens report RUN --figures FOLDER"
        )
    refuse_file_of_run(path, replaceable=_ENDINGS)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
    return path


def frame_html(text: str, *, height: int, title: str, also: str = "") -> str:
    """Return an HTML frame of ``height`` pixels with a page, for a notebook; it may run its scripts and no more.

    ``title`` is what a screen reader says; ``also`` what else the frame may do, in HTML's words.
    """
    style = "width: 100%; border: 0; resize: vertical; background: #fff"
    about = (
        f'title="{html.escape(title)}" sandbox="allow-scripts{also and f" {also}"}" '
        f'style="{style}" height="{height}"'
    )
    return f'<iframe {about} srcdoc="{html.escape(text)}"></iframe>'
