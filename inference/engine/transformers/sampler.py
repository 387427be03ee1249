"""Per-request sampling for one batch of logits.

The batching loop takes the arg max of what this leaves behind, so a chosen
token is marked by raising its logit to infinity; rows of plain greedy requests
are not touched at all.

Order, per row: penalties, logit bias, ``min_tokens``, grammar, temperature,
top-k, top-p, min-p. Randomness comes from (seed, position) alone: token i wins
with p_i / e_i where e is a vector of exponentials drawn for that pair. Against
rounding this is far steadier than walking a cumulative sum, where a difference
anywhere in the distribution moves every later token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference.engine.transformers.generation import Generation
from inference.engine.transformers.grammar import allowed_tokens
from inference.messages import TokenLogprob

NEG_INF = float("-inf")
FLOOR = -9999.0
"""Stands for minus infinity in log probabilities, which must stay finite."""

Row = tuple[int, Generation]


class Sampler:
    """Applies each request's parameters to its row of the logits.

    Args:
        device: where the logits live.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._noise = _device_noise(device) if device.type == "cuda" else _host_noise

    def __call__(self, scores: Tensor, generations: Sequence[Generation | None]) -> None:
        """Choose in place. ``scores`` is float32 ``[rows >= len(generations), vocabulary]``.

        A request for which no token is left is marked with ``error``; the others are not affected.
        """
        rows: list[Row] = [
            (row, g)
            for row, g in enumerate(generations)
            if g is not None and not g.closed and (not g.plain or g.held_off)
        ]
        if not rows:
            return
        wanted = [(row, g) for row, g in rows if g.params.logprobs is not None]
        raw = torch.log_softmax(scores[self._index(wanted)], dim=-1) if wanted else None
        self._penalise(scores, rows)
        self._add_bias(scores, rows)
        self._mask(scores, rows)
        sampled = [(row, g) for row, g in rows if not g.greedy and g.error is None]
        if sampled:
            self._sample(scores, sampled)
        if raw is not None:
            self._note_logprobs(raw, scores, wanted)

    def _index(self, rows: Sequence[Row]) -> Tensor:
        return torch.tensor([row for row, _ in rows], dtype=torch.int64, device=self.device)

    def _to_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _flat(self, parts: Sequence[tuple[int, NDArray[np.int64]]]) -> tuple[Tensor, Tensor]:
        """Row numbers and token ids of many rows as two flat index tensors."""
        rows = np.repeat([row for row, _ in parts], [len(ids) for _, ids in parts]).astype(np.int64)
        return self._to_device(rows), self._to_device(np.concatenate([ids for _, ids in parts]))

    def _penalise(self, scores: Tensor, rows: Sequence[Row]) -> None:
        repeats = [(row, g, g.seen) for row, g in rows if g.seen is not None and g.seen.size]
        if repeats:
            index = self._flat([(row, seen.ids) for row, _, seen in repeats])
            factors = np.repeat(
                np.array([g.params.repetition_penalty for _, g, _ in repeats], np.float32),
                [seen.size for _, _, seen in repeats],
            )
            factor, values = self._to_device(factors), scores[index]
            scores[index] = torch.where(values < 0, values * factor, values / factor)
        counted = [(row, g.params, g.counts) for row, g in rows if g.counts is not None and g.counts.size]
        if counted:
            index = self._flat([(row, counts.ids) for row, _, counts in counted])
            drops = [p.presence_penalty + p.frequency_penalty * counts.counts for _, p, counts in counted]
            scores[index] -= self._to_device(np.concatenate(drops).astype(np.float32))

    def _add_bias(self, scores: Tensor, rows: Sequence[Row]) -> None:
        biased = [(row, g.bias) for row, g in rows if g.bias is not None]
        if biased:
            index = self._flat([(row, ids) for row, (ids, _) in biased])
            scores[index] += self._to_device(np.concatenate([values for _, (_, values) in biased]))

    def _mask(self, scores: Tensor, rows: Sequence[Row]) -> None:
        """Rule out stop ids that come too early and tokens that a grammar does not allow."""
        early = [(row, g) for row, g in rows if g.held_off]
        if early:
            scores[self._flat([(row, g.stop_array) for row, g in early])] = NEG_INF
        constrained = [(row, g) for row, g in rows if g.matcher is not None and g.error is None]
        if constrained:
            allowed = allowed_tokens([g for _, g in constrained], scores.shape[1])
            index = self._index(constrained)
            mask = self._to_device(allowed)
            scores[index] = scores[index].masked_fill(~mask, NEG_INF)
        checked = [(row, g) for row, g in rows if g.matcher is not None or g.held_off or g.bias is not None]
        if not checked:
            return
        empty = (scores[self._index(checked)].amax(dim=-1) == NEG_INF).tolist()
        for (row, g), is_empty in zip(checked, empty, strict=True):
            if is_empty:
                self._rescue(scores, row, g)

    def _rescue(self, scores: Tensor, row: int, generation: Generation) -> None:
        """No token is left: a grammar that is complete may end, anything else is that request's error."""
        scores[row] = 0.0
        if generation.matcher is not None and generation.error is None and generation.matcher.is_accepting():
            scores[row, self._to_device(generation.stop_array)] = 1.0
        elif generation.error is None:
            generation.error = "No token is allowed here: its logit_bias, grammar or min_tokens rule out all."

    def _sample(self, scores: Tensor, rows: Sequence[Row]) -> None:
        index = self._index(rows)
        logits = scores[index]
        logits /= torch.tensor([[g.params.temperature] for _, g in rows], dtype=torch.float32, device=self.device)
        keep_likely(logits, [g for _, g in rows])
        probabilities = torch.softmax(logits, dim=-1)
        chosen = (probabilities / self._noise(rows, logits.shape[1])).argmax(dim=-1)
        scores[index, chosen] = float("inf")

    def _note_logprobs(self, raw: Tensor, scores: Tensor, rows: Sequence[Row]) -> None:
        chosen = scores[self._index(rows)].argmax(dim=-1, keepdim=True)
        own = raw.gather(1, chosen).squeeze(1).tolist()
        ids = chosen.squeeze(1).tolist()
        width = min(max(g.params.logprobs or 0 for _, g in rows), raw.shape[1])
        if width:
            best = torch.topk(raw, width, dim=-1)
            best_ids, best_values = best.indices.tolist(), best.values.tolist()
        else:
            best_ids = best_values = [[] for _ in rows]
        for i, (_, g) in enumerate(rows):
            count = g.params.logprobs or 0
            values = [max(value, FLOOR) for value in best_values[i][:count]]
            top = list(zip(best_ids[i][:count], values, strict=True))
            g.logprobs.append(TokenLogprob(ids[i], max(own[i], FLOOR), top))


