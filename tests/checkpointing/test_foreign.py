"""Checkpoints that Keras, TensorFlow and torch write are recognised by their names."""

from __future__ import annotations

from texts import mentions

from sparkring.checkpointing.foreign import ListedFile, Other, recognised


def kinds(*paths: str) -> dict[str, str]:
    return {each.name: each.kind for each in recognised([ListedFile(path, 1) for path in paths])}


def test_files():
    """Files are recognised by their endings, even in folders; others are ignored."""
    found = kinds(
        "a.keras", "w/b.weights.h5", "c.h5", "D.HDF5", "e.pt", "f.pth", "g.pth.tar", "notes.txt", "data.index"
    )
    assert found == {
        "a.keras": "Keras model", "w/b.weights.h5": "Keras weights", "c.h5": "HDF5", "D.HDF5": "HDF5", "e.pt": "torch",
        "f.pth": "torch", "g.pth.tar": "torch",
    }  # fmt: skip


def test_a_prefix_of_tensorflows_is_one_checkpoint():
    """An index and its shards are one checkpoint; a note says what is missing."""
    whole = [
        ListedFile("t/ckpt.index", 2, 5.0),
        *(ListedFile(f"t/ckpt.data-0000{n}-of-00002", 10, 6.0 + n) for n in (0, 1)),
    ]
    assert recognised([*whole, ListedFile("t/checkpoint", 9)]) == [Other("TensorFlow", "t/ckpt", 22, 7.0)]
    assert mentions(recognised(whole[:2])[0].note, "1 of 2", "missing")
    assert recognised(whole[1:])[0].note.startswith("its .index file")


def test_backup_and_restore():
    """Keras keeps BackupAndRestore's checkpoint in a folder called chief."""
    parts = ("ckpt-3.index", "ckpt-3.data-00000-of-00001")
    assert kinds(*(f"backup/chief/{part}" for part in parts)) == {"backup/chief/ckpt-3": "BackupAndRestore"}
    assert kinds(*(f"chief/{part}" for part in parts)) == {"chief/ckpt-3": "BackupAndRestore"}
    assert kinds(*(f"backup/{part}" for part in parts)) == {"backup/ckpt-3": "TensorFlow"}


def test_a_saved_model_is_one_with_what_lies_in_it():
    """The files in a SavedModel do not count as separate checkpoints."""
    inside = ("saved_model.pb", "variables/variables.index", "variables/variables.data-00000-of-00001", "assets/x.h5")
    assert kinds(*(f"export/{each}" for each in inside), "b.pt") == {"export/": "SavedModel", "b.pt": "torch"}
    assert kinds(*inside) == {"./": "SavedModel"}


def test_newest_first():
    """Checkpoints whose time is unknown come last."""
    files = [ListedFile("a.pt", 1), ListedFile("b.pt", 1, 5.0), ListedFile("c.pt", 1, 9.0)]
    assert [each.name for each in recognised(files)] == ["c.pt", "b.pt", "a.pt"]
