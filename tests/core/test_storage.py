"""The output folder: refused early when it can't work, created exclusively, names that stay apart."""

from __future__ import annotations

import os
import sys
import threading
import unicodedata
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agl_meta
from agl_meta.errors import OutputDirError, StampError
from agl_meta.storage import (
    OUTPUT_DIR_VARIABLE,
    create_pass,
    find_passes,
    find_root,
    open_folder,
    pass_parts,
    prepare_root,
    publish,
    safe_name,
    stamped_root,
)
from tests.core.children import as_nobody


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OUTPUT_DIR_VARIABLE, raising=False)


class TestRoot:
    """``prepare_root`` says what was found, what was expected and what to do."""

    def test_is_made(self, tmp_path: Path) -> None:
        """A missing folder is created, with its parents, and nothing is left in it."""
        root = prepare_root(tmp_path / "a" / "b")
        assert root == str(tmp_path / "a" / "b")
        assert os.listdir(root) == []

    def test_relative_becomes_absolute(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Other processes have other current directories."""
        monkeypatch.chdir(tmp_path)
        assert prepare_root("runs/x") == str(tmp_path / "runs" / "x")

    @pytest.mark.parametrize("below", ["", "sub/run"])
    def test_file(self, tmp_path: Path, below: str) -> None:
        """A file, or a path through a file, is refused by name."""
        file = tmp_path / "file"
        file.write_text("x")
        with pytest.raises(OutputDirError, match="is a file; expected a folder.*Choose another"):
            prepare_root(file / below)

    def test_not_writable(self) -> None:
        """What the system refuses to write is refused, also for root."""
        with pytest.raises(OutputDirError, match="can't be written.*Choose another"):
            prepare_root("/proc/self/agl_meta")

    @pytest.mark.parametrize("path", ["/no-such-mount/runs", "/mnt/no-such-mount/runs"])
    def test_missing_mount(self, path: str) -> None:
        """A folder that would be created beside the mounts is taken for a missing mount."""
        with pytest.raises(OutputDirError, match="no-such-mount' does not exist.*Mount it"):
            prepare_root(path)
        assert not os.path.exists(path)

    @pytest.mark.parametrize(
        "url",
        [
            *("ftp://host/run", "http://host/run", "S3://bucket/run", "://bucket", "s3:///", "s3://"),
            *("simplecache::s3://bucket/run", "s3://bucket/run::s3://other/run", "zip://a::file://b"),
            *("s3://bucket/../other", "s3://bucket/./run", "s3://bucket/a*", "s3://bucket/a?versionId=1"),
            *("s3://bucket/a\nb", "s3://bucket/\u202ea", "reference://x", "github://user:repo@main/x"),
        ],
    )
    def test_no_folder_of_a_store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
        """A URL that names no folder to write to is refused, and not created as a local one."""
        monkeypatch.chdir(tmp_path)
        with pytest.raises(OutputDirError, match="output_dir is .*expected a "):
            prepare_root(url)
        with pytest.raises(StampError, match="expected a.*Nothing is written to it"):
            stamped_root(url)
        assert list(tmp_path.iterdir()) == []

    def test_no_password(self) -> None:
        """It would be written to stamps and logs; the message does not repeat it."""
        with pytest.raises(OutputDirError, match="a URL with a password") as caught:
            prepare_root("hdfs://me:secret@host/run")
        assert "secret" not in str(caught.value)

    def test_store_without_its_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "fsspec", None)
        monkeypatch.setitem(sys.modules, "upath", None)
        for use in (prepare_root, agl_meta.read_predictions):
            with pytest.raises(OutputDirError, match=r"Install agl_meta\[remote\]"):
                use("gs://bucket/run")

    def test_file_url(self, tmp_path: Path) -> None:
        assert prepare_root(f"file://{tmp_path}/runs") == str(tmp_path / "runs")
        assert (tmp_path / "runs").is_dir()

    @pytest.mark.parametrize("path", ["", "a\0b", "/runs/\ud800", 5, True, b"runs", ["runs"]])
    def test_no_path(self, path: Any) -> None:
        """What can't be a path is refused, too; a setting may come from a config file."""
        with pytest.raises(OutputDirError, match="expected the path of a folder"):
            prepare_root(path)

    def test_unknown_home(self) -> None:
        """A home folder that is not known is refused rather than created under that very name."""
        with pytest.raises(OutputDirError, match="output_dir is '~no-such-user/runs', a home folder"):
            prepare_root("~no-such-user/runs")

    @pytest.mark.parametrize("path", ["x/" * 50_000, "x" * 300])
    def test_overlong(self, tmp_path: Path, path: str) -> None:
        """What is too long for the system is refused, with a part of its name, and nothing is created."""
        with pytest.raises(OutputDirError, match="can't be written: File name too long") as caught:
            prepare_root(tmp_path / path)
        assert len(str(caught.value)) < 500
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("pinned", [None, "{tmp}/here"])
    @pytest.mark.parametrize("path", ["ftp://host/run", "a\0b", "~no-such-user/x", "/runs/\udcff", 5])
    def test_what_can_not_be_stamped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any, pinned: str | None
    ) -> None:
        """What the runners are to be told must be a path and text, also where this machine has its own."""
        if pinned is not None:
            monkeypatch.setenv(OUTPUT_DIR_VARIABLE, pinned.format(tmp=tmp_path))
        with pytest.raises(OutputDirError, match="output_dir is "):
            find_root(path)
        assert list(tmp_path.iterdir()) == []

    def test_variable_alone_that_can_not_be_stamped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The variable's folder is stamped where there is no other; it is named in the message."""
        monkeypatch.setenv(OUTPUT_DIR_VARIABLE, f"{tmp_path}/\udcff")
        with pytest.raises(OutputDirError, match=f"{OUTPUT_DIR_VARIABLE} is .*valid UTF-8"):
            find_root(None)
        assert find_root("/there") == (f"{tmp_path}/\udcff", "/there")


