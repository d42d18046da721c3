"""serving: what of the bare engine's speed arrives at an HTTP client.

Measured, as the share that is lost: prefill tokens a second (prompt over time to first token) for prompts of 512 and
2,048 tokens, and decode tokens a second of 1 and of 8 streams at contexts around 300 tokens.

Decode is compared step by step: among the moments at which the last stream that joined got its tokens, the time
between two of them is a whole number of engine steps, and the positions of all streams in these steps are known. The
bare engine then runs these very steps.

Boundary: as in `ttft`; the bare engine's process is tied to the prefill worker's cores for prefill and to the decode
worker's for decode, and takes turns with the cluster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from load_tests.completion_stream import CompletionStream, parse_stream
from load_tests.engine_client import EngineClient
from load_tests.gateway import Gateway
from load_tests.lab import Lab
from load_tests.machine_bounds import measure_bounds
from load_tests.prompts import PromptMaker
from load_tests.report import Check, judged
from load_tests.streams import running_streams, wait_all_ended
from pd_core.errors import ProtocolError

PREFILL_TOKENS = (512, 2048)
NUM_STREAMS = (1, 8)
DECODE_PROMPT_TOKENS = 256
DECODE_MAX_TOKENS = {1: 97, 8: 192}
"""With 8 streams the first has had many tokens before the last has its prompt computed."""
PREFILL_MAX_TOKENS = 3
WARM_UP_TOKENS = 2
"""Tokens of the last stream that are left out: its handoff is no decode step."""
MIN_STEPS = 16
TARGET_PERCENT = 3.0


class StepWindow(msgspec.Struct, frozen=True):
    """A run of decode steps in which all streams took part.

    starts: position of each stream's token in the first of them
    """

    starts: list[int]
    num_steps: int
    took_s: float


class ServingBench:
    name = "serving"
    summary = "prefill and decode rates over HTTP against the bare engine"
    num_rounds = 5

    async def run(self, lab: Lab) -> list[Check]:
        bounds = await measure_bounds(lab)
        rounds = ServingRounds(lab)
        async with lab.cluster() as cluster:
            gateway = Gateway(cluster)
            async with (
                lab.engine(cluster.worker("prefill").cores, lab.config.prefill.num_threads) as prefill,
                lab.engine(cluster.worker("decode").cores, lab.config.decode.num_threads) as decode,
            ):
                await prefill.time_prefill(PREFILL_TOKENS[0], lab.config.prefill.chunk_tokens, seed=0)
                await gateway.complete(rounds.prompts.make(PREFILL_TOKENS[0]), DECODE_PROMPT_TOKENS)
                for number in lab.rounds():
                    lab.progress(f"serving round {number + 1} of {lab.num_rounds}")
                    await rounds.run(gateway, prefill, decode)
        return bounds + rounds.checks()


class ServingRounds:
    """Token rates over HTTP and bare, of all rounds."""

    def __init__(self, lab: Lab) -> None:
        self.prompts: PromptMaker = lab.make_prompts()
        self._chunk_tokens = lab.config.prefill.chunk_tokens
        self._rates: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    async def run(self, gateway: Gateway, prefill: EngineClient, decode: EngineClient) -> None:
        for size in PREFILL_TOKENS:
            stream = await gateway.complete(self.prompts.make(size), PREFILL_MAX_TOKENS)
            bare_s = await prefill.time_prefill(size, self._chunk_tokens, seed=size)
            self._rates[f"prefill_{size}"].append((size / stream.ttft_s, size / bare_s))
        for num_streams in NUM_STREAMS:
            window = await self._decode(gateway, num_streams)
            bare_s = sum(await decode.time_decode(window.starts, window.num_steps))
            num_tokens = num_streams * window.num_steps
            self._rates[f"decode_{num_streams}"].append((num_tokens / window.took_s, num_tokens / bare_s))

    def checks(self) -> list[Check]:
        found = []
        for name, pairs in self._rates.items():
            found += [
                judged(f"{name}_http", [http for http, _ in pairs], "token/s", "higher"),
                judged(f"{name}_bare", [bare for _, bare in pairs], "token/s", "higher"),
                judged(f"{name}_lost", [(1 - http / bare) * 100 for http, bare in pairs], "%", "lower", TARGET_PERCENT),
            ]
        return found

    async def _decode(self, gateway: Gateway, num_streams: int) -> StepWindow:
        made = [self.prompts.make(DECODE_PROMPT_TOKENS) for _ in range(num_streams)]
        async with running_streams(gateway, made, DECODE_MAX_TOKENS[num_streams], with_token_ids=True) as exchanges:
            await wait_all_ended(exchanges)
            streams = [parse_stream(exchange.reply(), exchange.sent_s) for exchange in exchanges]
        return common_steps(streams, DECODE_PROMPT_TOKENS)


def common_steps(streams: Sequence[CompletionStream], num_prompt: int) -> StepWindow:
    """The steps from when the last stream had joined until the first of them all ended.

    Raises ProtocolError when there are fewer than MIN_STEPS.
    """
    last = max(streams, key=lambda stream: stream.moments[0])
    first_end_s = min(stream.moments[-1] for stream in streams)
    moments = [moment for moment in last.moments[WARM_UP_TOKENS:] if moment <= first_end_s]
    num_steps = len(moments) - 1
    if num_steps < MIN_STEPS:
        raise ProtocolError(f"the streams had {num_steps} steps in common; at least {MIN_STEPS} are needed")
    began_s = moments[0]
    # The step after `began_s` takes each stream's latest token until then; it stands at the prompt's end + its index.
    latest = [sum(moment <= began_s for moment in stream.moments) - 1 for stream in streams]
    return StepWindow([num_prompt + index for index in latest], num_steps, moments[-1] - began_s)
