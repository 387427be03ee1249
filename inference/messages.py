"""Every message that crosses a process, defined once.

Encoded as MessagePack by msgspec. Array-like structs are those on the
per-token path, where field names would be most of the bytes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from inference.lifecycle import Outcome


class Grammar(msgspec.Struct, frozen=True):
    """A constraint on the answer's text.

    Attributes:
        kind: ``json_schema`` (``spec`` is a JSON schema as text), ``json_object``
            (any JSON object; ``spec`` empty), ``regex`` or ``choice`` (``spec``
            is a JSON list of strings), or ``lark`` (an llguidance grammar).
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark"]
    spec: str = ""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one request samples. Validated by the API before it gets here.

    Attributes:
        max_tokens: upper bound of generated tokens, at least 1 (the API resolves
            "absent" to what is left of the context); 0 for a model that makes vectors.
        temperature: 0 is greedy; below 1e-5 acts greedy.
        top_k: 0 is off. top_p: 1 is off; 0 acts greedy. min_p: 0 is off.
        seed: ``None`` draws a random one when the job is made, so that a
            continuation after a lost worker samples what the first would have.
        logprobs: ``None`` for none, else how many alternatives (0 allowed)
            beside the chosen token.
        stop: texts that end the answer and are never part of it.
        min_tokens: EOS, stop tokens and stop texts are held off until then.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = 0
    grammar: Grammar | None = None


class Job(msgspec.Struct, frozen=True):
    """What a worker needs to generate one answer; never changes once submitted.

    ``prompt_text`` is set only for models whose engine takes text instead of
    token ids (an OpenAI-compatible upstream): the JSON body to send on.
    ``continues`` says that the answer's text goes on where the prompt's ends, so that a
    space at its very start is part of it also with SentencePiece vocabularies.
    """

    id: str
    model: str
    prompt_ids: list[int]
    params: SamplingParams
    prompt_text: str | None = None
    trace: str | None = None
    continues: bool = False


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one emitted token and its best alternatives.

    Natural logarithm of the model's distribution before temperature and
    filters; finite always (-9999.0 stands for minus infinity).
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one engine step adds to one request.

    Attributes:
        seq: 1 for the first frame of a request and one more for each next;
            also its position in the token log, and the SSE event id.
        ids: token ids, possibly several, possibly none.
        text: text that became certain in this step (may lag behind ``ids``
            while a character or a possible stop string is incomplete).
        finish: set on the last frame only: ``stop``, ``length`` or ``error``.
        logprobs: one entry per id, where asked for.
        error: with ``finish == "error"``: a sentence for the client.
        cached: on the first frame: prompt tokens found in the prefix cache.
        stop_match: which stop string or stop token id ended the answer.
    """

    seq: int
    ids: list[int]
    text: str
    finish: str | None = None
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    cached: int = 0
    stop_match: str | int | None = None


class StepFrame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request's share of a :class:`Step`. ``frame`` is an encoded :class:`Frame`."""

    id: str
    attempt: int
    frame: msgspec.Raw


