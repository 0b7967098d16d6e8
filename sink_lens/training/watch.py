"""The chain's measures on every checkpoint of a training run, by the same passes and finders that ``trace`` uses.

Position 0 is studied, whether or not it is a sink.
"""

import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import pandas as pd
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..chain.chain_measures import chain_measures
from ..configuration import make_config
from ..data.corpora import bundled_text
from ..data.tokens import TokenBatch, from_tensor, from_text
from ..errors import InputError, ModelError, RunError, SinkLensError
from ..files import parse_json
from ..models.load import load
from ..models.running import switch_to_eval_mode
from ..models.wrapping import keep_random_state
from ..progress import tqdm
from ..records import RUN_FILE, Run, RunWriter, add_to_run, create_run, package_versions, read_run
from ..records.checkpoints import checkpoint_folders, model_identity
from ..schema import SINK_THRESHOLD
from ..signatures import takes
from ..text import plural
from .batches import load_training_rows
from .checkpoint_files import has_whole_state
from .checkpoint_folders import Checkpoint, Checkpoints, count_tokens_seen, find_checkpoints
from .config import WatchConfig, build_train_config

COLUMNS = {
    "step": "int64",
    "tokens": "int64",
    "measure": "str",
    "layer": "Int64",
    "position": "Int64",
    "threshold": "float64",
    "value": "float64",
    "unit": "str",
    "error": "string",
    "tokens_sha256": "str",
}
"""Columns of ``watch.parquet`` and their types. ``layer`` is missing for the whole model, -1 before layer 0."""

_IDENTITIES = "checkpoints.json"
"""File of a run folder: step -> [quick identity, content's identity] of the checkpoint that was measured."""


def measure_checkpoint(
    model: Checkpoint,
    tokens: TokenBatch,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    step: int,
    seen: int | None,
    threshold: float = SINK_THRESHOLD,
    device: str | None = None,
) -> pd.DataFrame:
    """Measure the chain on one checkpoint, and return its rows of ``watch.parquet``.

    A model that is being trained goes on as if nothing had happened; it is not wrapped for several devices. A
    checkpoint's folder is loaded on ``device``. ``step`` and ``seen`` are the optimiser steps and tokens so far.

    Raises:
        ModelError, InputError: the checkpoint cannot be loaded, or cannot be measured on these tokens.
    """
    ours = not isinstance(model, PreTrainedModel)
    with keep_random_state(), contextlib.nullcontext() if ours else switch_to_eval_mode(model):
        lens = load(model, tokenizer=tokenizer, device=device if ours else None)
        frame = chain_measures(lens, tokens, threshold=threshold)
    return _with_step_columns(frame, step=step, seen=seen, tokens=tokens)


