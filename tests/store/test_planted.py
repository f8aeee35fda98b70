"""What somebody else put where a file is going to be made."""

from __future__ import annotations

from pathlib import Path

from fpfl.store.files import write_whole


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    victim, secret = tmp_path / "victim", tmp_path / "secret"
    victim.write_bytes(b"theirs")
    (tmp_path / ".secret.part").symlink_to(victim)
    write_whole(secret, b"ours", mode=0o600)
    assert victim.read_bytes() == b"theirs"
    assert secret.read_bytes() == b"ours"
    assert not secret.is_symlink()
    assert secret.stat().st_mode & 0o777 == 0o600


def test_what_a_crash_left_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / ".file.part").write_bytes(b"longer than what comes")
    (tmp_path / ".file.part").chmod(0o666)
    write_whole(tmp_path / "file", b"new", mode=0o600)
    assert (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
