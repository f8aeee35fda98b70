"""Append-only chains: whatever is done to the file in between is seen, and a torn end is kept."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpfl.store import FORMAT, BusyError, Chain, ChainError
from fpfl.store import lines as lines_module

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chain.jsonl"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    """A chain of seven records, one of them the mending of a torn line in their middle."""
    path = tmp_path_factory.mktemp("good") / "chain.jsonl"
    with Chain.create(path, name="x") as chain:
        looks_like_one = {"n": 1, "time": "2030-01-31T12:00:00.000000Z", "kind": ""}
        chain.append("charge", round=0, nested=looks_like_one)
        chain.append("charge", round=1, text="line\nend, ü and \u2028")
    with path.open("ab") as file:
        file.write(b'{"n":3,"time":"20')
    with Chain.open(path) as chain:
        for number in range(3):
            chain.append("charge", round=number)
    return path.read_bytes()


def opened(path: Path, content: bytes, write: bool = False) -> Chain:
    path.write_bytes(content)
    with Chain.open(path, write) as chain:
        return chain


def refused(path: Path, content: bytes, match: str = "line") -> None:
    """Reading and opening for writing both refuse the file, and leave it as it is."""
    for write in (False, True):
        with pytest.raises(ChainError, match=match) as caught:
            opened(path, content, write)
        assert str(path) in str(caught.value)
        assert path.read_bytes() == content


def test_what_is_written(path):
    with Chain.create(path, name="x") as chain:
        first = chain.records[0]
        second = chain.append("charge", round=3, values=(1, 2.5))
        assert chain.head == (1, sha256(path.read_bytes().split(b"\n")[1]).hexdigest())
    assert path.stat().st_mode & 0o777 == 0o600
    raw = path.read_bytes()
    assert raw.endswith(b"\n")
    lines = raw.split(b"\n")[:-1]
    assert [json.loads(line) for line in lines] == [first, second]
    assert list(first) == ["n", "time", "kind", "format", "name", "previous"]
    assert (first["n"], first["kind"], first["format"]) == (0, "open", FORMAT)
    assert first["previous"] == "0" * 64
    assert second["previous"] == sha256(lines[0]).hexdigest()
    assert second["values"] == [1, 2.5]  # as it will be read
    assert first["time"] <= second["time"]
    now = datetime.now(UTC)
    assert abs(datetime.fromisoformat(second["time"]) - now) < timedelta(minutes=1)
    with Chain.open(path) as again:
        assert again.records == [first, second]
        assert again.torn is None
    assert path.read_bytes() == raw


@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.text(min_size=1, max_size=6), VALUES, max_size=3), max_size=6))
def test_what_goes_in_comes_out(tmp_path_factory, contents):
    path = tmp_path_factory.mktemp("any") / "chain"
    names = {"n", "time", "kind", "previous"}
    contents = [{k: v for k, v in fields.items() if k not in names} for fields in contents]
    with Chain.create(path) as chain:
        for fields in contents:
            chain.append("any", **fields)
        written = chain.records
    with Chain.open(path) as chain:
        assert chain.records == written
        assert [{k: v for k, v in r.items() if k not in names} for r in written[1:]] == contents


def test_a_file_is_never_begun_anew(path):
    Chain.create(path).close()
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        Chain.create(path)
    assert path.read_bytes() == before
    with pytest.raises(FileNotFoundError):
        Chain.open(path.with_name("other"))


def test_a_failed_beginning_leaves_nothing(path):
    with pytest.raises(ValueError, match="JSON"):
        Chain.create(path, name=object())
    assert not path.exists()
    with pytest.raises(ValueError, match="'format'"):
        Chain.create(path, format=2)
    assert not path.exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}])
def test_only_json_is_written(path, value):
    with Chain.create(path) as chain:
        before = path.read_bytes()
        with pytest.raises(ValueError, match="JSON"):
            chain.append("charge", value=value)
        assert path.read_bytes() == before
        chain.append("charge", value=1)
    Chain.open(path).close()


@pytest.mark.parametrize("name", ["n", "time", "kind", "previous"])
def test_names_of_the_envelope_are_taken(path, name):
    with Chain.create(path) as chain:
        with pytest.raises(ValueError, match=repr(name)):
            chain.append("charge", **{name: 1})
        for kind in ("open", "torn"):
            with pytest.raises(ValueError, match="chain's own"):
                chain.append(kind)


# --- Damage -------------------------------------------------------------------------------------


def test_every_line_is_vouched_for(path, good):
    """One byte of every line but the last, where it hurts: a digit of its time."""
    lines = good.split(b"\n")[:-1]
    for number, line in enumerate(lines[:-1]):
        place = line.index(b'"20') + 2
        changed = [*lines]
        changed[number] = line[:place] + b"1" + line[place + 1 :]
        refused(path, b"\n".join(changed) + b"\n")


@settings(max_examples=300)
@given(data=st.data())
def test_any_changed_byte_before_the_last_line_is_seen(tmp_path_factory, good, data):
    path = tmp_path_factory.getbasetemp() / "changed"
    end = good.rindex(b"\n", 0, -1) + 1
    place = data.draw(st.integers(0, end - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != good[place]))
    refused(path, good[:place] + bytes([byte]) + good[place + 1 :], "line|newer")


def test_every_newline_counts(path, good):
    for place in [i for i, byte in enumerate(good[:-1]) if byte == 10]:
        for byte in (b" ", b"\r", b"x", b"\0"):
            refused(path, good[:place] + byte + good[place + 1 :])


@settings(max_examples=100)
@given(data=st.data())
def test_lines_removed_repeated_or_swapped_are_seen(tmp_path_factory, good, data):
    path = tmp_path_factory.getbasetemp() / "moved"
    lines = good.split(b"\n")[:-1]
    here = data.draw(st.integers(0, len(lines) - 2))
    there = data.draw(st.integers(here + 1, len(lines) - 1))
    removed = lines[:here] + lines[here + 1 :]
    repeated = [*lines[: here + 1], lines[here], *lines[here + 1 :]]
    moved = [*lines[:there], lines[here], *lines[there:]]
    swapped = [*lines]
    swapped[here], swapped[there] = lines[there], lines[here]
    for changed in (removed, repeated, moved, swapped):
        refused(path, b"\n".join(changed) + b"\n")


def test_a_repeated_last_line_is_seen(path, good):
    refused(path, good + good.split(b"\n")[-2] + b"\n", "has number")


def test_cut_anywhere(path, good):
    """A cut is a torn end, or a shorter chain with another head; in line 1, nothing is left."""
    lines = good.split(b"\n")[:-1]
    whole = Chain.open
    heads = set()
    for size in range(len(good)):
        content = good[:size]
        if size <= len(lines[0]):
            refused(path, content, "line 1: there is no complete first record")
            continue
        path.write_bytes(content)
        with whole(path, write=False) as chain:
            rest = content[content.rindex(b"\n") + 1 :]
            if chain.torn is None:
                assert not rest
                heads.add(chain.head)
            else:
                assert chain.torn.endswith(rest)
                assert content.endswith(chain.torn)
        assert path.read_bytes() == content
    full = opened(path, good)
    assert full.head not in heads
    assert len(heads) == len(full.records) - 1


def test_garbage_after_a_mending_that_was_cut_short(path, good):
    torn = good.index(b'{"n":3,"time":"20\n') + len(b'{"n":3,"time":"20\n')
    for garbage in (b"{}", b"[]", b"\n", b"\n\n{}", b'{"n":4}', b"\0\0"):
        chain = opened(path, good[:torn] + garbage, write=True)
        assert chain.records[-1]["lines"] == 1 + len(garbage.removesuffix(b"\n").split(b"\n"))
        assert opened(path, path.read_bytes()).head == chain.head


@settings(max_examples=150)
@given(data=st.data())
def test_a_torn_end_is_kept_and_told(tmp_path_factory, good, data):
    """Cut, go on, cut the mending itself, go on: nothing is removed, everything stays readable."""
    path = tmp_path_factory.getbasetemp() / "torn"
    first = good.index(b"\n") + 1
    content = good[: data.draw(st.integers(first, len(good)))]
    content += data.draw(st.sampled_from([b"", b"", b"\0" * 9, b"5", b"[]", b"\xff\xfe", b'"']))
    for _ in range(data.draw(st.integers(1, 3))):
        torn = opened(path, content).torn
        chain = opened(path, content, write=True)
        mended = path.read_bytes()
        assert mended.startswith(content)
        assert (mended == content) == (torn is None)
        last = chain.records[-1]
        if torn is not None:
            assert last["kind"] == "torn"
            parts = torn.removesuffix(b"\n").split(b"\n")
            assert last["lines"] in (len(parts), 0)
            tail = torn.removesuffix(b"\n") if last["lines"] else parts[-1]
            assert last["previous"] == sha256(tail).hexdigest()
        assert last["n"] == mended.count(b"\n") - 1  # a torn line takes a number
        again = opened(path, mended)
        assert again.torn is None
        assert again.records == chain.records
        assert again.head == chain.head
        content = mended[: data.draw(st.integers(len(content), len(mended)))]


def test_a_whole_line_without_its_newline_stays_a_record(path, good):
    chain = opened(path, good[:-1])
    assert chain.torn == good.split(b"\n")[-2]
    assert len(chain.records) == 6
    chain = opened(path, good[:-1], write=True)
    assert [record["kind"] for record in chain.records[-2:]] == ["charge", "torn"]
    assert chain.records[-1]["lines"] == 0


def test_a_torn_line_in_the_middle_needs_its_record(path, good):
    lines = good.split(b"\n")[:-1]
    torn = next(i for i, line in enumerate(lines) if b'"torn"' in line)
    assert json.loads(lines[torn])["lines"] == 1
    garbled = [*lines]
    garbled[torn - 1] = b'{"n":3,"time":"21'
    refused(path, b"\n".join(garbled) + b"\n", "line 4: it is not a JSON object")


@pytest.mark.parametrize("content", [b"", b"\n", b"\0" * 50, b"[1]\n", b"{}\n", b'{"n":0}\n{}\n'])
def test_other_files_are_refused(path, content):
    refused(path, content, "line 1")


def rewritten(good: bytes, **changes) -> bytes:
    """The chain's first record with other fields, and no more."""
    return json.dumps(json.loads(good.split(b"\n")[0]) | changes).encode() + b"\n"


