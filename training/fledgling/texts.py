"""Write down what the corpora read: python training/fledgling/texts.py --out data/fledgling/texts"""

from __future__ import annotations

import argparse
from pathlib import Path

from corpus_making import lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the lines")
    parser.add_argument(
        "--packages", type=Path, default=Path("data/fledgling/packages"), help="where archives are kept"
    )
    asked = parser.parse_args()
    for name, count in lines.make(asked.out, asked.packages).items():
        print(f"{name}: {count:,} lines")


if __name__ == "__main__":
    main()
