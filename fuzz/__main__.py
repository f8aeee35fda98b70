"""``python -m fuzz TARGET|all [-runs=N | -max_total_time=SECONDS | FILE ...]``.

Each target runs in a process of its own under libFuzzer (by way of atheris), which mutates valid
inputs and keeps those that reach lines of fpfl that none reached before. Options are libFuzzer's.
An input that a target fails on is kept under ``out/fuzz/``; give its path to run just that one.
"""

from __future__ import annotations

import io
import os
import re
import resource
import sys
import tempfile
import traceback
import warnings
from contextlib import redirect_stderr
from pathlib import Path

import atheris

# It names every module that it instruments, on stderr.
with redirect_stderr(io.StringIO()), atheris.instrument_imports(include=["fpfl", "tomllib"]):
    import torch

    from fuzz.targets import TARGETS

WORD = re.compile(rb"[A-Za-z_]{3,20}")
ODD = (
    b"nan",
    b"inf",
    b"null",
    b"true",
    b"-1",
    b"1e400",
    b"0.5",
    b"[]",
    b"{}",
    b"99999999999999999999",
)
"""Words to mutate with, besides those of the seeds."""
FOUND = Path("out") / "fuzz"
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where files are written over and over: in memory, where the system has such a folder."""
ROOM = 4 * 2**30
"""Bytes of address space that a target may take on top of what is there at its start: whatever
believes a number in a damaged header runs out of memory."""


def main(arguments: list[str]) -> int:
    """Run one target or all; the status says whether any of them failed."""
    wanted, *options = arguments or ["all"]
    names = list(TARGETS) if wanted == "all" else [wanted]
    if wanted != "all" and wanted not in TARGETS:
        print(f"there is no target {wanted!r}; give all, {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    FOUND.mkdir(parents=True, exist_ok=True)
    return max([in_a_process(name, options) for name in names])


def in_a_process(name: str, options: list[str]) -> int:
    """Fuzz in a fork of this process, which has imported everything and computed nothing."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch:
        log = Path(scratch) / "log"
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                file = os.open(log, os.O_WRONLY | os.O_CREAT)
                os.dup2(file, 1)
                os.dup2(file, 2)
                fuzz(name, options, Path(scratch))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(3)  # libFuzzer ends the process itself; whoever comes here did not run
        _, status = os.waitpid(child, 0)
        said = log.read_text(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    done = re.search(r"Done (\d+) runs in (\d+) second", said)
    given = re.findall(r"^Executed (.+) in \d+ ms$", said, re.M)  # single inputs
    if code or not (done or given):
        print(f"{name}: FAILED (status {code})\n{said[-8000:]}", flush=True)
        return 1
    told = f"{', '.join(given)}: as expected"
    if done:
        reached = re.findall(r"cov: (\d+)", said)[-1:]
        told = ", ".join(
            [f"{int(done[1]):,} runs in {done[2]} s", *(f"{n} branches" for n in reached)]
        )
    print(f"{name}: {told}", flush=True)
    return 0


def fuzz(name: str, options: list[str], scratch: Path) -> None:
    """Hand a target to libFuzzer, which ends the process."""
    target = TARGETS[name]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    work, corpus = scratch / "work", scratch / "corpus"
    work.mkdir()
    command = [f"fuzz {name}", f"-artifact_prefix={FOUND}/{name}-", "-timeout=20", *options]
    if not any(not option.startswith("-") for option in options):
        corpus.mkdir()
        seeds = list(target.seeds(work))
        for number, seed in enumerate(seeds):
            (corpus / f"seed-{number}").write_bytes(seed)
        words = sorted({word for seed in seeds for word in WORD.findall(seed)} | set(ODD))
        lines = [f'"{word.decode()}"\n' for word in words]
        (scratch / "words").write_text("".join(lines), encoding="ascii")
        command += ["-max_len=4096", f"-dict={scratch / 'words'}", str(corpus)]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    atheris.Setup(command, lambda data: target.run(work, data))
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
