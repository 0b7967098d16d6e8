"""A page of its own for a JavaScript component: its bundle inside, packed; nothing fetched, and no other script run.

In a notebook the page stands in a sandboxed frame. Whatever a token says, it can reach neither the notebook nor the
network: the page's content policy names the hashes of its own scripts, and the frame has no origin.
"""

import base64
import gzip
import hashlib
import html
from functools import cache

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
_STYLE = "body { font-family: system-ui, sans-serif; margin: 12px; background: #fff; color: #111; }"


def script(bundle: str, *, name: str, then: str) -> str:
    """One script: the bundle, unpacked where the page does not have it yet, and what is done with it then.

    Args:
        bundle: the component's JavaScript, which sets one global variable.
        name: that variable.
        then: the statements that follow.
    """
    return _LOADER % (name, _packed(bundle), then)


@cache
def _packed(bundle: str) -> str:
    return base64.b64encode(gzip.compress(bundle.encode(), 9, mtime=0)).decode()


def hashes(*scripts: str) -> str:
    """What a content policy must allow for some scripts and bundles."""
    digests = (hashlib.sha256(text.encode()).digest() for text in scripts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def page(body: str, *, code: str, bundle: str, title: str) -> str:
    """A whole page: a body, the script that fills it, and the policy that allows this script and its bundle alone."""
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {hashes(code, bundle)}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n<script>{code}</script>\n</body></html>\n"
    )


def framed(text: str, *, height: int, title: str) -> str:
    """A page in a frame that may run its scripts and nothing else, as a notebook shows it; its height in pixels."""
    style = "width: 100%; border: 0; resize: vertical; background: #fff"
    about = f'title="{html.escape(title)}" sandbox="allow-scripts" style="{style}" height="{height}"'
    return f'<iframe {about} srcdoc="{html.escape(text)}"></iframe>'