class Step(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Worker to one server: all frames of one engine step for its requests."""

    worker: str
    frames: list[StepFrame]


class Claimed(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """To a server: its request left the queue (first or later attempt)."""

    id: str
    worker: str
    attempt: int


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """To a server: somebody else settled its request."""

    id: str
    outcome: Outcome


class Superseded(msgspec.Struct, frozen=True, array_like=True, tag="x"):
    """To a server: another reader has taken over the stream of this request, its ``turn``-th.

    Nothing reads ``reader``. It keeps its place in the array, as servers of several versions
    tell each other this during a rolling update.
    """

    id: str
    reader: str
    turn: int = 0


class ServerCommand(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """An operator's order to one server process."""

    verb: Literal["drain", "undrain"]


ServerMessage = Step | Claimed | Ended | Superseded | ServerCommand


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """To a worker: the request was settled; free its slot. Sent once, by the settle script."""

    id: str
    attempt: int


class Moved(msgspec.Struct, frozen=True, array_like=True, tag="m"):
    """To a worker: frames of this request now go to another server ("" for none)."""

    id: str
    server: str


class WorkerCommand(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """An operator's order to one worker: stop claiming, claim again, finish and exit, exit now."""

    verb: Literal["quiet", "resume", "drain", "restart"]


WorkerMessage = Abort | Moved | WorkerCommand


class ModelInfo(msgspec.Struct, frozen=True):
    """What a worker says of a model it serves.

    Attributes:
        context_length: longest prompt plus answer, tokens.
        capacity_tokens: longest prompt plus answer that this worker's cache can
            hold, tokens.
        slots: requests that it runs at once.
        dimensions: of an embedding model's vectors; 0 where there are none, or nobody knows.
        suggested: ``temperature`` and ``top_p`` where the model's makers name them. Nothing
            applies them by itself: what a request leaves out has the API's own default.
    """

    alias: str
    engine: str
    context_length: int
    capacity_tokens: int
    slots: int
    kind: Literal["generate", "embed"] = "generate"
    dimensions: int = 0
    suggested: dict[str, float] = {}


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot of an engine. Times are seconds, cumulative figures count from its start."""

    running: int = 0
    waiting: int = 0
    slots: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    last_step_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0


class WorkerBeat(msgspec.Struct, frozen=True):
    """A worker's heartbeat: kept under one key with a TTL, renewed every second."""

    id: str
    pool: str
    host: str
    pid: int
    device: str
    state: Literal["starting", "ready", "quiet", "draining"]
    models: list[ModelInfo]
    stats: EngineStats
    started_ms: int
    version: str
    restarts: int = 0
    held: int = 0
    rss_bytes: int = 0
    device_bytes: int = 0
    settled: dict[str, int] = {}


class PoolBeat(msgspec.Struct, frozen=True):
    """A pool supervisor's heartbeat: which workers it keeps and what it is bringing up."""

    id: str
    host: str
    pid: int
    workers: list[str]
    starting: list[str]
    models: list[str]
    restarts: int
    started_ms: int
    version: str
    draining: bool = False
    broken: bool = False
    retired: int = 0
    """Places whose worker an operator has drained: empty as long as the pool lives."""


class ServerBeat(msgspec.Struct, frozen=True):
    """An API server's heartbeat, with its open exchanges by route and kind.

    ``blocked``: requests whose client takes nothing, at most a hundred, and since
    when (ms, this server's clock).
    """

    id: str
    host: str
    pid: int
    state: Literal["serving", "pausing", "refusing", "finishing", "ending"]
    exchanges: dict[str, int]
    streams: int
    unsettled: int
    started_ms: int
    version: str
    drain_left_seconds: float | None = None
    rss_bytes: int = 0
    loop_lag_seconds: float = 0.0
    tasks: int = 0
    blocked: dict[str, int] = {}


class Ending(msgspec.Struct, frozen=True):
    """The summary of a request that has ended: lengths and times (ms, Redis clock), never text.

    Attributes:
        by: the process that settled it and counts it; empty where that has no metrics.
        claims: who had it and since when, one ``ms worker`` per line; without a
            worker where it went back into the queue. The latest, of very many.
        params: JSON of what was asked for where that is not the default: numbers,
            and of stop texts and the like how many.
    """

    id: str
    model: str
    state: str
    reason: str
    endpoint: str
    transport: str
    owner: str
    server: str
    worker: str
    attempts: int
    prompt_tokens: int
    generated_tokens: int
    created_ms: int
    claimed_ms: int
    first_token_ms: int
    ended_ms: int
    by: str = ""
    last_token_ms: int = 0
    deadline_ms: int = 0
    claims: str = ""
    params: str = ""


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_frame = msgspec.msgpack.Decoder(Frame).decode
decode_server_message = msgspec.msgpack.Decoder(ServerMessage).decode
decode_worker_message = msgspec.msgpack.Decoder(WorkerMessage).decode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_worker_beat = msgspec.msgpack.Decoder(WorkerBeat).decode
decode_pool_beat = msgspec.msgpack.Decoder(PoolBeat).decode
decode_server_beat = msgspec.msgpack.Decoder(ServerBeat).decode
decode_ending = msgspec.msgpack.Decoder(Ending).decode
