"""The bars and the tables: what the measurements must reach, and how they are shown."""

from __future__ import annotations

from statistics import median
from typing import Any

Row = dict[str, Any]


def ratios(speeds: list[Row], scaling: dict[str, Any]) -> list[Row]:
    """Every ratio that has a bar on this machine, and whether it is reached."""
    found: list[Row] = []

    def judge(name: str, value: float, bar: float, *, at_least: bool = True) -> None:
        reached = value >= bar if at_least else value <= bar
        found.append(
            {"name": name, "value": value, "bar": bar, "at_least": at_least, "reached": reached}
        )

    rate = {(r["workload"], r["vector"], r["who"]): r["rounds_per_second"] for r in speeds}
    own = rate["adult", "paper", "fpfl"]
    for who, bar in (("pfl-research", 50), ("Flower simulation", 1500)):
        if ("adult", "paper", who) in rate:
            name = f"rounds/s against {who}, Adult, the paper's vector"
            judge(name, own / rate["adult", "paper", who], bar)
    times = scaling["populations"]
    small, large = times["10000"], times["10000000"]
    judge("round time, 10⁷ users against 10⁴", large / small, 1.15, at_least=False)
    added = {cohort: m["peak_mib"] - m["before_mib"] for cohort, m in scaling["memory"].items()}
    name = "peak memory beside the data, cohort 10,000 against 100"
    judge(name, added["10000"] / added["100"], 1.15, at_least=False)
    for name, share in scaling["packing"].items():
        judge(f"samples of the rows computed: {name}", share, 0.8)
    both = scaling["ranks"]
    judge("two processes against one, CNN", both["2 processes"] / both["1 processes"], 1.6)
    return found


def gpu_ratios(gpu: dict[str, Any]) -> list[Row]:
    """The GPU's ratios, judged likewise."""
    bars = {"one": 1.25, "paper": 2.5}
    return [
        {"name": f"{vector}, {row['users']:,} users × 100, {row['precision']}",
         "value": row["ratio"][vector], "bar": bar, "at_least": False,
         "reached": row["ratio"][vector] <= bar}
        for row in gpu["rows"]
        for vector, bar in bars.items()
    ]  # fmt: skip


def markdown(results: dict[str, Any], gpu: dict[str, Any] | None) -> str:
    """All of it for people."""
    parts = ["# Speed", "", provenance(results["about"]), "", speed_table(results["speeds"]), ""]
    parts += ["## What has to be reached", "", ratio_table(results["ratios"]), ""]
    parts += ["## Scaling", "", provenance(results["about_scaling"]), ""]
    parts += [scaling_table(results["scaling"]), ""]
    if gpu is not None:
        parts += ["## On a GPU", "", provenance(gpu["about"]), "", gpu_table(gpu), ""]
        parts += [ratio_table(gpu_ratios(gpu)), ""]
    return "\n".join(parts)


def speed_table(speeds: list[Row]) -> str:
    """Rounds/s, users/s, memory, and the ratio to the plain batch."""
    lines = ["| workload | vector | who | rounds/s | users/s | peak MiB | plain batch = 1 |",
             "| --- | --- | --- | ---: | ---: | ---: | ---: |"]  # fmt: skip
    floor = {(r["workload"], r["vector"]): r["rounds_per_second"]
             for r in speeds if r["who"] == "plain batch"}  # fmt: skip
    for row in speeds:
        part = row["rounds_per_second"] / floor[row["workload"], row["vector"]]
        lines.append(
            f"| {row['workload']} | {row['vector']} | {row['who']} | "
            f"{_number(row['rounds_per_second'])} | {row['users_per_second']:,.0f} | "
            f"{row['peak_memory_mib']:,.0f} | {_number(part)} |"
        )
    return "\n".join(lines)