@takes(WatchConfig, loads=True)
def watch(
    run_folder: Checkpoints,
    *,
    config: WatchConfig | None = None,
    tokens: TokenBatch | None = None,
    writer: RunWriter | None = None,
    progress: bool = True,
    **fields: Any,
) -> pd.DataFrame:
    """Measure the chain on every checkpoint of a training; return the table, which is also ``watch.parquet``.

    A run of ``sink-lens train`` keeps the table itself. Other checkpoints (a folder of ``checkpoint-*`` of the Hugging
    Face Trainer, step -> what ``load`` takes) get a run folder of their own. A stopped watch goes on where it was. A
    checkpoint that cannot be read becomes one row whose ``error`` says why, and a warning; it is tried again the next
    time.

    Args:
        run_folder: the run, finished or not, or other checkpoints (see ``checkpoint_folders.find_checkpoints``).
        config: the defaults if None; ``run_folder`` wins over the folder that it names.
        tokens: sequences to use instead of the run's own evaluation data (the bundled prose if it has none).
        writer: writer of the run folder, if the caller has it open already.
        progress: show a bar.
        **fields: of ``WatchConfig``; they win over ``config``.

    Raises:
        RunError: no checkpoints, a run that is in use, or what was measured before on other tokens.
        InputError: the sequences or thresholds cannot be used.
    """
    named = {"run": run_folder if isinstance(run_folder, str | Path) else "checkpoints"}
    config = make_config(WatchConfig, config, named | fields, where="watch")
    if not _is_run_folder(run_folder):
        return _watch_other_checkpoints(run_folder, config=config, tokens=tokens, progress=progress)
    if config.out is not None or config.step_tokens is not None:
        raise InputError(
            f"{run_folder} is a run, which keeps its own watch.parquet and counts its tokens; out and step_tokens are "
            "for other checkpoints."
        )
    run = read_run(run_folder)
    checkpoints = checkpoint_folders(run)
    tokenizer = load_run_tokenizer(run)
    if tokens is None:
        tokens = load_evaluation_tokens(
            run, tokenizer, sequences=config.sequences, length=config.length
        )
    step_tokens = run.config["length"] * run.config["batch"]
    with add_to_run(run.folder) if writer is None else contextlib.nullcontext(writer) as kept:
        return _measure_missing_checkpoints(
            checkpoints,
            tokens,
            writer=kept,
            tokenizer=tokenizer,
            seen=lambda step: step * step_tokens,
            config=config,
            progress=progress,
        )


def _is_run_folder(source: Checkpoints) -> TypeGuard[str | Path]:
    """Check whether ``source`` is a run's folder, or a path at which nothing is yet."""
    return isinstance(source, str | Path) and (
        (Path(source) / RUN_FILE).exists() or not Path(source).exists()
    )


def watch_output_folder(config: WatchConfig) -> Path:
    """Return the folder of the measurements: the run's, else ``out`` or ``runs/watch-NAME``."""
    if config.out is not None:
        return Path(config.out)
    if _is_run_folder(config.run):
        return Path(config.run)
    return Path("runs") / f"watch-{Path(config.run).resolve().name}"


def _watch_other_checkpoints(
    source: Checkpoints, *, config: WatchConfig, tokens: TokenBatch | None, progress: bool
) -> pd.DataFrame:
    """Measure checkpoints that ``sink-lens train`` did not write, into a run folder of their own; return its table.

    If ``tokens`` is None, the bundled prose is read, with the tokenizer of the first checkpoint that can be loaded.
    """
    checkpoints = find_checkpoints(source)
    if tokens is None:
        *others, last = checkpoints.values()
        for one in others:  # damaged ones are skipped
            with contextlib.suppress(ModelError):
                lens = load(one, device=config.device)
                break
        else:
            lens = load(last, device=config.device)
        if lens.tokenizer is None:
            raise InputError(
                f"{lens.name} has no tokenizer; need one beside the weights, or pass tokens=..."
            )
        tokens = from_text(
            bundled_text(),
            lens.tokenizer,
            sequences=config.sequences,
            length=min(config.length, lens.n_context or config.length),
            name="moby_dick",
        )
    named = str(source) if isinstance(source, str | Path) else [str(step) for step in checkpoints]
    with create_run(
        watch_output_folder(config),
        kind="watch",
        config={"checkpoints": named},
        provenance={
            "tokens_sha256": tokens.hash,
            "token_source": tokens.source,
            "versions": package_versions(),
        },
        expects=("watch",),
        reopen=True,
        overwrite=not config.resume,
    ) as kept:
        return _measure_missing_checkpoints(
            checkpoints,
            tokens,
            writer=kept,
            tokenizer=None,
            seen=lambda step: count_tokens_seen(
                checkpoints[step], step=step, step_tokens=config.step_tokens
            ),
            config=config,
            progress=progress,
        )


