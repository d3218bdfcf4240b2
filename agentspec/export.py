"""Writes a checkpoint's weights as a Hugging Face folder, for transformers and serving engines.

    python -m agentspec.export --checkpoint=RUN/checkpoints/STAGE[:STEP] --out=DIR
        [--dtype=bfloat16] [--max_shard_gb=5]

In: a checkpoint of a run and the run's ``config.json``, which names the model that it began with.
Out: weights, and beside them what that model's folder held: config, tokenizer, chat template,
generation settings. Of a multimodal model the parts that were not trained (the vision tower) are
copied too, so that the folder stays whole. Weights go tensor by tensor from the checkpoint's files
to the new ones, some rows at a time: any host has the memory, and no accelerator is used.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from ml_collections import ConfigDict

from agentspec import entry
from agentspec.checkpoint import CheckpointError, SavedParams, open_params, split_step
from agentspec.configuration import flat_settings, settings_from
from agentspec.job import build_job
from agentspec.model.config import DTYPES, ModelConfig
from agentspec.model.hf_config import config_to_hf
from agentspec.model.hf_names import TEXT_PREFIX, Piece, hf_tensors, leaf_names
from agentspec.model.safetensors_files import Outgoing, Stored, read_json, write_folder
from agentspec.model.transformer import LanguageModel
from agentspec.model.weights import outgoing, read_hf
from agentspec.progress import StageProgress, say
from agentspec.settings import Settings
from agentspec.tasks.jsonlines import DataError
from agentspec.tokens.tokenizer import Tokenizer, load_tokenizer
from agentspec.workdir import RunError, read_object

_MARK = ".export"  # in a folder under way: ours, to be replaced by the next try

COPIED = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json "
    "merges.txt tokenizer.model chat_template.jinja chat_template.json generation_config.json "
    "preprocessor_config.json video_preprocessor_config.json processor_config.json"
).split()


@dataclasses.dataclass(frozen=True)
class Origin:
    """The model that a run began with: all that a folder needs but the trained weights.

    ``hf_config`` is its ``config.json``; ``rest`` are tensors that were not trained;
    ``write_files(folder)`` writes tokenizer and the like.
    """

    config: ModelConfig
    hf_config: dict[str, Any]
    rest: Mapping[str, Stored]
    write_files: Callable[[Path], None]


def origin_of(run: Path) -> Origin:
    """The origin of the run in folder ``run``; ``RunError`` or ``ConfigError`` where it is gone."""
    file = run / "config.json"
    if not file.exists():
        raise RunError(
            f"{file} is not there, and with it the model's settings; --checkpoint names a folder "
            "RUN/checkpoints/STAGE"
        )
    path = read_object(file).get("model.path")
    if not path:
        job = build_job(_settings(file))
        return _made(job.model.config, job.tokenizer)
    with entry.reading("model.path", path):
        if not Path(path).exists():
            raise FileNotFoundError(f"{file} says {path}, which is not there (from {Path.cwd()})")
        return _from_gguf(Path(path)) if path.endswith(".gguf") else _from_folder(Path(path))


def _made(config: ModelConfig, tokenizer: Tokenizer) -> Origin:
    named = dataclasses.replace(config, eos_ids=config.eos_ids or tokenizer.eos_ids)
    return Origin(config, config_to_hf(named), {}, tokenizer.save)


def _from_gguf(path: Path) -> Origin:
    from agentspec.model.gguf_file import read_chat_template, read_gguf  # an extra

    made = _made(read_gguf(path)[0], load_tokenizer(path))
    template = read_chat_template(path)

    def write_files(folder: Path) -> None:
        made.write_files(folder)
        if template:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")

    return dataclasses.replace(made, write_files=write_files)


def _from_folder(path: Path) -> Origin:
    config, _, rest = read_hf(path)

    def write_files(folder: Path) -> None:
        for name in COPIED:
            if (path / name).is_file():
                shutil.copyfile(path / name, folder / name)

    return Origin(config, read_json(path / "config.json"), rest, write_files)


def _settings(file: Path) -> Settings:
    """The settings in a run's ``config.json``; keys that it lacks have their defaults."""
    tree: dict[str, Any] = {}
    for key, value in (flat_settings(Settings()) | read_object(file)).items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = tuple(value) if isinstance(value, list) else value
    return settings_from(ConfigDict(tree))


