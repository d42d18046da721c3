"""The whole configuration as one typed tree. Reading files and flags is cluster's; this is pure.

Unknown fields are refused and the error names the path, e.g. `decode.max_batch`. Sizes that are None are chosen from
the machine when the cluster starts.
"""

from __future__ import annotations

import ipaddress
from typing import Any, Literal

import msgspec

from pd_core.errors import ConfigError

LOCAL_CHUNK_TOKENS = 64
"""Prompt tokens in a decode step beside prefill workers: running streams hardly notice so few."""


MAX_KV_CONNECTIONS = 64
"""That one pool takes from its writers over one path; each has a thread."""


class FakeEngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Artificial times of the fake engine (`model.path: fake`), so that tests can meet a request in any phase.

    step_s: each engine step takes this long; token_s: and this for every prompt token in it
    """

    step_s: float = 0.0
    token_s: float = 0.0
    context_tokens: int = 512


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """path: a Hugging Face folder, a GGUF file, "fake", or None for the embedded SmolLM2-135M-Instruct.

    kernels: "native" (C++), "sdpa" or "tiled" (torch); "auto" is native where machine and model allow it
    device:  where weights and KV lie and steps run; on "cuda" the kernels are torch's
    weights: "dtype" multiplies with weights of `dtype`; "int8" keeps them in 8 bits and a scale a row (native kernels)
    """

    path: str | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    kernels: Literal["auto", "native", "sdpa", "tiled"] = "auto"
    device: Literal["cpu", "cuda"] = "cpu"
    weights: Literal["dtype", "int8"] = "dtype"
    fake: FakeEngineConfig = FakeEngineConfig()


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """max_queue: requests that may wait for a turn; one more is refused with 429.

    queue_timeout_s:   a request that had no turn by then is refused with 429
    request_timeout_s: the whole of a request, queue to last token
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_queue: int = 64
    queue_timeout_s: float = 60.0
    request_timeout_s: float = 600.0
    max_body_bytes: int = 4 << 20


class PrefillConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """num_workers: 0 has the decode workers compute prompts too, chunks of them mixed into decode steps.

    chunk_tokens: most prompt tokens of one engine step, a multiple of 16 up to 512; short prompts share a step
    max_running:  prompts in the worker at once
    ageing_tokens_per_s: a prompt that waits counts as so many tokens shorter for every second of it: shorter ones go
                  first, and none waits for ever
    """

    num_workers: int = 1
    num_blocks: int | None = None
    chunk_tokens: int = 256
    max_running: int = 8
    ageing_tokens_per_s: float = 200.0
    num_threads: int | None = None


class DecodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """max_batch: sequences in one decode step; max_reserved: tickets that may be open at once.

    prompt_chunk_tokens: most prompt tokens that are mixed into one decode step (a prompt computed here, a preempted
                         sequence that goes on), a multiple of 16 up to 512; None is 64 beside prefill workers, and
                         prefill.chunk_tokens where there are none
    """

    num_workers: int = 1
    num_blocks: int | None = None
    max_batch: int = 16
    max_reserved: int = 16
    prompt_chunk_tokens: int | None = None
    num_threads: int | None = None


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """host: the one address that workers listen on and tell others, v4 or v6, or a name for it on each host

    lease_s: how long a writer may be silent
    push_timeout_s: how long one push may take, counted from when those before it have left the wire, and how long a
          receiver that has been sent everything may go without a block more or its verdict
    path: "auto" is the fastest that the two workers have: shared memory on one host, else RDMA, else TCP; a name
          allows it alone
    digests: whether every block is compared with its producer's digest when it arrives
    tcp_connections: between two workers; None is as many as measure fastest
    """

    host: str = "127.0.0.1"
    path: Literal["auto", "shm", "ucx", "tcp"] = "auto"
    lease_s: float = 3.0
    push_timeout_s: float = 10.0
    digests: bool = True
    tcp_connections: int | None = None


class TlsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """PEM files, at the same place on every host: what workers and router show each other, and who must have signed it.

    certificate: ours, with whatever lies between it and the authority; key: its private key
    authority:   signs every certificate of the cluster
    """

    certificate: str
    key: str
    authority: str


class HeartbeatConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker silent for suspect_s gets no new work; silent for dead_s it is dead: killed, fenced, started again."""

    interval_s: float = 0.5
    suspect_s: float = 2.0
    dead_s: float = 10.0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """tls: of the connections between router and workers; None leaves them readable on the network."""

    model: ModelConfig = ModelConfig()
    router: RouterConfig = RouterConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    transfer: TransferConfig = TransferConfig()
    heartbeat: HeartbeatConfig = HeartbeatConfig()
    tls: TlsConfig | None = None


def parse_config(tree: dict[str, Any]) -> Config:
    """The typed tree. Raises ConfigError whose `param` is the path of the wrong field."""
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        sentence, _, path = str(error).partition(" - at `$")
        raise ConfigError(f"{path.strip('`.') or 'config'}: {sentence}", param=path.strip("`.") or None) from error
    check_config(config)
    return config


def check_config(config: Config) -> None:
    """Raises ConfigError for values that no type can forbid; the sentence names the field and its limit."""
    limits: list[tuple[str, float, float, float]] = [
        ("model.fake.step_s", config.model.fake.step_s, 0.0, 60.0),
        ("model.fake.token_s", config.model.fake.token_s, 0.0, 60.0),
        ("model.fake.context_tokens", config.model.fake.context_tokens, 16, 1 << 20),
        ("router.port", config.router.port, 0, 65535),
        ("router.max_queue", config.router.max_queue, 0, 100_000),
        ("router.queue_timeout_s", config.router.queue_timeout_s, 0.01, 86_400.0),
        ("router.request_timeout_s", config.router.request_timeout_s, 0.01, 86_400.0),
        ("router.max_body_bytes", config.router.max_body_bytes, 1 << 10, 1 << 30),
        ("prefill.num_workers", config.prefill.num_workers, 0, 1024),
        ("prefill.chunk_tokens", config.prefill.chunk_tokens, 16, 512),
        ("prefill.max_running", config.prefill.max_running, 1, 1024),
        ("prefill.ageing_tokens_per_s", config.prefill.ageing_tokens_per_s, 0.0, 1e9),
        ("decode.num_workers", config.decode.num_workers, 1, 1024),
        ("decode.max_batch", config.decode.max_batch, 1, 1024),
        ("decode.max_reserved", config.decode.max_reserved, 1, 1024),
        ("transfer.lease_s", config.transfer.lease_s, 0.05, 60.0),
        ("transfer.push_timeout_s", config.transfer.push_timeout_s, 0.05, 600.0),
        ("heartbeat.interval_s", config.heartbeat.interval_s, 0.01, 60.0),
        ("heartbeat.suspect_s", config.heartbeat.suspect_s, config.heartbeat.interval_s, 600.0),
        ("heartbeat.dead_s", config.heartbeat.dead_s, config.heartbeat.suspect_s, 3600.0),
    ]
    optional: list[tuple[str, int | None, int]] = [
        ("prefill.num_blocks", config.prefill.num_blocks, 1 << 24),
        ("prefill.num_threads", config.prefill.num_threads, 1024),
        ("decode.num_blocks", config.decode.num_blocks, 1 << 24),
        ("decode.prompt_chunk_tokens", config.decode.prompt_chunk_tokens, 512),
        ("decode.num_threads", config.decode.num_threads, 1024),
        ("transfer.tcp_connections", config.transfer.tcp_connections, 16),
    ]
    limits += [(path, value, 1, high) for path, value, high in optional if value is not None]
    for path, number, low, high in limits:
        if not low <= number <= high:
            raise ConfigError(f"{path} is {number:g}; it must be between {low:g} and {high:g}", param=path)
    for path, chunk in (
        ("prefill.chunk_tokens", config.prefill.chunk_tokens),
        ("decode.prompt_chunk_tokens", config.decode.prompt_chunk_tokens or 16),
    ):
        if chunk % 16:
            raise ConfigError(f"{path} is {chunk}; it must be a multiple of 16", param=path)
    if config.model.weights == "int8" and (config.model.device != "cpu" or config.model.kernels in ("sdpa", "tiled")):
        raise ConfigError("model.weights int8 is of the native kernels alone", param="model.weights")
    _check_connections(config)
    check_advertised(config.transfer.host, "transfer.host")
    for field in config.tls.__struct_fields__ if config.tls is not None else ():
        path = getattr(config.tls, field)
        if not path.startswith("/"):  # every process has a folder of its own
            raise ConfigError(f"tls.{field} is {path!r}; it must be an absolute path", param=f"tls.{field}")
    if config.tls is not None and config.transfer.path == "ucx":
        raise ConfigError("tls is set, and transfer.path ucx cannot be encrypted", param="transfer.path")
    if config.model.device == "cuda" and config.model.kernels == "native":
        raise ConfigError("model.kernels native runs on the cpu alone", param="model.kernels")


def _check_connections(config: Config) -> None:
    num_workers, num_each = config.prefill.num_workers, 1
    if config.transfer.path in ("auto", "tcp"):
        num_each = config.transfer.tcp_connections or 1
    if num_workers * num_each > MAX_KV_CONNECTIONS:
        param = "prefill.num_workers" if num_each == 1 else "transfer.tcp_connections"
        raise ConfigError(
            f"{param}: {num_workers} prefill workers with {num_each} connections each are {num_workers * num_each}; a "
            f"decode worker takes {MAX_KV_CONNECTIONS}",
            param=param,
        )


def check_advertised(host: str, param: str) -> None:
    """Raises ConfigError for an address that others cannot be told; a name has to be looked up first."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return
    if address.is_unspecified:
        raise ConfigError(
            f"{param} is {host}, which stands for every address of a host; others have to be told one", param=param
        )
    if address.version == 6 and address.is_link_local:
        raise ConfigError(f"{param} is {host}, which means something else on every host and link", param=param)


def prompt_chunk_tokens(config: Config) -> int:
    """Most prompt tokens that a decode worker mixes into one of its steps."""
    if config.decode.prompt_chunk_tokens is not None:
        return config.decode.prompt_chunk_tokens
    return LOCAL_CHUNK_TOKENS if config.prefill.num_workers else config.prefill.chunk_tokens
