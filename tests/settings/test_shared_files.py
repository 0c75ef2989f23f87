"""Files and folders that another user has made, or put in the way: they are refused, and nothing
else changes.
"""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from farm.settings.shared_files import (
    PRIVATE,
    SHARED,
    TemporaryFolder,
    UntrustedPath,
    check_file,
    make_private,
    open_folder,
    remove_left,
    replacing_file,
    why_not_own,
)
from tests.other_user import (
    IN_PLACE_OF_A_FILE,
    USER,
    Victim,
    as_other_user,
    needs_root,
    plant,
    shared,
    victim,
)

__all__ = ["shared", "victim"]  # fixtures
pytestmark = needs_root


@pytest.fixture(params=[0o000, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.parametrize("name", ["x" * 251 + ".csv", "結" * 80 + ".csv", "é" * 125 + ".json"])
def test_a_file_may_have_every_name_that_the_file_system_accepts(shared: Path, name: str) -> None:
    with open_folder(shared) as folder:
        folder.write(name, b"text")
    with replacing_file(shared / name) as file:
        file.write(b"more")
    assert [entry.name for entry in shared.iterdir()] == [name]


@pytest.mark.parametrize("mode", [PRIVATE, SHARED])
def test_a_new_folder_has_its_mode_whatever_the_umask(shared: Path, umask: None, mode: int) -> None:
    with open_folder(shared / "parent" / "new", create=mode) as folder:
        assert stat.S_IMODE(os.fstat(folder.descriptor).st_mode) == mode
        assert folder.exclusive == (mode == PRIVATE)
    assert stat.S_IMODE((shared / "parent").stat().st_mode) == (0o700 if mode == PRIVATE else 0o755)


def test_a_new_file_has_its_mode_whatever_the_umask(shared: Path, umask: None) -> None:
    with open_folder(shared) as folder:
        os.close(folder.create("open", 0o666))
        folder.write("private", b"text")
    assert stat.S_IMODE((shared / "open").stat().st_mode) == 0o666
    assert stat.S_IMODE((shared / "private").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o1777, 0o2770])
def test_the_mode_of_a_folder_that_exists_stays(shared: Path, mode: int) -> None:
    (shared / "there").mkdir()
    (shared / "there").chmod(mode)
    open_folder(shared / "there", create=SHARED).close()
    make_private(shared / "there")
    assert stat.S_IMODE((shared / "there").stat().st_mode) == mode


@pytest.mark.parametrize("below", ["", "below", "below/it"])
def test_a_link_in_a_shared_folder_is_not_followed(
    shared: Path, victim: Victim, below: str
) -> None:
    plant("link to a folder", shared / "link", victim)
    with pytest.raises(UntrustedPath, match="symbolic link of user nobody, in a folder") as caught:
        open_folder(shared / "link" / below, create=SHARED)
    assert caught.value.filename == str(shared / "link")


def test_a_link_in_a_folder_of_another_user_is_not_followed(shared: Path, victim: Victim) -> None:
    def act() -> None:
        (shared / "theirs").mkdir()
        (shared / "theirs" / "link").symlink_to(victim.folder)

    as_other_user(act)
    with pytest.raises(UntrustedPath):
        open_folder(shared / "theirs" / "link", create=SHARED)


def test_a_link_in_a_folder_of_this_user_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    (tmp_path / "relative").symlink_to("absolute")
    for name in ("absolute", "relative"):
        with open_folder(tmp_path / name) as folder:
            folder.write(name, b"")
            assert folder.exclusive
    assert sorted(path.name for path in (tmp_path / "real").iterdir()) == ["absolute", "relative"]
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="Too many levels"):
        open_folder(tmp_path / "round")


