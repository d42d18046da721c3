"""Where weights and KV lie and steps run."""

from __future__ import annotations

from typing import Literal

import torch

from pd_core.errors import ConfigError

Device = Literal["cpu", "cuda"]
CPU = torch.device("cpu")


def find_device(name: Device) -> torch.device:
    """The device of that name; of several CUDA devices the first that this process sees.

    Which one that is, is decided by who starts the process (CUDA_VISIBLE_DEVICES).
    Raises ConfigError naming model.device when there is none.
    """
    if name == "cpu":
        return CPU
    if torch.version.cuda is None:
        raise ConfigError(
            f"model.device is cuda, but torch {torch.__version__} is built without CUDA", param="model.device"
        )
    if not torch.cuda.is_available():
        raise ConfigError("model.device is cuda, but this process sees no CUDA device", param="model.device")
    return torch.device("cuda:0")
