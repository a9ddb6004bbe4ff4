"""Kokoro-82M as files that travel: weights in half precision, and the voices. They are for `carry.py`.

python training/fledgling/kokoro_files.py --out data/fledgling/kokoro
"""

from __future__ import annotations

import argparse
from pathlib import Path

from corpus_making import kokoro_weights
from corpus_making.kokoro import DEMO_VOICES, joined, packaged_styles
from myna.errors import MynaError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument(
        "--packages", type=Path, default=Path("data/fledgling/packages"), help="where archives are kept"
    )
    given = parser.parse_args()
    try:
        styles = {name: style for name, style in packaged_styles(given.packages).items() if name not in DEMO_VOICES}
        for file in kokoro_weights.write(joined(given.packages), styles, given.out):
            print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