def ratio_table(found: list[Row]) -> str:
    """Ratios and bars."""
    lines = ["| ratio | measured | bar | |", "| --- | ---: | ---: | --- |"]
    for row in found:
        sign = "≥" if row["at_least"] else "≤"
        verdict = "reached" if row["reached"] else "**missed**"
        value = f"{row['value']:,.0f}" if row["value"] >= 10 else f"{row['value']:.2f}"
        lines.append(f"| {row['name']} | {value} | {sign} {row['bar']:,g} | {verdict} |")
    return "\n".join(lines)


def scaling_table(scaling: dict[str, Any]) -> str:
    """Population, memory and processes."""
    lines = ["| what | measured |", "| --- | ---: |"]
    for users, time in scaling["populations"].items():
        lines.append(f"| a round of 1,000 users out of {_users(users)} | {time:.2f} ms |")
    for cohort, memory in scaling["memory"].items():
        lines.append(
            f"| peak memory beside the data, cohort of {int(cohort):,}, budget 64 MiB | "
            f"{memory['peak_mib'] - memory['before_mib']:,.0f} MiB |"
        )
    for name, speed in scaling["ranks"].items():
        lines.append(f"| CNN, {name.replace('1 processes', '1 process')} | {speed:.2f} rounds/s |")
    return "\n".join(lines)


def gpu_table(gpu: dict[str, Any]) -> str:
    """Milliseconds of a round."""
    lines = ["| users × samples | precision | plain batch | one gradient | the paper's vector |",
             "| --- | --- | ---: | ---: | ---: |"]  # fmt: skip
    for row in gpu["rows"]:
        times, ratio = row["milliseconds"], row["ratio"]
        lines.append(
            f"| {row['users']:,} × 100 | {row['precision']} | {times['plain']:.2f} ms | "
            f"{times['one']:.2f} ms ({ratio['one']:.2f}×) | "
            f"{times['paper']:.2f} ms ({ratio['paper']:.2f}×) |"
        )
    return "\n".join(lines)


