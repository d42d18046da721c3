"""`kvrelay`: where the process begins. Imports next to nothing, so that Ctrl-C is taken from the first moment on."""

from __future__ import annotations

from cluster.early_signals import end_quietly


def main() -> None:
    """Runs the command line; what that needs is imported when Ctrl-C is safe."""
    end_quietly()
    from cluster.commands import kvrelay  # noqa: PLC0415

    kvrelay()
