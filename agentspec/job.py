"""Sets up what every entry point needs from typed settings: tokenizer, chat, model, worlds.

In: ``Settings``. Out: a ``Job``, whose parts know nothing of the config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from agentspec import rng
from agentspec.configuration import ConfigError
from agentspec.envs import lookup, storefront
from agentspec.envs.base import WorldSource
from agentspec.envs.episode import CUT_TURN, EpisodeLimits
from agentspec.mesh import MeshError, batch_sharding, make_mesh, param_shardings
from agentspec.model.config import ModelConfig
from agentspec.model.transformer import LanguageModel
from agentspec.model.weights import CHOICES, load_model
from agentspec.rollout.engine import Engine
from agentspec.settings import Settings
from agentspec.tokens.chat import Chat
from agentspec.tokens.pack import PackedBatch, pack
from agentspec.tokens.parse import PROBLEMS
from agentspec.tokens.tokenizer import Tokenizer, build_word_tokenizer, load_tokenizer
from agentspec.types import SamplingParams, Task, ToolSpec, TreeRow

Params = Any


@dataclasses.dataclass(frozen=True)
class Job:
    """One job's parts. ``initial_params`` makes the weights that stage ``base`` begins with."""

    settings: Settings
    tokenizer: Tokenizer
    chat: Chat
    model: LanguageModel
    worlds: dict[str, WorldSource]
    loaded_params: Params | None

    @property
    def param_shardings(self) -> Any:
        """Where each parameter lies: on the mesh, or whole on the first device."""
        if self.model.mesh is None:
            one = SingleDeviceSharding(jax.devices()[0])
            return jax.tree.map(lambda _: one, self.model.shapes)
        return param_shardings(self.model.logical_axes, self.model.shapes, self.model.mesh)

    def initial_params(self) -> Params:
        """The loaded weights, or fresh ones drawn from the job's seed."""
        if self.loaded_params is not None:
            return jax.tree.map(jnp.copy, self.loaded_params)  # an update donates what it gets
        key = jax.random.key(rng.stream(self.settings.seed, "init"))
        if self.model.mesh is None:
            return self.model.init(key)
        return jax.jit(self.model.init, out_shardings=self.param_shardings)(key)

    def engine(self, params: Params, version: int = 0) -> Engine:
        """A sampling engine over ``params`` with the configured shapes."""
        e = self.settings.engine
        engine = Engine(
            self.model,
            params,
            rows=e.rows,
            speculator_rows=e.speculator_rows,
            cache_tokens=e.cache_tokens,
            prefill_chunk=e.prefill_chunk,
            tokens_per_call=e.tokens_per_call,
            page_tokens=e.page_tokens,
            pages=e.pages,
        )
        engine.load(params, version)
        return engine

    def pack(self, rows: Sequence[TreeRow]) -> list[PackedBatch]:
        """The rows packed into batches of the configured shape."""
        p, hybrid = self.settings.pack, "linear" in self.model.config.kinds
        return pack(rows, p.row_tokens, p.rows_per_batch, branch_table=hybrid)

    def tasks(self, split: str) -> list[Task]:
        """All worlds' tasks of a split, world by world."""
        return [task for world in self.worlds.values() for task in world.tasks(split)]

    def specs(self, world: str) -> dict[str, ToolSpec]:
        """The declared tools of a world, by name."""
        return {spec.name: spec for spec in self.worlds[world].specs}

    @property
    def limits(self) -> EpisodeLimits:
        """The configured limits of an episode."""
        e = self.settings.episode
        return EpisodeLimits(
            max_turns=e.max_turns, max_turn_tokens=e.max_turn_tokens, max_tokens=e.max_tokens
        )

    def agent_sampling(self, temperature: float) -> SamplingParams:
        """How agent turns are sampled."""
        return SamplingParams(
            temperature, self.settings.episode.max_turn_tokens, self.chat.stop_ids
        )

    def speculator_sampling(self, temperature: float) -> SamplingParams:
        """How predictions are sampled."""
        return SamplingParams(temperature, self.settings.speculator.max_tokens, self.chat.stop_ids)