def test_a_newer_format_asks_for_an_upgrade(path, good):
    refused(path, rewritten(good, format=FORMAT + 1), "written by a newer fpfl .* upgrade")
    for other in (0, "1", None, True):
        refused(path, rewritten(good, format=other), "not the first record")


@pytest.mark.parametrize("time", ["2030-01-01", 5, None, "2030-99-01T00:00:00.000000Z"])
def test_times_look_like_times(path, good, time):
    refused(path, rewritten(good, time=time), "does not look like")


# --- The clock ----------------------------------------------------------------------------------


class SetClock(datetime):
    """A wall clock that the test sets."""

    ahead = timedelta()

    @classmethod
    def now(cls, tz=None):
        return datetime.now(tz) + cls.ahead


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(lines_module, "datetime", SetClock)
    yield SetClock
    SetClock.ahead = timedelta()


def test_a_clock_set_back_is_refused(path, clock):
    with Chain.create(path) as chain:
        last = chain.records[-1]["time"]
    clock.ahead = -timedelta(seconds=90)
    before = path.read_bytes()
    with pytest.raises(ChainError, match="the clock was set back") as caught:
        Chain.open(path)
    assert last in str(caught.value)
    assert path.read_bytes() == before
    Chain.open(path, write=False).close()  # looking is fine


