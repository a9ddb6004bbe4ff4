"""Extract the texts of the corpora: python training/fledgling/extract_texts.py --out data/fledgling/texts"""

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
    args = parser.parse_args()
    for name, count in lines.write_texts(args.out, args.packages).items():
        print(f"{name}: {count:,} lines")


if __name__ == "__main__":
    main()