def agreement_table(gpu: dict[str, Any]) -> str:
    """How far the GPU's clipped sums are from the CPU's in double precision."""
    kinds = ("float64", "float32", "tf32", "bf16")
    lines = ["| model | " + " | ".join(kinds) + " |", "| --- |" + " ---: |" * len(kinds)]
    models = dict.fromkeys(name.split(", ")[0] for name in gpu["agreement"])
    for model in models:
        values = [f"{gpu['agreement'][f'{model}, {kind}']:.0e}" for kind in kinds]
        lines.append(f"| {model} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def journal_table(found: dict[str, Any]) -> str:
    """What a run folder costs."""
    lines = ["| workload | nothing is kept | run folder | ratio |",
             "| --- | ---: | ---: | ---: |"]  # fmt: skip
    for row in found["rows"]:
        without, kept = row["milliseconds"].values()
        low, high = min(row["ratios"]), max(row["ratios"])
        lines.append(
            f"| {row['workload']}, the paper's vector, {row['rounds']:,} rounds | "
            f"{without:.2f} ms | {kept:.2f} ms | {row['ratio']:.3f} ({low:.3f} to {high:.3f}) |"
        )
    lines += ["", f"One sync of this disk, alone: {found['sync_milliseconds']:.2f} ms."]
    return "\n".join(lines)


KERNELS = (
    ("convolution backward to the input (cuDNN)", ("dgrad", "nchwToNhwc", "nhwcToNchw")),
    ("products (cuBLAS)", ("gemm", "nvjet", "cutlass::Kernel2")),
    ("copies: patches, layouts, gather", ("elementwise_kernel<128, 2", "emcpy", "gather", "Cat")),
)


def profile_table(gpu: dict[str, Any]) -> str:
    """The GPU's time in one round of 100 users × 100 images, by kind of kernel."""
    names = list(gpu["profiles"])
    lines = ["| µs a round | " + " | ".join(names) + " |", "| --- |" + " ---: |" * len(names)]
    columns = []
    for name in names:
        total, *kernels = gpu["profiles"][name]
        sums = {label: 0.0 for label, _ in KERNELS}
        for kernel in kernels:
            for label, words in KERNELS:
                if any(word in kernel["kernel"] for word in words):
                    sums[label] += kernel["microseconds"]
                    break
        rest = total["microseconds"] - sum(sums.values())
        columns.append(
            {**sums, "everything else": rest, "all": total["microseconds"],
             "kernels started": total["calls"]}
        )  # fmt: skip
    lines += [
        f"| {label} | " + " | ".join(f"{column[label]:,.0f}" for column in columns) + " |"
        for label in columns[0]
    ]
    return "\n".join(lines)


def side_by_side_table(gpu: dict[str, Any]) -> str:
    """Seconds for several runs on one GPU, one after the other and at once."""
    lines = ["| processes | seconds |", "| ---: | ---: |"]
    lines += [f"| {n} | {s:.1f} |" for n, s in gpu["side_by_side_seconds"].items()]
    return "\n".join(lines)


def company_table(found: dict[str, Any]) -> str:
    """What it costs that a user's vector is its own: medians of both checkouts, and their ratio."""
    lines = ["| machine | round | before | now | ratio |", "| --- | --- | ---: | ---: | ---: |"]
    for device in ("cpu", "cuda"):
        about = found[f"price, {device}"]
        for case, row in about["cases"].items():
            now, before = (1e3 * median(row["seconds"][tree]) for tree in ("here", "against"))
            lines.append(
                f"| {about['hardware']} | {case} | {before:.2f} ms | {now:.2f} ms | "
                f"{row['ratio']:.2f} |"
            )
    said = [f"torch {about['torch']}, {about['turns']} turns, {about['date']}"
            for about in (found["price, cpu"], found["price, cuda"])]  # fmt: skip
    command = "python -m benchmarks.company --against CHECKOUT"
    return "\n".join([*lines, "", f"`{command}`: {'; '.join(said)}."])


def parts_table(found: dict[str, Any]) -> str:
    """Microseconds a round on a CPU, by part."""
    names = list(found["parts"])
    lines = ["| µs a round | " + " | ".join(names) + " |", "| --- |" + " ---: |" * len(names)]
    known = found["parts"][names[0]]
    first = ["the whole round", "a round of the federation"]  # which contain the others
    for part in [*first, *(part for part in known if part not in first)]:
        values = [found["parts"][name].get(part) for name in names]
        cells = ["–" if value is None else f"{value:,.0f}" for value in values]
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def provenance(about: dict[str, Any]) -> str:
    """Command, machine, versions and date."""
    return (
        f"`{about['command']}`, {about['date']}, {about['hardware']}, Python {about['python']}, "
        f"torch {about['torch']}, {about['wall_seconds']:.0f} s."
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _users(name: str) -> str:
    count, _, rest = name.partition(" ")
    return f"{int(count):,} {rest}".strip()


def sweeps_table(found: dict[str, Any]) -> str:
    """Trainings side by side, and one after the other."""
    lines = [
        "| trainings | rounds | processes | side by side | one after the other | ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    sources = []
    for name, each in found.items():
        for turn in each["turns"]:
            first = turn[0]
            what, _, rest = name.partition(", ")
            apart = [f"{other['seconds']:.1f} s" for other in turn[1:]] or ["–"]
            ratio = [f"{other['seconds'] / first['seconds']:.2f}" for other in turn[1:]] or ["–"]
            where = "H200" if rest.endswith("cuda") else "CPU"
            lines.append(
                f"| {first['runs']:,} of {'Adult' if what == 'adult' else 'the CNN'}, {where}"
                f"{', a process each' if first['runs'] == first['workers'] else ''} | "
                f"{first['rounds']:,} | {first['workers']} | {first['seconds']:.1f} s | "
                f"{apart[0]} | {ratio[0]} |"
            )
        sources.append(
            f"`{each['command']}`, {each['date']}, {each['hardware']}, Python {each['python']}, "
            f"torch {each['torch']}."
        )
    return "\n".join([*lines, "", *[f"- {source}" for source in sources]])