def _measure_missing_checkpoints(
    checkpoints: Mapping[int, Checkpoint],
    tokens: TokenBatch,
    *,
    writer: RunWriter,
    tokenizer: PreTrainedTokenizerBase | None,
    seen: Callable[[int], int | None],
    config: WatchConfig,
    progress: bool,
) -> pd.DataFrame:
    """Measure the checkpoints that the run folder's table ``watch`` lacks, write it after each, and return it.

    ``seen`` gives the number of tokens trained on until a step.
    """
    frame, identities = pd.DataFrame(columns=list(COLUMNS)).astype(COLUMNS), dict[int, list[str]]()
    if config.resume and "watch" in (tables := read_run(writer.folder).tables):
        frame = _reusable_rows(tables["watch"], writer.folder, tokens, threshold=config.threshold)
        frame, identities = _rows_of_same_checkpoints(frame, writer.folder, checkpoints)
    have = set(frame["step"].tolist())
    counted = {step: seen(step) for step in have & set(checkpoints)}
    told = [
        old if (new := counted.get(step)) is None else new
        for step, old in zip(frame["step"], frame["tokens"], strict=True)
    ]
    recounted = _with_column_types(frame.assign(tokens=told))
    if not recounted.equals(frame):
        frame = recounted
        writer.write_table("watch", frame)
    missing = {step: path for step, path in checkpoints.items() if step not in have}
    for step, path in tqdm(
        missing.items(), desc="watching", unit="checkpoint", disable=not progress, leave=False
    ):
        identities[step] = [_identify(path), _identify(path, content=True)]  # before it is measured
        try:
            if isinstance(path, Path) and (path / "checkpoint.json").exists():
                has_whole_state(path, content=True)  # refuses a damaged one
            rows = measure_checkpoint(
                path,
                tokens,
                tokenizer=tokenizer,
                step=step,
                seen=seen(step),
                threshold=config.threshold,
                device=config.device,
            )
        except SinkLensError as error:
            warnings.warn(f"checkpoint {step} is left out: {error}", stacklevel=2)
            failed = pd.DataFrame([{"measure": "error", "unit": "", "error": str(error)}])
            rows = _with_step_columns(failed, step=step, seen=seen(step), tokens=tokens)
        frame = pd.concat([frame, rows], ignore_index=True).sort_values(
            "step", kind="stable", ignore_index=True
        )
        writer.write_table("watch", frame)
        writer.write_text(_IDENTITIES, json.dumps(identities))
    return frame


def _identify(checkpoint: Checkpoint, *, content: bool = False) -> str:
    """Return a hash by which a checkpoint is told from another of the same step."""
    if not isinstance(checkpoint, PreTrainedModel):
        return model_identity(checkpoint, content=content)
    digest = hashlib.sha256(checkpoint.config.to_json_string().encode())
    for parameter in checkpoint.parameters():
        digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _rows_of_same_checkpoints(
    frame: pd.DataFrame, folder: Path, checkpoints: Mapping[int, Checkpoint]
) -> tuple[pd.DataFrame, dict[int, list[str]]]:
    """Return the rows of checkpoints that are still the ones that were measured, and step -> their identities.

    Rows of checkpoints that are gone are kept if those that are there are the same; else a warning says what is left
    out.
    """
    try:
        known = parse_json((folder / _IDENTITIES).read_text("utf-8"))
    except (OSError, ValueError):
        known = {}
    steps, same = set(frame["step"].tolist()), dict[int, list[str]]()
    for step in sorted(steps & set(checkpoints)):
        before = known.get(str(step)) if isinstance(known, dict) else None
        if not (isinstance(before, list) and before):
            continue
        quick = _identify(checkpoints[step])
        if before[0] == quick:
            same[step] = before
        elif before[-1] == (content := _identify(checkpoints[step], content=True)):  # moved
            same[step] = [quick, content]
    changed = (steps & set(checkpoints)) - set(same)
    gone = steps - set(checkpoints) if changed else set()
    if gone:
        warnings.warn(
            f"checkpoint {min(changed)} in {folder} is another than was measured, so that those that are gone "
            f"({', '.join(map(str, sorted(gone)))}) are taken to be of an earlier training and left out",
            stacklevel=3,
        )
    return frame.loc[~frame["step"].isin(sorted(changed | gone))].reset_index(drop=True), same


