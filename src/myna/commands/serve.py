"""`myna serve`: voices over HTTP, in the contract of OpenAI's speech API."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from myna.commands import options as opt
from myna.commands.display import show
from myna.commands.options import PathLike, command, option
from myna.core.errors import ConfigError
from myna.text.lexicon import read_lexicon

if TYPE_CHECKING:
    from myna.serve.context import ServerSettings
    from myna.serve.messages import EngineInfo

ADDRESS, CAPACITY, RAY = "Address", "Capacity", "Ray"


@command("serve", example="myna serve runs/marta --port 8000")
def _(
    sources: Annotated[
        Sequence[str],
        option(
            "A run, an adapter or a model: folder or hub name. Several runs, each perhaps as NAME=RUN, are served "
            "together on their base model."
        ),
    ],
    *,
    model: opt.BaseModel = None,
    strength: opt.Strength = 1.0,
    quantization: opt.StoredWeights = "none",
    exact: Annotated[
        bool, option("Same bits alone and in a crowd, on a GPU too; somewhat slower.", panel="Model")
    ] = False,
    codec: opt.Codec = None,
    device: opt.Device = "auto",
    host: Annotated[
        str, option("Address to listen on; 0.0.0.0 is reachable from other machines.", panel=ADDRESS)
    ] = "127.0.0.1",
    port: Annotated[int, option("Port to listen on; 0 is any free one.", panel=ADDRESS, least=0, most=65535)] = 8000,
    allow_host: Annotated[
        Sequence[str], option("Name of a proxy in front, to which it answers too; repeatable.", panel=ADDRESS)
    ] = (),
    allow_origin: Annotated[
        Sequence[str],
        option(
            "Site whose pages may ask from browsers (CORS): https://app.example.com, or *; repeatable.", panel=ADDRESS
        ),
    ] = (),
    api_key: Annotated[
        str | None, option("Key that clients must send; better in MYNA_API_KEY.", env_var="MYNA_API_KEY", panel=ADDRESS)
    ] = None,
    no_api_key: Annotated[
        bool,
        option("Take requests of other machines without a key: something else checks who asks.", panel=ADDRESS),
    ] = False,
    drain_seconds: Annotated[
        float, option("Seconds that running requests get to end after SIGTERM.", panel=ADDRESS, least=0)
    ] = 30.0,
    streams: Annotated[
        int, option("Requests that are spoken at a time; others wait.", panel=CAPACITY, least=1, most=512)
    ] = 16,
    queue: Annotated[int, option("Requests that wait; more are refused (429).", panel=CAPACITY, least=0)] = 64,
    positions: Annotated[
        int, option("Longest stream: its reference, text and frames (25 a second) together.", panel=CAPACITY, least=256)
    ] = 2048,
    max_characters: Annotated[int, option("Longest text of a request.", panel=CAPACITY, least=1)] = 4096,
    allow_adapter_loading: Annotated[
        Sequence[PathLike],
        option("Folder below which adapters may be loaded and unloaded while the server runs; repeatable."),
    ] = (),
    adapter_rank: Annotated[int, option("Highest rank of adapters.", least=1)] = 64,
    lexicon: Annotated[
        PathLike | None, option("File of words and their spelling for the model, in any request.")
    ] = None,
    voices: Annotated[PathLike | None, option("Folder of stored voices, if not your own of `myna voice`.")] = None,
    asr: Annotated[
        str | None,
        option(
            "Whisper that checks consents, and hears references without a transcript; without one no voices are added."
        ),
    ] = None,
    watermark: Annotated[
        bool, option("Mark all speech. Speech without the mark is logged as such.", negative="--no-watermark")
    ] = True,
    ray: Annotated[
        str | None,
        option(
            "Serve on a Ray cluster: its address, auto for the one this machine belongs to, or local for this machine "
            "alone. All of its machines see the same folders.",
            panel=RAY,
        ),
    ] = None,
    replicas: Annotated[
        str,
        option(
            "Servers, each on a card of its own. 1-4 starts with one, and others while more than three quarters of "
            "--streams are in use.",
            panel=RAY,
        ),
    ] = "1",
    haproxy: Annotated[
        bool, option("HAProxy in front of the replicas (Linux), which adds least to first audio.", panel=RAY)
    ] = False,
) -> None:
    """Serve a voice over HTTP, in the contract of OpenAI's speech API, with a page to try it.

    `myna serve runs/marta` opens http://127.0.0.1:8000; programs use http://127.0.0.1:8000/v1 as their base URL.
    """
    try:
        from myna.serve.context import ServerSettings, resolve_sources
        from myna.serve.messages import EngineSettings
        from myna.serve.server import bind, run_server
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed, which serving needs", hint="pip install 'myna[serve]'"
        ) from error
    if ray is None and (haproxy or replicas != "1"):
        raise ConfigError("--replicas and --haproxy are for Ray", hint="add --ray auto, or --ray local")
    listener = bind(host, port)
    source, adapters = resolve_sources(list(sources), model, keep_adapters=bool(allow_adapter_loading))
    engine = EngineSettings(
        source=source,
        model=None if adapters else model,
        codec=codec,
        device=device,
        quantization=quantization,
        exact=exact,
        strength=strength,
        adapters=adapters,
        adapter_rank=adapter_rank if adapters or allow_adapter_loading else None,
        rows=streams,
        positions=positions,
        max_waiting=queue,
        watermark=watermark,
    )
    settings = ServerSettings(
        engine=engine,
        host=host,
        port=listener.getsockname()[1],
        api_key=api_key,
        no_api_key=no_api_key,
        max_characters=max_characters,
        adapter_folders=tuple(Path(one) for one in allow_adapter_loading),
        voices=Path(voices) if voices is not None else None,
        spellings=read_lexicon(Path(lexicon)) if lexicon is not None else {},
        asr=asr,
        drain_seconds=drain_seconds,
        allowed_hosts=tuple(allow_host),
        allowed_origins=tuple(one.rstrip("/") for one in allow_origin),
    )
    if ray is None:
        run_server(settings, listener, lambda info: _show_server(settings, info))
        return
    from myna.serve.ray_server import run_on_ray

    listener.close()
    tell = partial(_show_server, settings, replicas=replicas)
    run_on_ray(settings, ray, replicas, haproxy=haproxy, on_ready=tell)


def _show_server(settings: ServerSettings, info: EngineInfo, *, replicas: str = "") -> None:
    """Print what is served, where, and how to call it; on Ray, with how many replicas."""
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    address, engine = f"http://{host}:{settings.port}", settings.engine
    names = ", ".join((settings.model, *info.adapters))
    lines = [f"{names} on {info.device}{f', replicas: {replicas}' if replicas else ''}: {address}"]
    if settings.host not in ("127.0.0.1", "localhost", "::1"):
        key = "with your API key" if settings.api_key else "without a key: everybody who can reach it may speak"
        lines.append(f"it listens on {settings.host}, for other machines too, {key}")
    header = ' -H "Authorization: Bearer $MYNA_API_KEY"' if settings.api_key else ""
    if info.answers:
        lines.append(f"  curl {address}/v1/audio/assessments{header} -F file=@recording.wav")
    else:
        mark = f"marked ({info.watermark})" if info.watermark else "NOT marked as synthetic"
        each = " in each" if replicas else ""
        lines.append(f"{engine.rows} streams at a time{each}, {engine.max_waiting} more wait; speech is {mark}")
        body = f'{{"model": "{settings.model}", "voice": "default", "input": "Good morning."}}'
        key = "os.environ['MYNA_API_KEY']" if settings.api_key else "'none'"
        lines += [
            f"  curl {address}/v1/audio/speech{header} -H 'Content-Type: application/json' \\",
            f"    -d '{body}' -o morning.mp3",
            f"  OpenAI(base_url='{address}/v1', api_key={key}).audio.speech.create(",
            f"    model='{settings.model}', voice='default', input='Good morning.').write_to_file('morning.mp3')",
        ]
    show(*lines, f"Fields: {address}/docs; figures: {address}/metrics. Ctrl+C ends it.")
