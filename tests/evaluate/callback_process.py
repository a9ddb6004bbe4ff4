"""One of two processes for test_callback_processes.py: `python -m tests.evaluate.callback_process FOLDER PORT...`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from myna import train
from myna.core.errors import AudioError
from myna.train.distributed import ProcessInfo
from tests.evaluate.scripted_scorers import ScriptedScorers, scripted_scorers

SIMILARITY = {0: 0.5, 2: 0.8, 4: 0.7}


def main(folder: Path, ports: list[str]) -> None:
    place = ProcessInfo.from_environment()
    heard: dict[str, int | str] = {}
    for kind, port in zip(("lora", "full", "broken"), ports, strict=True):
        os.environ["MASTER_PORT"] = port
        with scripted_scorers(ScriptedScorers(folder, similarity=SIMILARITY, broken=kind == "broken")) as scorers:
            try:
                train(folder / f"{kind}.yaml", out=folder / f"{kind}-{place.world_size}")
                heard[kind] = len(scorers.spoken)
            except AudioError as error:
                heard[kind] = error.what
    (folder / f"heard-{place.rank}.json").write_text(json.dumps(heard))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
