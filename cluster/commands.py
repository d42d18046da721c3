"""The commands of `kvrelay`. What takes time to import is imported when it is needed.

Exit status of `up`: 0 ended by Ctrl-C or SIGTERM and nothing is left; 1 it could not start or go on, or something
could not be ended; 2 the command, the config, the path of the model or the machine is not right; 130 ended at once by a
third Ctrl-C, or by one before anything was started.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import logging
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

import click
import platformdirs

from cluster.bench_command import bench
from cluster.config_file import load_config
from cluster.doctor_command import doctor
from pd_core.config import Config, RouterConfig
from pd_core.errors import ConfigError, KvrelayError

if TYPE_CHECKING:
    from cluster.launch import ClusterAddress

GRACE_S = 10.0
EXIT_FAILED = 1
EXIT_WRONG = 2
DEFAULTS = RouterConfig()
QUESTION = "Why is the sky blue?"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(importlib.metadata.version("kvrelay"), prog_name="kvrelay")
def kvrelay() -> None:
    """Serve a language model with prefill and decode on separate workers."""


@kvrelay.command()
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="YAML file; flags override it.")
@click.option("--host", help="Address of the HTTP server. [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port of the HTTP server; 0 takes any that is free. [default: 8000]")
@click.option("--model", "model_path", help="Hugging Face folder or GGUF file. [default: the embedded SmolLM2-135M]")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="[default: bfloat16]")
@click.option("--prefill", "num_prefill", type=int, help="Prefill workers; 0: decode workers do both. [default: 1]")
@click.option("--decode", "num_decode", type=int, help="Decode workers. [default: 1]")
@click.option(
    "--transfer", type=click.Choice(["auto", "shm", "ucx", "tcp"]), help="How KV moves. [default: auto, the fastest]"
)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="On cuda each worker has its own GPU. [default: cpu]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when ready, or for an error.")
def up(
    config_file: Path | None,
    host: str | None,
    port: int | None,
    model_path: str | None,
    dtype: str | None,
    num_prefill: int | None,
    num_decode: int | None,
    transfer: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Start a cluster on this machine and run it until Ctrl-C."""
    from cluster.preflight import check_all  # noqa: PLC0415
    from pd_model.folder import default_cache_dir  # noqa: PLC0415

    flags = {
        "router.host": host,
        "router.port": port,
        "model.path": model_path,
        "model.dtype": dtype,
        "model.device": device,
        "prefill.num_workers": num_prefill,
        "decode.num_workers": num_decode,
        "transfer.path": transfer,
    }
    try:
        config = load_config(config_file, flags)
        state_dir, cache_dir = make_state_dir(), default_cache_dir()
        check_all(config, state_dir)
        _run(config, state_dir, cache_dir, as_json)
    except KvrelayError as error:
        _fail(error, as_json)


@kvrelay.command()
@click.option("--url", default=f"http://{DEFAULTS.host}:{DEFAULTS.port}", show_default=True, help="Of the cluster.")
@click.option("--json", "as_json", is_flag=True, help="Print all that the router says, as one JSON object.")
def status(url: str, as_json: bool) -> None:
    """Show a map of a running cluster: workers, load, pools. Exit status 1 when no request would be served."""
    from cluster import status as cluster_map  # noqa: PLC0415

    try:
        body = cluster_map.read_status(url)
        known = cluster_map.parse_status(url, body)
    except KvrelayError as error:
        _fail(error, as_json)
    click.echo(cluster_map.as_json(url, body) if as_json else cluster_map.render(url, known), nl=False)
    raise SystemExit(0 if known.ready else EXIT_FAILED)


kvrelay.add_command(bench)
kvrelay.add_command(doctor)


def make_state_dir() -> Path:
    """The user's state folder of kvrelay, closed to everybody else. Raises ConfigError when that cannot be had."""
    folder = platformdirs.user_state_path("kvrelay")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"the state folder {folder} cannot be used: {error.strerror}") from error
    return folder


def _run(config: Config, state_dir: Path, cache_dir: Path, as_json: bool) -> None:
    from cluster.actors import real_actors  # noqa: PLC0415 - takes a second, and checks come first
    from cluster.log_files import LoggedStream  # noqa: PLC0415
    from cluster.progress import Progress  # noqa: PLC0415
    from cluster.up import Up  # noqa: PLC0415

    output = sys.stdout

    def on_lost(error: KvrelayError) -> None:
        _say(error, as_json, output)

    run = Up(config, actors=real_actors(), state_dir=state_dir, cache_dir=cache_dir, grace_s=GRACE_S, on_lost=on_lost)
    progress = Progress(sys.stderr, run.num_steps)

    def on_ready(address: ClusterAddress) -> None:
        output.write(ready_json(address) if as_json else ready_text(address))
        output.flush()

    with contextlib.redirect_stdout(LoggedStream(logging.getLogger("ray"))):
        asyncio.run(run.run(progress, on_ready))


def ready_text(address: ClusterAddress) -> str:
    """What a person sees: one line, and one to paste."""
    body = {
        "model": address.model_name,
        "stream": True,
        "max_tokens": 100,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    curl = ["curl", "-sSN", f"{address.url}/v1/chat/completions", "-H", "content-type: application/json"]
    curl += ["-d", json.dumps(body)]
    return (
        f"kvrelay is ready on {address.url}, serving {address.model_name}; Ctrl-C ends it. Try:\n{shlex.join(curl)}\n"
    )


def ready_json(address: ClusterAddress) -> str:
    """What a program sees, in one line."""
    workers = [{"name": worker.name, "role": worker.role, "pid": worker.pid} for worker in address.endpoints]
    return json.dumps({"event": "ready", "url": address.url, "model": address.model_name, "workers": workers}) + "\n"


def _fail(error: KvrelayError, as_json: bool) -> NoReturn:
    _say(error, as_json, sys.stdout)
    is_wrong = isinstance(error, ConfigError) or error.param is not None
    raise SystemExit(EXIT_WRONG if is_wrong else EXIT_FAILED)


def _say(error: KvrelayError, as_json: bool, output: TextIO) -> None:
    if as_json:
        line = {"event": "error", "code": error.code, "message": error.message, "param": error.param}
        output.write(json.dumps(line) + "\n")
        output.flush()
    click.echo(f"kvrelay: {error.message}", err=True)
