"""`kvrelay bench`: measure, and say whether the targets are met.

Exit status: 0 every target was met; 1 one was missed, or a bench could not come to its end; 2 the command or the config
is not right; 130 ended by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cluster.config_file import load_config
from pd_core.errors import ConfigError, KvrelayError

if TYPE_CHECKING:
    from load_tests.lab import Bench, Lab
    from load_tests.report import Report
    from pd_core.config import Config

ALL = "all"
EXIT_MISSED = 1
EXIT_WRONG = 2
EXIT_STOPPED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)

_T = TypeVar("_T")


@click.command()
@click.argument("name", required=False)
@click.option("--list", "is_list", is_flag=True, help="Only say which benches there are.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object; of `all`, a list of them.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the JSON into this file too.")
@click.option("--rounds", type=click.IntRange(1, 1000), help="Alternating rounds. [default: the bench's own]")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="YAML file, as for `up`.")
@click.option("--model", "model_path", help="As for `up`. [default: the embedded SmolLM2-135M]")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="[default: bfloat16]")
@click.option(
    "--prototype",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of the kernel prototype, to compare the engine with. It is built with a compiler and ninja.",
)
def bench(
    name: str | None,
    is_list: bool,
    as_json: bool,
    output: Path | None,
    rounds: int | None,
    config_file: Path | None,
    model_path: str | None,
    dtype: str | None,
    prototype: Path | None,
) -> None:
    """Measure NAME, or `all`, with clusters of its own; the figures are explained in docs/benchmarks.md."""
    from load_tests.all_benches import all_benches  # noqa: PLC0415 - the command line starts faster without it

    benches = all_benches()
    if is_list:
        for found in benches.values():
            click.echo(f"{found.name:<10}{found.summary}")
        return
    try:
        chosen = _chosen(name, benches)
        config = load_config(config_file, {"model.path": model_path, "model.dtype": dtype})
        reports = _run_all(chosen, config, rounds, prototype, as_json)
    except KvrelayError as error:
        click.echo(f"kvrelay: {error.message}", err=True)
        raise SystemExit(EXIT_WRONG if isinstance(error, ConfigError) or error.param else EXIT_MISSED) from error
    _say(reports, name == ALL, as_json, output)
    raise SystemExit(0 if all(report.is_ok for report in reports) else EXIT_MISSED)


def _chosen(name: str | None, benches: dict[str, Bench]) -> list[Bench]:
    """Raises ConfigError naming the benches that there are."""
    if name == ALL:
        return list(benches.values())
    if name is None or name not in benches:
        what = "name a bench" if name is None else f"there is no bench {name!r}"
        raise ConfigError(f"{what}: {', '.join([*benches, ALL])}")
    return [benches[name]]


def _run_all(
    chosen: list[Bench], config: Config, rounds: int | None, prototype: Path | None, as_json: bool
) -> list[Report]:
    from load_tests.report_table import as_table  # noqa: PLC0415 - as above
    from load_tests.running import run_bench  # noqa: PLC0415

    reports = []
    for one in chosen:
        lab = make_lab(config, rounds or one.num_rounds, prototype)
        reports.append(_run_unless_stopped(run_bench(one, lab)))
        click.echo(as_table(reports[-1]), err=as_json)
    return reports


def make_lab(config: Config, num_rounds: int, prototype: Path | None) -> Lab:
    """A lab on this machine, with clusters started as `kvrelay up` does. Raises ModelError."""
    from cluster.bench_cluster import cluster_process  # noqa: PLC0415 - as above
    from cluster.machine import read_machine  # noqa: PLC0415
    from load_tests.lab import Lab  # noqa: PLC0415
    from load_tests.model_facts import read_shape, read_vocab_size  # noqa: PLC0415
    from pd_model.folder import default_cache_dir  # noqa: PLC0415

    cache_dir = default_cache_dir()
    return Lab(
        config=config,
        num_rounds=num_rounds,
        cores=read_machine().cores,
        vocab_size=read_vocab_size(config, cache_dir),
        shape=read_shape(config, cache_dir),
        cache_dir=cache_dir,
        prototype=prototype,
        clusters=cluster_process,
        progress=_progress(),
    )


def _progress() -> Callable[[str], None]:
    began_s = time.monotonic()

    def say(sentence: str) -> None:
        sys.stderr.write(f"bench [{time.monotonic() - began_s:6.1f} s] {sentence}\n")
        sys.stderr.flush()

    return say


def _run_unless_stopped(work: Coroutine[Any, Any, _T]) -> _T:
    """The first Ctrl-C or SIGTERM ends everything that the work has started, and then this process."""

    async def main() -> _T:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)
        for number in SIGNALS:
            loop.add_signal_handler(number, task.cancel)
        try:
            return await task
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise SystemExit(EXIT_STOPPED) from None


def _say(reports: list[Report], is_list: bool, as_json: bool, output: Path | None) -> None:
    from load_tests.report import to_json  # noqa: PLC0415 - as above

    text = to_json(reports if is_list else reports[0])
    if as_json:
        sys.stdout.write(text)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, "utf-8")