def test_a_clock_a_little_behind_never_runs_back(path, clock):
    with Chain.create(path) as chain:
        last = chain.records[-1]["time"]
    clock.ahead = -timedelta(seconds=30)
    with Chain.open(path) as chain:
        assert chain.append("late")["time"] == last
    with Chain.open(path) as chain:
        clock.ahead = timedelta(hours=-5)  # while it is open, the wall clock does not matter
        times = [record["time"] for record in [*chain.records, chain.append("later")]]
        assert times == sorted(times)


def test_times_that_run_back_are_refused(path):
    with Chain.create(path) as chain:
        chain.append("charge")
    first, second = path.read_bytes().split(b"\n")[:-1]
    earlier = second.replace(json.loads(second)["time"].encode(), b"2001-01-01T00:00:00.000000Z")
    refused(path, first + b"\n" + earlier + b"\n", "line 2: its time 2001")


# --- Disks that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [0, 1, 40])
def test_a_short_write_ends_the_chain(path, monkeypatch, taken):
    chain = Chain.create(path)
    chain.append("charge", round=0)
    before, write = path.read_bytes(), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, piece: write(fd, piece[:taken]))
        with pytest.raises(OSError, match=r"its last line is torn .*open it again") as caught:
            chain.append("charge", round=1)
    assert caught.value.filename == str(path)
    for _ in range(2):
        with pytest.raises(OSError, match="What is on disk is unknown"):
            chain.append("charge", round=1)
    with pytest.raises(OSError, match="What is on disk is unknown"), chain.shared():
        pass
    assert len(path.read_bytes()) == len(before) + taken
    assert len(chain.records) == 2
    chain.close()
    with Chain.open(path) as again:
        assert (again.records[-1]["kind"] == "torn") == (taken > 0)
        again.append("charge", round=1)


def test_a_failed_write_or_sync_ends_the_chain(path, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    for name in ("write", "fdatasync"):
        chain = Chain.open(path) if path.exists() else Chain.create(path)
        if name == "fdatasync":
            chain.append("charge")
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail, raising=False)
            with pytest.raises(OSError, match="Input/output error"):
                chain.append("charge") if name == "write" else chain.sync()
        with pytest.raises(OSError, match="What is on disk is unknown"):
            chain.append("charge")
        if name == "fdatasync":
            with pytest.raises(OSError, match="What is on disk is unknown"):
                chain.sync()
        chain.close()