class TestPasses:
    """Pass folders are created exclusively and found in numeric order."""

    def test_each_call_gets_its_own(self, tmp_path: Path) -> None:
        """Further passes of a step stand beside the first one."""
        paths = [create_pass(str(tmp_path), 40, "val", {"n": n}) for n in range(3)]
        assert paths == [f"global_step_40/val{end}" for end in ("", ".2", ".3")]
        for number, path in enumerate(paths):
            found = orjson.loads((tmp_path / path / "pass.json").read_bytes())
            assert found == {"schema": 1, "pass_path": path, "n": number}

    def test_concurrent_callers_never_share(self, tmp_path: Path) -> None:
        """Of many callers at once each gets a folder of its own."""
        paths: list[str] = []
        threads = [
            threading.Thread(target=lambda: paths.append(create_pass(str(tmp_path), 1, "val", {})))
            for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(paths)) == 16

    def test_found_in_numeric_order(self, tmp_path: Path) -> None:
        """Step 100 comes after step 20, val.10 after val.2; other names are left out."""
        for path in ("100/val", "20/val.10", "20/val.2", "20/train", "0/val", "3/test", "3/val.0"):
            (tmp_path / f"global_step_{path}").mkdir(parents=True)
        (tmp_path / "checkpoint").mkdir()
        (tmp_path / "global_step_5").write_text("a file")
        found = [(p.global_step, p.split, p.number) for p in find_passes(tmp_path)]
        assert found == [
            (0, "val", 1),
            (20, "train", 1),
            (20, "val", 2),
            (20, "val", 10),
            (100, "val", 1),
        ]

    def test_one_that_can_not_be_looked_at(self, tmp_path: Path) -> None:
        """Who does not ask to be told of it gets the error; who does, gets the others."""
        for step in (1, 2, 3):
            (tmp_path / f"global_step_{step}" / "val").mkdir(parents=True)

        def work() -> None:
            os.chmod("global_step_2", 0)
            with pytest.raises(PermissionError):
                list(find_passes("."))
            told: list[tuple[int, str]] = []
            found = find_passes(".", lambda step, folder, error: told.append((step, str(folder))))
            assert [folder.global_step for folder in found] == [1, 3]
            assert told == [(2, "global_step_2")]

        try:
            as_nobody(tmp_path, work)
        finally:
            os.chmod(tmp_path / "global_step_2", 0o755)