def export(
    checkpoint: str, out: Path, dtype: str | None = None, max_shard_bytes: int = 5 * 10**9
) -> int:
    """Writes the weights of ``checkpoint``, ``DIR`` or ``DIR:step``, to the new folder ``out``.

    ``dtype`` None keeps the checkpoint's. Returns the bytes of the weights. The folder is written
    under the name ``OUT.partial`` and gets its own when it is complete.

    Raises:
        RunError: where ``out`` is in use already, or the run's settings are not found.
        CheckpointError: for a checkpoint that is absent, damaged, or not of the settings' model.
    """
    if out.is_symlink():
        raise RunError(f"--out={out} is a link; name the folder itself")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"--out={out} is there already and not empty; name a new folder")
    run = Path(split_step(checkpoint)[0]).resolve().parent.parent
    origin = origin_of(run)
    saved = open_params(checkpoint)
    tensors = [*_trained(origin, saved, dtype, run), *_untouched(origin)]
    partial = out.with_name(out.name + ".partial")
    if partial.exists():
        if not (partial / _MARK).exists():
            raise RunError(f"{partial} is in the way, and no export left it; move it")
        shutil.rmtree(partial)  # left by an export that was killed
    partial.mkdir(parents=True)
    (partial / _MARK).touch()
    origin.write_files(partial)
    with StageProgress("export", 0, len(tensors)) as progress:
        write_folder(
            partial,
            tensors,
            max_shard_bytes,
            lambda done: progress.show(done, "tensors", {}, last=done == len(tensors)),
        )
    hf_config = _with_dtype(origin.hf_config, tensors[0].dtype.name)
    text = json.dumps(hf_config, indent=2, ensure_ascii=False)
    (partial / "config.json").write_text(text + "\n", encoding="utf-8")
    (partial / _MARK).unlink()
    partial.replace(out)
    return sum(tensor.nbytes for tensor in tensors)


def _trained(
    origin: Origin, saved: SavedParams, dtype: str | None, run: Path
) -> Iterator[Outgoing]:
    """The trained tensors under the origin's names, read from the checkpoint when written."""

    def rows(piece: Piece) -> Iterator[np.ndarray]:
        return saved.blocks(piece.leaf, piece.entry)

    config = _layout(origin.config, saved, run)
    dtypes = {name: np.dtype(dtype or array.dtype) for name, array in saved.arrays.items()}
    shapes = {name: array.shape for name, array in saved.arrays.items()}
    for tensor in hf_tensors(config, shapes):
        if "text_config" in origin.hf_config and tensor.name.startswith("model."):
            name = TEXT_PREFIX + tensor.name.removeprefix("model.")
            tensor = dataclasses.replace(tensor, name=name)
        yield outgoing(tensor, dtypes, rows)


def _untouched(origin: Origin) -> Iterator[Outgoing]:
    for name, stored in origin.rest.items():
        yield Outgoing(name, stored.dtype, stored.shape, stored.blocks)


def _layout(config: ModelConfig, saved: SavedParams, run: Path) -> ModelConfig:
    """The config whose parameters the checkpoint holds: layer by layer, or stacked (``scan``)."""
    found = {name: array.shape for name, array in saved.arrays.items()}
    odd: dict[bool, list[str]] = {}
    for scan in (False, True):
        wanted = _shapes(dataclasses.replace(config, scan=scan))
        odd[scan] = [n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n)]
    scan = len(odd[True]) < len(odd[False])
    layout = dataclasses.replace(config, scan=scan)
    if odd[scan]:
        name, wanted = min(odd[scan]), _shapes(layout)
        raise CheckpointError(
            f"{saved.path} is not of the model in {run / 'config.json'}: {len(odd[scan])} arrays "
            f"differ, {name} is {found.get(name, 'absent')}, "
            f"expected {wanted.get(name, 'absent')}"
        )
    return layout


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: like.shape for name, like in leaf_names(LanguageModel(config).shapes).items()}


def _with_dtype(hf_config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A ``config.json`` that says ``dtype``, wherever it said one."""
    new = dict(hf_config)
    if isinstance(new.get("text_config"), dict):
        new["text_config"] = _with_dtype(new["text_config"], dtype)
    keys = [key for key in ("dtype", "torch_dtype") if key in new]
    return new | dict.fromkeys(keys or ["torch_dtype"], dtype)


def main(_: Sequence[str]) -> None:
    """Entry point."""
    logging.set_verbosity(logging.WARNING)
    # an accelerator may be in use by a training run
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    given = flags.FLAGS
    if given.max_shard_gb <= 0:
        raise app.UsageError(f"--max_shard_gb={given.max_shard_gb} must be above 0")
    max_shard_bytes = int(given.max_shard_gb * 1e9)
    n_bytes = export(given.checkpoint, Path(given.out), given.dtype, max_shard_bytes)
    say(f"[export] wrote {given.out}: {n_bytes / 1e9:.3g} GB of weights")


if __name__ == "__main__":
    flags.DEFINE_string("checkpoint", None, "A stage's folder RUN/checkpoints/STAGE[:STEP].")
    flags.DEFINE_string("out", None, "The new folder.")
    flags.DEFINE_enum("dtype", None, DTYPES, "Cast the weights; as they were saved by default.")
    flags.DEFINE_float("max_shard_gb", 5.0, "Largest size of one file, in 1e9 bytes.")
    entry.run(main, ["checkpoint", "out"], errors=(CheckpointError, DataError))