def test_sync_from_another_thread(path):
    with Chain.create(path) as chain:
        stop = threading.Event()

        def keep_syncing():
            while not stop.is_set():
                chain.sync()

        thread = threading.Thread(target=keep_syncing)
        thread.start()
        for number in range(300):
            chain.append("charge", round=number)
        stop.set()
        thread.join()
    chain.sync()  # closed: nothing to do
    assert len(Chain.open(path, write=False).records) == 301


# --- Several at a time --------------------------------------------------------------------------


def test_looking_writes_nothing(path, good):
    path.write_bytes(good + b'{"n":')
    path.chmod(0o400)
    with Chain.open(path, write=False) as chain:
        assert chain.torn == b'{"n":'
        for attempt in (lambda: chain.append("charge"), lambda: shared_append(chain)):
            with pytest.raises(ValueError, match="opened to look"):
                attempt()
    assert path.read_bytes() == good + b'{"n":'


def shared_append(chain: Chain) -> None:
    with chain.shared():
        chain.append("charge")


def test_a_closed_chain_says_so(path):
    chain = Chain.create(path)
    chain.close()
    chain.close()
    with pytest.raises(ValueError, match="is closed"):
        chain.append("charge")


def test_a_locked_file_is_busy(path, monkeypatch):
    monkeypatch.setattr("fpfl.store.chain._PATIENCE", 0.05)
    Chain.create(path).close()
    with Chain.open(path, lock=True) as chain:
        chain.lock()  # twice is fine
        for how in ({"lock": True}, {}):
            with pytest.raises(BusyError, match="another process is using this file") as caught:
                Chain.open(path, **how)
            assert caught.value.filename == str(path)
        with chain.shared() as new:
            chain.append("charge")
        assert new == []
        with pytest.raises(BusyError):  # it is still held
            Chain.open(path, lock=True)
        assert len(Chain.open(path, write=False).records) == 2
    with Chain.create(path.with_name("other")) as made:
        made.lock()
        with pytest.raises(BusyError):
            Chain.open(made.path, lock=True)
    Chain.open(path, lock=True).close()


def test_without_locks_writing_says_why(path, monkeypatch):
    Chain.create(path).close()
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(OSError, match="no file locks that fpfl knows"):
        Chain.open(path)
    assert len(Chain.open(path, write=False).records) == 1


def test_shared_reads_what_others_wrote(path):
    one = Chain.create(path)
    two = Chain.open(path)
    with one.shared():
        one.append("charge", who=1)
    assert two.changed()
    with pytest.raises(ChainError, match="somebody else wrote"):
        two.append("charge", who=2)
    with two.shared() as new:
        assert [record["who"] for record in new] == [1]
        with two.shared() as again:  # inside each other is fine
            assert again == []
        two.append("charge", who=2)
        with pytest.raises(ValueError, match="for a moment only"):
            two.lock()
    assert not two.changed()
    look = Chain.open(path, write=False)
    with one.shared() as new:
        assert [record["who"] for record in new] == [2]
        one.append("charge", who=1)
    with look.shared() as new:
        assert [record["who"] for record in new] == [1]
    assert [record["n"] for record in look.records] == list(range(4))
    assert one.head == look.head


def test_shared_sees_a_cut_an_edit_and_a_torn_line(path):
    chain = Chain.create(path)
    for number in range(3):
        chain.append("charge", round=number)
    content = path.read_bytes()

    def change(new: bytes) -> None:  # in place: it is still the same file
        with path.open("r+b") as file:
            file.write(new)
            file.truncate()

    change(content + b'{"n":4,"ti')
    with chain.shared() as new:
        assert [(r["n"], r["kind"], r["lines"]) for r in new] == [(5, "torn", 1)]
    change(path.read_bytes() + b'{"n":6}\n')
    with pytest.raises(ChainError, match="line 7: its hash"), chain.shared():
        pass
    change(content)
    with pytest.raises(ChainError, match="it was cut"), chain.shared():
        pass
    path.unlink()
    for attempt in (lambda: chain.append("charge"), lambda: shared_append(chain)):
        with pytest.raises(ChainError, match="removed or replaced"):
            attempt()


def test_a_fork_has_to_open_the_file_itself(path, monkeypatch):
    chain = Chain.create(path)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(ChainError, match="Open the file in every process"):
        chain.append("charge")


def append_many(path: Path, who: int, count: int) -> None:
    with Chain.open(path) as chain:
        for number in range(count):
            with chain.shared():
                chain.append("charge", who=who, number=number)


def test_two_processes_share_a_file(path):
    Chain.create(path).close()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=append_many, args=(path, who, 200)) for who in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    records = Chain.open(path, write=False).records
    assert len(records) == 401
    for who in (0, 1):
        numbers = [r["number"] for r in records if r["kind"] == "charge" and r["who"] == who]
        assert numbers == list(range(200))