class TestPublish:
    """A published file is there as a whole, and is never replaced."""

    def test_refuses_to_replace(self, tmp_path: Path) -> None:
        """What stands there stays, and no temporary file is left behind."""
        path = tmp_path / "x.json"
        publish(path, b"first")
        with pytest.raises(FileExistsError):
            publish(path, b"second")
        assert path.read_bytes() == b"first"
        assert os.listdir(tmp_path) == ["x.json"]

    def test_without_hard_links(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """On mounts that know no hard links the promises are the same."""

        def refuse(*_: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
        self.test_refuses_to_replace(tmp_path)


class TestStampedPaths:
    """No path in a stamp leads out of the output folder."""

    @pytest.mark.parametrize("path", ["global_step_0/val", "global_step_12/train.3"])
    def test_accepted(self, path: str) -> None:
        """The form that the trainer side writes is accepted."""
        assert "/".join(pass_parts(path)) == path

    @pytest.mark.parametrize(
        "path",
        [
            "",
            "/etc",
            "..",
            "../x",
            "global_step_1/..",
            "global_step_1/val/..",
            "global_step_1/../../x",
            "global_step_1/val\n",
            "global_step_-1/val",
            "global_step_1/test",
            "global_step_1//val",
            "global_step_1/val.0",
            "global_step_١/val",
        ],
    )
    def test_refused(self, path: str) -> None:
        """Everything else is refused, by name."""
        with pytest.raises(StampError, match="expected something like 'global_step_40/val'"):
            pass_parts(path)

    @given(st.text())
    def test_any_text(self, path: str) -> None:
        """Whatever is accepted has two plain parts."""
        try:
            parts = pass_parts(path)
        except StampError:
            return
        assert all("/" not in part and part not in ("", ".", "..") for part in parts)

    @pytest.mark.parametrize("level", [0, 1, 2])
    def test_planted_link(self, tmp_path: Path, level: int) -> None:
        """A link at any level below the root is refused and nothing is created behind it."""
        root, outside = tmp_path / "root", tmp_path / "outside"
        outside.mkdir()
        parts = ("global_step_1", "val", "shards")
        link = root.joinpath(*parts[: level + 1])
        link.parent.mkdir(parents=True)
        link.symlink_to(outside)
        with pytest.raises(StampError, match="is a link;"):
            open_folder(str(root), parts)
        assert os.listdir(outside) == []

    def test_root_itself_may_be_a_link(self, tmp_path: Path) -> None:
        """The root is the user's own choice: there a link is followed."""
        real = tmp_path / "real"
        real.mkdir()
        (tmp_path / "link").symlink_to(real)
        os.close(open_folder(str(tmp_path / "link"), ("a",)))
        assert (real / "a").is_dir()


class TestSafeName:
    """File names for ids of any characters and length."""

    @given(st.text(st.characters(exclude_categories=[])), st.text(st.characters()))
    def test_distinct(self, first: str, second: str) -> None:
        """Distinct ids have names that differ also without case and in every normal form."""
        one, two = safe_name(first), safe_name(second)
        for form in ("NFC", "NFD", "NFKC", "NFKD"):
            folded = [unicodedata.normalize(form, name).casefold() for name in (one, two)]
            assert (folded[0] == folded[1]) == (first == second)

    @given(st.text(st.characters(exclude_categories=[])))
    def test_safe(self, name: str) -> None:
        """The name is short, plain ASCII, and no path."""
        safe = safe_name(name)
        assert safe.isascii() and 0 < len(safe) <= 100
        assert not set(safe) & set('/\\.:*?"<>| \0')

    @pytest.mark.parametrize("name", ["ro-5f2c", "rollout-0a1b-2c3d"])
    def test_upstream_ids_stay_readable(self, name: str) -> None:
        """Upstream's ids are file names already."""
        assert safe_name(name) == name

    @pytest.mark.parametrize("name", ["con", "nul", "com1", ""])
    def test_reserved(self, name: str) -> None:
        """Names that some system refuses are changed."""
        assert safe_name(name) != name
