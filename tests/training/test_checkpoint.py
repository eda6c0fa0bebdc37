"""Which checkpoint several ranks go on from."""

from pathlib import Path

from lightning_collider.training import checkpoint
from lightning_collider.training.checkpoint import ABOUT, STATE, checkpoint_path, newest_usable
from lightning_collider.training.files import sha256, write_json


def written(folder: Path, step: int) -> Path:
    path = checkpoint_path(folder, step)
    path.mkdir()
    state = path / STATE
    state.write_bytes(b"weights %d" % step)
    files = {STATE: {"bytes": state.stat().st_size, "sha256": sha256(state)}}
    write_json(path / ABOUT, {"step": step, "identity": {}, "files": files})
    return path


def test_one_rank_moves_and_all_choose_the_same(tmp_path: Path):
    good, bad = written(tmp_path, 1), written(tmp_path, 2)
    (bad / STATE).write_bytes(b"weights 3")
    assert newest_usable(tmp_path, {}, move=False) == good
    assert bad.is_dir()
    assert newest_usable(tmp_path, {}, move=True) == good
    assert not bad.exists() and (tmp_path / f"unusable-{bad.name}" / STATE).is_file()
    assert newest_usable(tmp_path, {}, move=False) == good


def test_a_folder_moved_while_it_is_read_is_skipped(tmp_path: Path, monkeypatch):
    good, bad = written(tmp_path, 1), written(tmp_path, 2)

    def moved_first(path: Path) -> str:
        if path.parent == bad:
            bad.rename(tmp_path / "unusable")
        return sha256(path)

    monkeypatch.setattr(checkpoint, "sha256", moved_first)
    assert newest_usable(tmp_path, {}, move=False) == good