def _with_step_columns(
    frame: pd.DataFrame, *, step: int, seen: int | None, tokens: TokenBatch
) -> pd.DataFrame:
    whole = frame.assign(
        step=step, tokens=pd.NA if seen is None else seen, tokens_sha256=tokens.hash
    )
    return _with_column_types(whole.reindex(columns=list(COLUMNS)))


def _with_column_types(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.astype(
        COLUMNS | ({"tokens": "Int64"} if frame["tokens"].isna().to_numpy().any() else {})
    )


def _reusable_rows(
    frame: pd.DataFrame, folder: Path, batch: TokenBatch, *, threshold: float
) -> pd.DataFrame:
    whole = frame.loc[frame["error"].isna()]
    what = f"{folder}/watch.parquet was measured"
    todo = "Give the same, or measure all again (again=True)."
    if others := sorted(set(whole["tokens_sha256"].tolist()) - {batch.hash}):
        raise RunError(
            f"{what} on other tokens ({others[0][:12]}; these are {batch.hash[:12]}); need the same. {todo}"
        )
    levels = sorted(whole["threshold"].dropna().unique().tolist())
    if len(whole) and threshold not in levels:
        raise RunError(
            f"{what} at the thresholds {', '.join(f'{one:g}' for one in levels)}, not {threshold:g}. {todo}"
        )
    return _with_column_types(whole).reset_index(drop=True)


def load_run_tokenizer(run: Run) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer in a training run's newest checkpoint; return None if it has none."""
    folder = list(checkpoint_folders(run).values())[-1]
    if not (folder / "tokenizer_config.json").is_file():
        return None
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # tokenizers raises a bare Exception
        raise RunError(
            f"{folder} cannot be read ({error}); need the tokenizer's files as they were saved"
        ) from error


def load_evaluation_tokens(
    run: Run, tokenizer: PreTrainedTokenizerBase | None, *, sequences: int, length: int
) -> TokenBatch:
    """Load the first ``length`` tokens of a run's evaluation sequences, or else pieces of the bundled prose.

    The prose is used, with a warning, if the data has changed since or was given to ``train`` as rows. If there are
    fewer sequences than ``sequences``, all are returned, with a warning.

    Raises:
        RunError: there is neither evaluation data nor a tokenizer.
        InputError: the prose is too short for so many sequences.
    """
    length = min(length, run.config["length"])
    why = "it was given as rows" if run.provenance.get("data_source") == "given" else ""
    if not why:
        try:
            config = build_train_config(run.config, where=str(run.folder), eval_sequences=sequences)
            corpus = load_training_rows(config, progress=False)
        except SinkLensError as error:
            why = str(error)
        else:
            if corpus.sha256 == run.provenance.get("data_sha256"):
                rows: Any = corpus.evaluation
                if len(rows) < sequences:
                    warnings.warn(
                        f"{run.folder} has {plural(len(rows), 'held-out sequence')}, fewer than the {sequences} that "
                        "were asked for: all are measured",
                        stacklevel=3,
                    )
                ids = torch.stack([rows[index]["input_ids"][:length] for index in range(len(rows))])
                batch = from_tensor(ids, tokenizer=tokenizer)
                return replace(batch, source=f"evaluation:{corpus.source}")
            why = f"{corpus.source} has changed since"
    if tokenizer is None:
        raise RunError(
            f"the data of {run.folder} cannot be read ({why}), and it has no tokenizer for other text; need one of "
            "them. Pass tokens=..."
        )
    warnings.warn(
        f"{run.folder} is measured on the bundled prose: its own data cannot be read ({why})",
        stacklevel=3,
    )
    return from_text(
        bundled_text(), tokenizer, sequences=sequences, length=length, name="moby_dick"
    )
