"""Removal of the files that a snippet wrote."""

import os

from areal_gym.sandbox.worker.cleaning import remove_tree


def test_remove_tree_deeper_than_the_path_limit(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    fd = os.open(root, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d" * 50, dir_fd=fd)
        inner = os.open("d" * 50, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)
    remove_tree(str(root))
    assert not root.exists()


def test_remove_tree_with_locked_directories_and_outside_links(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "root"
    (outside / "kept").mkdir(parents=True)
    (root / "locked" / "inner").mkdir(parents=True)
    (root / "link").symlink_to(outside)
    (root / "locked" / "link").symlink_to(outside)
    (root / "locked" / "inner").chmod(0)
    (root / "locked").chmod(0)
    root.chmod(0)
    remove_tree(str(root))
    assert not root.exists()
    assert (outside / "kept").exists()


def test_remove_tree_of_a_missing_directory(tmp_path):
    remove_tree(str(tmp_path / "nothing"))