def keep_likely(logits: Tensor, generations: Sequence[Generation]) -> None:
    """Apply top-k, top-p and min-p in place to ``[rows, vocabulary]`` logits after temperature."""
    vocabulary = logits.shape[1]
    cut = [i for i, g in enumerate(generations) if 0 < g.params.top_k < vocabulary or g.params.top_p < 1.0]
    if cut:
        index = torch.tensor(cut, dtype=torch.int64, device=logits.device)
        rows = logits[index]
        threshold = _thresholds(rows, [generations[i] for i in cut])
        logits[index] = rows.masked_fill(rows < threshold, NEG_INF)
    floors = [g.params.min_p for g in generations]
    if any(floors):
        floor = torch.tensor(floors, dtype=torch.float32, device=logits.device).log().unsqueeze(1)
        logits.masked_fill_(logits < logits.amax(dim=-1, keepdim=True) + floor, NEG_INF)


def _thresholds(rows: Tensor, generations: Sequence[Generation]) -> Tensor:
    """Smallest logit that top-k and then top-p keep, per row, ``[rows, 1]``.

    Sorting a whole vocabulary costs far more than finding its best few hundred,
    which nearly always hold the probability that top-p asks for; for the rows where
    they do not, sixteen times as many are looked at.
    """
    vocabulary = rows.shape[1]
    ks = [g.params.top_k if 0 < g.params.top_k < vocabulary else 0 for g in generations]
    ps = [min(g.params.top_p, 1.0) for g in generations]
    k = torch.tensor([k or vocabulary for k in ks], device=rows.device).unsqueeze(1)
    p = torch.tensor(ps, dtype=torch.float32, device=rows.device).unsqueeze(1)
    width = min(vocabulary, max([*ks, 256 if min(ps) < 1.0 else 1]))
    result, left = _among(rows, k, p, width)
    while width < vocabulary and bool(left.any()):
        width = min(vocabulary, width * 16)
        where = left.squeeze(1).nonzero().squeeze(1)
        result[where], left[where] = _among(rows[where], k[where], p[where], width)
    return result


def _among(rows: Tensor, k: Tensor, p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Thresholds that show among the best ``width`` of each row, and for which rows more must be seen."""
    values = torch.topk(rows, width, dim=-1).values
    inside = torch.arange(width, device=rows.device).unsqueeze(0) < k
    values = values.masked_fill(~inside, NEG_INF)
    total = torch.where(k <= width, torch.logsumexp(values, dim=-1, keepdim=True), rows.logsumexp(-1, keepdim=True))
    share = torch.exp(values - total)
    before = torch.cumsum(share, dim=-1) - share
    keep = ((before < p) | (p >= 1.0)) & inside
    enough = (k <= width) | (p >= 1.0) | (before[:, -1:] >= p) | (share[:, -1:] == 0)
    last = values.gather(1, keep.sum(dim=-1, keepdim=True).clamp(min=1) - 1)
    return last.masked_fill((p >= 1.0) & (k > width), NEG_INF), ~enough


Noise = Callable[[Sequence[Row], int], Tensor]


def _host_noise(rows: Sequence[Row], vocabulary: int) -> Tensor:
    """Exponential noise ``[rows, vocabulary]`` out of a generator seeded by seed and position.

    By inversion, -log(1 - v), of 31 random bits each: numpy's own exponentials take five times as long,
    which many sampled sequences would feel in every step. v is fine-grained near 0, where the smallest
    exponentials, the ones that win, come from; it is neither 0 nor 1.
    """
    words = np.empty((len(rows), -(-vocabulary // 2)), np.uint64)
    for out, (_, g) in zip(words, rows, strict=True):
        out[:] = np.random.SFC64(np.random.SeedSequence([g.seed, g.position])).random_raw(out.size)
    words &= np.uint64(0x7FFF_FFFF_7FFF_FFFF)
    bits = torch.from_numpy(words.view(np.int32))[:, :vocabulary].to(torch.float32)
    return bits.add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _device_noise(device: torch.device) -> Noise:
    """The same on a CUDA device, by torch's generator there (also counter-based)."""
    generator = torch.Generator(device)

    def draw(rows: Sequence[Row], vocabulary: int) -> Tensor:
        noise = torch.empty((len(rows), vocabulary), dtype=torch.float32, device=device)
        for out, (_, g) in zip(noise, rows, strict=True):
            mixed = np.random.SeedSequence([g.seed, g.position]).generate_state(1, np.uint64)
            out.exponential_(generator=generator.manual_seed(int(mixed[0] >> np.uint64(1))))
        return noise.clamp_(min=1e-30)

    return draw
