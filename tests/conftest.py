"""What holds for every test: no network, and nothing is looked up on a model hub."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import shape_checks  # noqa: F401 before sink_lens: it says which functions jaxtyping decorates
import tiers

gc.disable()  # until all is collected: a quarter of that time else
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch: tiny models are several times faster on one thread

if os.environ.get("HOSTILE_CPU") == "1":
    import hostile_cpu

    hostile_cpu.start()

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as a shell leaves it for what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["raw_models", "written_tables"]

_COSTLY = ("test_real", "test_docs")
"""Files with a fixture that takes minutes: they begin first, so that no two workers divide one and make it twice."""

_HERE = ("localhost", "::1", "", None)


def _refuse_the_network(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse what pytest-socket lets through: look-ups of names, datagrams, and anything at import time."""
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    elif event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[1]
        host = (
            address[0] if isinstance(address, tuple) else None
        )  # a text or bytes is a Unix socket
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in _HERE and not host.startswith("127."):
        raise RuntimeError(
            f"a test tried to reach {host!r}; only loopback and Unix sockets are open here"
        )


sys.addaudithook(_refuse_the_network)


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the second tier, and put what is costly first."""
    tiers.mark(items)
    items.sort(key=lambda item: item.path.stem not in _COSTLY)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from what was imported, and let it walk the rest less often: 7% of the time else."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _shared_models_stay_as_they_are() -> Iterator[None]:
    """Fails at the end of the file that changed a weight or the kernel of a model of ``checking/lenses.py``."""
    gc.collect()
    gc.freeze()  # what was imported and kept since the file before
    yield
    shared = sys.modules.get("lenses")
    assert shared is None or shared.changed() == []


@pytest.fixture(scope="session", autouse=True)
def _a_long_text_is_tokenised_once() -> Iterator[None]:
    """Half a second each time for the bundled text, which was a tenth of all: ids are kept by tokenizer and text."""
    from sink_lens.data import tokens

    plain, kept = tokens.text_ids, dict[tuple[str, str], list[int]]()

    def text_ids(text: str, tokenizer: Any) -> list[int]:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or len(text) < 100_000:
            return plain(text, tokenizer)
        key = (backend.to_str(), text)
        if key not in kept:
            kept[key] = plain(text, tokenizer)
        return list(kept[key])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tokens, "text_ids", text_ids)
        yield
