"""The checksums of a checkpoint: no file of it, and not they themselves, can go or change unnoticed."""

from pathlib import Path

import pytest

from gspo.errors import InputError
from gspo.seal import require_whole, seal


def test_whatever_goes_or_changes_is_named(tmp_path: Path) -> None:
    for damaged in ("weights", "state.json", "checksums.json"):
        for damage in (Path.unlink, lambda path: path.write_bytes(b"x")):
            folder = tmp_path / f"{damaged}-{damage.__name__}"
            folder.mkdir()
            for name in ("weights", "state.json"):
                (folder / name).write_bytes(b"12345")
            seal(folder)
            require_whole(folder)
            damage(folder / damaged)
            with pytest.raises(InputError, match=f"{damaged} is damaged"):
                require_whole(folder)
