"""Pool sizes, threads, cores and GPUs of every worker, from the config, the machine and the model. Pure.

Default pools are modest: room for four sequences of full context, or an equal share of half of the memory that is
left when every worker has its weights, whichever is less. Memory of a pool is taken from the machine only as blocks
are first used, so a default that is never filled costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pd_core.config import Config
from pd_core.errors import ConfigError
from pd_core.layout import BLOCK_TOKENS

Role = Literal["prefill", "decode"]

DEFAULT_CONTEXTS = 4
"""Sequences of full context that a default pool holds, memory permitting."""
MIN_DEFAULT_BLOCKS = 64
"""A pool below 1024 tokens is no sensible default; who wants one has to say so."""
WORKER_BYTES = 512 << 20
"""What a worker takes besides weights and pool: interpreter, libraries, scratch."""


class Machine(msgspec.Struct, frozen=True):
    """cores: ids that we may run on; available_bytes: memory that can be had without swapping."""

    cores: list[int]
    available_bytes: int


class ModelSize(msgspec.Struct, frozen=True):
    """name: what clients call the model; block_bytes: one KV block; weights_bytes: in one worker's memory."""

    name: str
    block_bytes: int
    weights_bytes: int
    context_tokens: int


class WorkerPlan(msgspec.Struct, frozen=True):
    """One worker to start.

    config:   the whole tree, with its own role's num_blocks and num_threads filled in
    num_gpus: how many it has for itself; Ray picks which, and shows the worker no others
    """

    name: str
    role: Role
    cores: list[int]
    num_gpus: int
    config: Config


def plan_workers(config: Config, machine: Machine, model: ModelSize) -> list[WorkerPlan]:
    """All workers of the cluster, prefill first. Raises ConfigError, naming the field, when memory does not suffice."""
    names = _names(config)
    config = fill_pool_sizes(config, machine, model)
    plans = []
    for (name, role), cores in zip(names, share_cores(machine.cores, len(names)), strict=True):
        section = config.prefill if role == "prefill" else config.decode
        threads = section.num_threads if section.num_threads is not None else len(cores)
        own = msgspec.structs.replace(config, **{role: msgspec.structs.replace(section, num_threads=threads)})
        plans.append(WorkerPlan(name, role, cores, gpus_for(config, 1), own))
    return plans


def num_workers_of(config: Config) -> int:
    """Of both roles."""
    return config.prefill.num_workers + config.decode.num_workers


def gpus_for(config: Config, num_workers: int) -> int:
    """GPUs that so many workers take: one each, so that no two ever share a device; none on the cpu."""
    return num_workers if config.model.device == "cuda" else 0


def check_gpus(config: Config, num_visible: int) -> None:
    """Raises ConfigError when there are fewer GPUs than workers that need one."""
    needed = gpus_for(config, num_workers_of(config))
    if needed > num_visible:
        raise ConfigError(
            f"model.device cuda: {needed} workers need a GPU each, and {num_visible} can be seen here. Start fewer "
            f"workers, take --device cpu, or look at CUDA_VISIBLE_DEVICES and the driver",
            param="model.device",
        )


def sharing_note(cores: Sequence[int], num_workers: int) -> str | None:
    """A sentence for who starts more workers than there are cores; None when each has one of its own."""
    if len(cores) >= num_workers:
        return None
    return f"{num_workers} workers share {len(cores)} core{'s' * (len(cores) != 1)}: they compute in turns"


def share_cores(cores: Sequence[int], num_workers: int) -> list[list[int]]:
    """Disjoint runs of neighbouring cores, one for each worker; the first ones get what does not divide evenly.

    With fewer cores than workers they are shared, one for each worker, in turn.
    """
    if len(cores) < num_workers:
        return [[cores[index % len(cores)]] for index in range(num_workers)]
    size, rest = divmod(len(cores), num_workers)
    shares, at = [], 0
    for index in range(num_workers):
        end = at + size + (index < rest)
        shares.append(list(cores[at:end]))
        at = end
    return shares


def fill_pool_sizes(config: Config, machine: Machine, model: ModelSize) -> Config:
    """The config with num_blocks of every role that has workers set.

    Raises ConfigError, naming the field, when the pools do not fit.
    """
    num_workers = num_workers_of(config)
    for_pools = machine.available_bytes - num_workers * (model.weights_bytes + WORKER_BYTES)
    share_blocks = max(for_pools, 0) // 2 // num_workers // model.block_bytes
    whole_blocks = -(-model.context_tokens // BLOCK_TOKENS) * DEFAULT_CONTEXTS
    default = min(whole_blocks, share_blocks)
    for role in _roles_of(config):
        section = getattr(config, role)
        if section.num_blocks is None:
            if default < min(MIN_DEFAULT_BLOCKS, whole_blocks):
                raise _too_small(f"{role}.num_blocks", machine, num_workers, model)
            section = msgspec.structs.replace(section, num_blocks=default)
            config = msgspec.structs.replace(config, **{role: section})
    _check_fit(config, for_pools, machine, model)
    return config


def _roles_of(config: Config) -> list[Role]:
    """The roles that have workers."""
    return ["prefill", "decode"] if config.prefill.num_workers else ["decode"]


def _names(config: Config) -> list[tuple[str, Role]]:
    return [(f"{role}-{i}", role) for role in _roles_of(config) for i in range(getattr(config, role).num_workers)]


def _check_fit(config: Config, for_pools: int, machine: Machine, model: ModelSize) -> None:
    sections = {role: getattr(config, role) for role in _roles_of(config)}
    wanted = {role: section.num_blocks * section.num_workers * model.block_bytes for role, section in sections.items()}
    if sum(wanted.values()) <= for_pools:
        return
    larger = max(wanted, key=lambda role: wanted[role])
    sizes = ", ".join(
        f"{role}.num_blocks {section.num_blocks} x {section.num_workers}" for role, section in sections.items()
    )
    raise ConfigError(
        f"{larger}.num_blocks: the pools ({sizes}, {_mib(model.block_bytes)} a block) need "
        f"{_mib(sum(wanted.values()))}; {_mib(max(for_pools, 0))} of {_mib(machine.available_bytes)} are free for "
        f"them beside the workers' weights",
        param=f"{larger}.num_blocks",
    )


def _too_small(path: str, machine: Machine, num_workers: int, model: ModelSize) -> ConfigError:
    need = num_workers * (model.weights_bytes + WORKER_BYTES + 2 * MIN_DEFAULT_BLOCKS * model.block_bytes)
    return ConfigError(
        f"{path}: {_mib(machine.available_bytes)} of memory are free; {num_workers} workers with default pools need "
        f"{_mib(need)}. Free some, start fewer workers, or set {path} to less than {MIN_DEFAULT_BLOCKS}",
        param=path,
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes < 10 << 20 else f"{num_bytes / 2**20:.0f} MiB"
