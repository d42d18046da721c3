"""`kvrelay doctor`, the command."""

from __future__ import annotations

import json

import click

from pd_core.config import RouterConfig
from pd_core.errors import ConfigError, KvrelayError

DEFAULTS = RouterConfig()
EXIT_FAILED = 1
EXIT_WRONG = 2


@click.command()
@click.option("--url", default=f"http://{DEFAULTS.host}:{DEFAULTS.port}", show_default=True, help="Of the cluster.")
@click.option(
    "--blocks", "num_blocks", type=click.IntRange(1), default=16, show_default=True, help="KV blocks of one push."
)
@click.option(
    "--rounds", "num_rounds", type=click.IntRange(1, 100), default=5, show_default=True, help="Pushes over each path."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(url: str, num_blocks: int, num_rounds: int, as_json: bool) -> None:
    """Say how KV goes between every two workers, how fast, and what is wrong with it.

    Exit status 0 when all is well; 1 when no cluster was reached, or not all of it could be probed now; 2 when the
    command is not right; 3 when a pair of workers has no path, not the one that transfer.path asks for, or a worse one
    than it could have.
    """
    from cluster import diagnosis, doctor_report  # noqa: PLC0415 - the command line starts faster without it
    from cluster.doctor import examine  # noqa: PLC0415

    def on_progress(sentence: str) -> None:
        if not as_json:
            click.echo(sentence, err=True)

    try:
        found = examine(url, num_blocks, num_rounds, on_progress)
    except KvrelayError as error:
        click.echo(f"kvrelay: {error.message}", err=True)
        if as_json:
            line = {"event": "error", "code": error.code, "message": error.message, "param": error.param}
            click.echo(json.dumps(line))
        raise SystemExit(EXIT_WRONG if isinstance(error, ConfigError) else EXIT_FAILED) from error
    click.echo(doctor_report.as_json(found) if as_json else doctor_report.render(found), nl=False)
    raise SystemExit(diagnosis.verdict_of(diagnosis.problems(found)).value)
