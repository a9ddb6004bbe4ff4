"""Export of Kokoro-82M: fp16 weights and voices, for `pack_offline.py`.

python training/fledgling/export_kokoro.py --out data/fledgling/kokoro
"""

from __future__ import annotations

import argparse
from pathlib import Path

from corpus_making import kokoro_weights
from corpus_making.kokoro import DEMO_VOICES, joined_model, read_packaged_styles
from myna.core.errors import MynaError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument(
        "--packages", type=Path, default=Path("data/fledgling/packages"), help="where archives are kept"
    )
    args = parser.parse_args()
    try:
        styles = {name: style for name, style in read_packaged_styles(args.packages).items() if name not in DEMO_VOICES}
        for file in kokoro_weights.write(joined_model(args.packages), styles, args.out):
            print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