def build_job(settings: Settings) -> Job:
    """The job of these settings; reads the model's and the worlds' files."""
    worlds = {name: _world(name, settings) for name in settings.world.names}
    m, mesh = settings.model, _mesh(settings)
    choices = {key: getattr(m, key) for key in CHOICES}
    if m.path:
        tokenizer = load_tokenizer(m.path)
        try:
            loaded = load_model(m.path, mesh, m.dtype, **choices)
        except MeshError as error:
            raise ConfigError(f"config section mesh: {error}") from error
        model, loaded_params = loaded.model, loaded.params
    else:
        pieces = [piece for world in worlds.values() for piece in world.pieces()]
        glue = settings.chat.suffix.split(" ")
        pieces += [word if i == 0 else " " + word for i, word in enumerate(glue)]
        pieces += [CUT_TURN, "error: ", "; ", *PROBLEMS]
        tokenizer = build_word_tokenizer(list(dict.fromkeys(pieces)))
        config = ModelConfig(
            vocab_size=tokenizer.vocab_size,
            d_model=m.d_model,
            n_layers=m.n_layers,
            n_heads=m.n_heads,
            n_kv_heads=m.n_kv_heads,
            head_dim=m.head_dim,
            d_ff=m.d_ff,
            rope_theta=m.rope_theta,
            tie_embeddings=True,
            family="qwen3",
            dtype=m.dtype,
            **choices,
        )
        model, loaded_params = LanguageModel(config, mesh), None
    if mesh is not None:
        try:
            param_shardings(model.logical_axes, model.shapes, mesh)
            batch_sharding(mesh, settings.pack.rows_per_batch * jax.process_count())
        except MeshError as error:
            raise ConfigError(f"config section mesh: {error}") from error
    c = settings.chat
    chat = Chat(
        tokenizer,
        style=c.style,
        tools_in_prompt=c.tools_in_prompt,
        system=c.system or None,
        think=c.think,
        suffix=c.suffix,
    )
    e, n_suffix = settings.engine, len(chat.suffix_ids())
    needed = settings.episode.max_tokens + n_suffix + settings.speculator.max_tokens
    if needed > e.cache_tokens:
        raise ConfigError(
            f"config key engine.cache_tokens={e.cache_tokens} is below {needed}: "
            f"episode.max_tokens={settings.episode.max_tokens} + {n_suffix} tokens of "
            f"chat.suffix + speculator.max_tokens={settings.speculator.max_tokens}"
        )
    if needed > settings.pack.row_tokens:
        raise ConfigError(
            f"config key pack.row_tokens={settings.pack.row_tokens} is below {needed}, the longest "
            "episode prefix with one prediction behind it"
        )
    return Job(settings, tokenizer, chat, model, worlds, loaded_params)


def _mesh(settings: Settings) -> Mesh | None:
    """The mesh of the settings; None for one device."""
    sizes = dataclasses.asdict(settings.mesh)
    if set(sizes.values()) == {1}:
        return None
    try:
        return make_mesh(**sizes)
    except MeshError as error:
        raise ConfigError(f"config section mesh: {error}") from error


def _world(name: str, settings: Settings) -> WorldSource:
    w = settings.world
    if name == "lookup":
        return lookup.build_world(w.seed)
    if name == "storefront":
        return storefront.build_world(w.seed)
    from agentspec.envs import hotpot  # reads the ``search`` extra

    return hotpot.load_hotpot(
        w.corpus,
        w.questions,
        w.trajectories,
        seed=w.seed,
        n_test=w.n_test,
        n_validation=w.n_validation,
        search_chars=w.search_chars,
        read_chars=w.read_chars,
    )