def test_a_path_from_the_present_folder_and_one_with_dots_are_the_same_folder(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    open_folder("../b", create=PRIVATE).close()
    with open_folder(Path("../b/../b")) as folder:
        assert os.path.samestat(os.fstat(folder.descriptor), (tmp_path / "b").stat())


@pytest.mark.parametrize("kind", IN_PLACE_OF_A_FILE)
def test_only_a_regular_file_with_one_name_is_opened(
    shared: Path, victim: Victim, kind: str
) -> None:
    plant(kind, shared / "name", victim)
    with open_folder(shared) as folder:
        for flags in (os.O_RDONLY, os.O_RDWR):
            with pytest.raises(UntrustedPath) as caught:
                folder.open("name", flags)
            assert caught.value.filename == str(shared / "name")
        with pytest.raises(FileExistsError):
            folder.create("name", 0o666)
        with pytest.raises(UntrustedPath):
            folder.read("name", 100)


def test_what_is_put_at_a_name_after_the_look_is_refused_too(shared: Path, victim: Victim) -> None:
    """Another user exchanges a file and a link again and again."""
    ended = threading.Event()
    (shared / "name").write_text("of the farm")

    def exchange() -> None:
        while not ended.is_set():
            (shared / "link").symlink_to(victim.file)
            os.rename(shared / "link", shared / "name")
            (shared / "file").write_text("of the farm")
            os.rename(shared / "file", shared / "name")

    other = threading.Thread(target=exchange)
    other.start()
    seen = set()
    with open_folder(shared) as folder:
        for _ in range(2000):
            try:
                seen.add(folder.read("name", 100))
            except OSError:
                seen.add(b"refused")
    ended.set()
    other.join()
    assert seen <= {b"of the farm", b"", b"refused"}


@pytest.mark.parametrize("kind", [*IN_PLACE_OF_A_FILE])
def test_writing_replaces_what_is_at_a_name(shared: Path, victim: Victim, kind: str) -> None:
    plant(kind, shared / "name", victim)
    with open_folder(shared) as folder:
        if kind == "folder":
            with pytest.raises(IsADirectoryError):
                folder.write("name", b"text")
        else:
            folder.write("name", b"text")
            assert folder.read("name", 4) == b"text"
        assert folder.names() == ["name"]


def test_reading_is_bounded(shared: Path) -> None:
    def act() -> None:
        with (shared / "huge").open("wb") as file:
            file.truncate(1 << 40)

    as_other_user(act)
    with (
        open_folder(shared) as folder,
        pytest.raises(UntrustedPath, match="is larger than 100 bytes"),
    ):
        folder.read("huge", 100)


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        folder.write("name", b"before")
        with pytest.raises(TypeError), folder.replacing("name") as file:
            file.writelines([b"half", None])  # type: ignore[list-item]
        assert (folder.names(), folder.read("name", 10)) == (["name"], b"before")


def test_a_file_that_the_user_names_replaces_a_link(shared: Path, victim: Victim) -> None:
    plant("link to a file", shared / "out", victim)
    with replacing_file(shared / "out") as file:
        file.write(b"text")
    assert (shared / "out").read_text() == "text"


@pytest.mark.parametrize("kind", IN_PLACE_OF_A_FILE)
def test_a_database_that_another_user_may_have_planted_is_not_opened(
    shared: Path, victim: Victim, tmp_path: Path, kind: str
) -> None:
    plant(kind, shared / "farm.db", victim)
    with pytest.raises(UntrustedPath):
        check_file(shared / "farm.db")
    check_file(shared / "none.db")
    (tmp_path / "farm.db").symlink_to(victim.file)
    check_file(tmp_path / "farm.db")  # no other user can have made this link


def test_who_may_have_changed_files_with_code_is_told(shared: Path, victim: Victim) -> None:
    assert why_not_own(shared / "own" / "cache") == ""
    plant("folder", shared / "theirs", victim)
    assert why_not_own(shared / "theirs") == "it belongs to user nobody"
    (shared / "open").mkdir()
    (shared / "open").chmod(0o777)
    assert "can write to it" in why_not_own(shared / "open")
    assert "a folder above it" in why_not_own(shared / "open" / "cache")
    plant("link to a folder", shared / "link", victim)
    assert "is a symbolic link" in why_not_own(shared / "link")


def test_left_temporary_folders_are_removed_and_no_others(shared: Path, victim: Victim) -> None:
    used, left = TemporaryFolder("farm-x-", shared), TemporaryFolder("farm-x-", shared)
    os.close(left.descriptor)  # as if its process had been killed
    (shared / "farm-x-empty").mkdir()
    (shared / "farm-x-unlocked").mkdir()
    (shared / "farm-x-unlocked" / "file").touch()
    plant("link to a folder", shared / "farm-x-link", victim)
    plant("pipe", shared / "farm-x-pipe", victim)
    for kind in ("link to a file", "pipe", "folder", "hard link"):
        path = shared / f"farm-x-{kind}s"
        path.mkdir(mode=0o777)
        path.chmod(0o777)
        plant(kind, path / "owned", victim)

    def act() -> None:
        (shared / "farm-x-theirs").mkdir()
        (shared / "farm-x-theirs" / "owned").touch()

    as_other_user(act)
    before = {path.name for path in shared.iterdir()}
    remove_left("farm-x-", shared)
    assert before - {path.name for path in shared.iterdir()} == {left.path.name}
    remove_left("farm-x-", shared, also_empty=True)
    assert before - {path.name for path in shared.iterdir()} == {left.path.name, "farm-x-empty"}
    assert stat.S_IMODE(used.path.stat().st_mode) == 0o700
    used.close()
    assert not used.path.exists()


def test_many_processes_make_and_remove_temporary_folders_at_once(shared: Path) -> None:
    def work() -> None:
        for _ in range(100):
            remove_left("farm-x-", shared, also_empty=True)
            folder = TemporaryFolder("farm-x-", shared)
            assert (folder.path / "owned").exists()
            folder.close()

    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert list(shared.iterdir()) == []


def test_a_user_without_rights_uses_the_same_rules(shared: Path) -> None:
    """The folder of root at the beginning of the path is trusted, the shared one is not."""

    def act() -> None:
        assert os.geteuid() == USER.pw_uid
        with open_folder(shared / "new" / "private", create=PRIVATE) as folder:
            assert folder.exclusive
        os.symlink("new", shared / "own-link")
        try:
            open_folder(shared / "own-link")
        except UntrustedPath:
            return
        raise AssertionError("a link in a shared folder was followed")

    as_other_user(act)
