"""The slow, obvious twin of ``engine``: one sequence at a time, nothing shared, nothing kept.

In: token ids and ``SamplingParams`` through the same handles. Out: the same ``Completion`` records.
Every ``sample`` reads its whole sequence anew into a static cache of one row and then goes token by
token. Log-probs are the engine's but for rounding; so are ids, unless two candidates lie closer.
Modes and rows mean nothing here: the handles take them so that a caller need not know the twin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from agentspec.rollout import sampling
from agentspec.rollout.device import MAX_STOP_IDS
from agentspec.rollout.engine import SequenceClosed, SequenceTooLong
from agentspec.types import Completion, Mode, SamplingParams


class PlainEngine:
    """Samples for one sequence at a time; see ``Engine`` for what its calls promise."""

    def __init__(
        self, model: Any, params: Any, *, cache_tokens: int, prefill_chunk: int = 32
    ) -> None:
        """``model``: a ``LanguageModel`` (``init_cache``, ``apply_cached``, ``unembed``)."""
        self.model, self.params, self.version = model, params, 0
        self.cache_tokens, self.prefill_chunk = cache_tokens, prefill_chunk
        self._read = jax.jit(self._read_chunk, donate_argnames="cache")
        self._step = jax.jit(self._sample_one, donate_argnames="cache")

    def open(self, ids: Iterable[int], seed: int = 0, mode: Mode = "agent") -> PlainSequence:
        """A new sequence. SequenceTooLong if the ids do not fit."""
        return PlainSequence(self, ids, seed, mode)

    def load(self, params: Any, version: int) -> None:
        """Samples with other weights from the next token on."""
        self.params, self.version = params, version

    def _read_chunk(self, params: Any, cache: Any, ids_RT: Any, start_R: Any, valid_R: Any) -> Any:
        return self.model.apply_cached(params, cache, ids_RT, start_R, valid_R)[1]

    def _sample_one(
        self, params: Any, cache: Any, id_R: Any, start_R: Any, seed_R: Any, draw: sampling.Draw
    ) -> Any:
        hidden_R1D, cache = self.model.apply_cached(
            params, cache, id_R[:, None], start_R, jnp.ones(1, jnp.int32)
        )
        logits_RV = self.model.unembed(params, hidden_R1D[:, 0])
        keys_R = sampling.row_keys(jax.random.key(0), seed_R)
        return sampling.sample(logits_RV, keys_R, start_R + 1, draw), cache


class PlainSequence:
    """A handle on one sequence: its ids and its seed, nothing else."""

    def __init__(self, engine: PlainEngine, ids: Iterable[int], seed: int, mode: Mode) -> None:
        """Not for callers: see ``PlainEngine.open``."""
        self.ids: tuple[int, ...] = ()
        self.mode = mode
        self._engine, self._seed = engine, sampling.check_seed(seed)
        self._closed = self._sampling = False
        self.extend(ids)

    @property
    def room(self) -> int:
        """How many more ids fit."""
        return self._engine.cache_tokens - len(self.ids)

    def extend(self, ids: Iterable[int]) -> None:
        """Appends ids. SequenceTooLong, and no change, if they do not fit."""
        self._check_idle("extend")
        ids = self.ids + tuple(int(token) for token in ids)
        if len(ids) > (most := self._engine.cache_tokens):
            raise SequenceTooLong(f"{len(ids)} ids do not fit cache_tokens={most}")
        self.ids = ids

    def fork(self, seed: int, mode: Mode | None = None) -> PlainSequence:
        """A sequence with the same ids and its own seed. While this one samples: the ids before."""
        self._check_open("fork")
        return PlainSequence(self._engine, self.ids, seed, mode or self.mode)

    def rewind(self, length: int) -> None:
        """Drops all ids but the first ``length``."""
        self._check_idle("rewind")
        if not 0 <= length <= len(self.ids):
            raise ValueError(f"rewind to {length}: the sequence has {len(self.ids)} ids")
        self.ids = self.ids[:length]

    def close(self) -> None:
        """A ``sample`` under way raises SequenceClosed. Twice is harmless."""
        self._closed = True

    async def sample(self, params: SamplingParams) -> Completion:
        """Samples one segment, appends it to ``ids`` and returns it; lets others run in between."""
        self._check_idle("sample")
        sampling.check_sampling(params, MAX_STOP_IDS)
        if not self.ids:
            raise ValueError("sample needs at least one id to continue from")
        self._sampling = True
        try:
            completion = await self._continue(params)
        finally:
            self._sampling = False
        self.ids += completion.ids
        return completion

    async def _continue(self, params: SamplingParams) -> Completion:
        engine, chunk = self._engine, self._engine.prefill_chunk
        ids, n_read = list(self.ids), len(self.ids) - 1
        cache = engine.model.init_cache(1, engine.cache_tokens)
        for start in range(0, n_read, chunk):
            part = ids[start : min(start + chunk, n_read)]
            ids_RT = np.asarray([part + [0] * (chunk - len(part))], np.int32)
            cache = engine._read(engine.params, cache, ids_RT, _int(start), _int(len(part)))
        drawn: list[tuple[int, float, float]] = []
        stopped = False
        while not stopped and len(drawn) < params.max_tokens and len(ids) < engine.cache_tokens:
            n = len(drawn)
            barred = params.stop_ids if n < params.min_tokens else ()
            draw = sampling.Draw(
                temperature_R=np.full(1, params.temperature, np.float32),
                top_p_R=np.full(1, params.top_p, np.float32),
                top_k_R=_int(params.top_k),
                barred_RK=np.asarray([(*barred, *[-1] * (MAX_STOP_IDS - len(barred)))], np.int32),
                forced_R=_int(params.forced[n] if n < len(params.forced) else -1),
            )
            seed_R = np.full(1, self._seed, np.uint32)
            new, cache = engine._step(
                engine.params, cache, _int(ids[-1]), _int(len(ids) - 1), seed_R, draw
            )
            token, logp, entropy = (x_R.item() for x_R in new)
            drawn.append((token, logp, entropy))
            ids.append(token)
            stopped = token in params.stop_ids
            await asyncio.sleep(0)
            self._check_open("sample")
        new_ids, logps, entropies = zip(*drawn, strict=True) if drawn else ((), (), ())
        finish: Literal["stop", "length"] = "stop" if stopped else "length"
        return Completion(new_ids, logps, finish, engine.version, entropies)

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise SequenceClosed(f"{what} on a closed sequence of {len(self.ids)} ids")

    def _check_idle(self, what: str) -> None:
        self._check_open(what)
        if self._sampling:
            raise RuntimeError(f"{what} while the sequence is sampling; await or cancel that first")


def _int(value: int) -> np.ndarray:
    return np.full(1, value, np.int32)
