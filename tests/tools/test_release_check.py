"""A distribution is refused unless it holds what git tracks, and says its version."""

import io
import tarfile
import zipfile

import pytest

from tools import release_check

TRACKED = "README.md\nsink_lens/text.py\ntests/test_text.py\n"


def check(folder, *, packed, wheel, said):
    """Check a source distribution and a wheel with files of these names."""
    source = folder / "sink_lens-1.2.3.tar.gz"
    with tarfile.open(source, "w:gz") as archive:
        for name in packed:
            archive.addfile(tarfile.TarInfo(f"sink_lens-1.2.3/{name}"), io.BytesIO())
    with zipfile.ZipFile(folder / "sink_lens.whl", "w") as archive:
        for name in wheel:
            archive.writestr(name, "")
        archive.writestr(
            "sink_lens-1.2.3.dist-info/METADATA", f"Name: sink-lens\nVersion: {said}\n"
        )
    release_check.check_contents(folder / "sink_lens.whl", source, version="1.2.3")


@pytest.mark.parametrize(
    ("packed", "wheel", "said", "found"),
    [
        ("README.md sink_lens/text.py", "sink_lens/text.py", "1.2.3", "tests/test_text.py"),
        (
            "README.md sink_lens/text.py tests/test_text.py runs/a",
            "sink_lens/text.py",
            "1.2.3",
            "runs/a",
        ),
        (
            "README.md sink_lens/text.py tests/test_text.py",
            "sink_lens/text.py tests/test_text.py",
            "1.2.3",
            "tests",
        ),
        ("README.md sink_lens/text.py tests/test_text.py", "sink_lens/text.py", "1.2.2", "1.2.3"),
    ],
)
def test_what_is_missing_or_foreign_is_named(packed, wheel, said, found, tmp_path, monkeypatch):
    monkeypatch.setattr(release_check, "run", lambda *words, where: TRACKED)
    whole = TRACKED.split()
    check(tmp_path, packed=[*whole, "PKG-INFO"], wheel=["sink_lens/text.py"], said="1.2.3")
    with pytest.raises(SystemExit, match=found):
        check(tmp_path, packed=packed.split(), wheel=wheel.split(), said=said)
