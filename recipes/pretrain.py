"""Pretrain a causal language model, from random weights or from a checkpoint, sharded with FSDP2.

    accelerate launch --config_file accelerate_configs/cpu.yaml \\
        recipes/pretrain.py --config recipes/configs/pretrain_tiny.yaml --train.max_steps 20

Also under `torchrun --nproc_per_node 2 recipes/pretrain.py ...` and plain `python`. Without a
config and a model it runs the demo's. The same command on the same output_dir resumes.
"""

import math
import sys
from itertools import islice
from pathlib import Path

from toolkit import (
    checkpoint,
    config,
    disk,
    launch,
    models,
    publish,
    ranks,
    run_dir,
    training,
)
from toolkit.config import PretrainConfig
from toolkit.data.order import EvalBatches, GlobalBatches, Position, SampleOrder, accumulation_for
from toolkit.data.samples import Samples, check_enough, split
from toolkit.data.text import load_documents
from toolkit.data.tokenise import tokenise
from toolkit.data.tokenizer import check_vocabulary, load_tokenizer, prepare_tokenizer
from toolkit.hf_format import assets_of, local_folder, read_weights, weight_files
from toolkit.live_export import export_step, exported
from toolkit.loading import check_fits, init_weights, load_pretrained, materialise
from toolkit.metrics import Clock, Metrics, flops_per_token, perplexity
from toolkit.optim import build_optimizer, build_scheduler
from toolkit.sharding import apply_fsdp, init_mesh, unshard_early
from toolkit.unit_table import ledger_line, unit_table

DEMO_CONFIG = Path(__file__).parent / "configs" / "pretrain_tiny.yaml"


def main() -> None:
    own = any(a.startswith(("--config", "--model")) for a in sys.argv[1:])
    cfg = config.parse(
        PretrainConfig, default_file=None if own else DEMO_CONFIG, defaults=launch.settings()
    )
    with launch.start() as run:
        if not own:
            run.say(f"no --config and no model given: running the demo's config, {DEMO_CONFIG}")
        pretrain(cfg, run)


def pretrain(cfg: PretrainConfig, run: launch.Run) -> None:
    # ---- What can be refused is refused here, before anything is loaded --------------------------
    ranks.together(lambda: run_dir.reach(cfg))
    folder = ranks.together(lambda: run_dir.claim(cfg))
    root = ranks.together(lambda: run_dir.root_of(cfg))
    mesh = ranks.together(lambda: init_mesh(run.device.type, run.world_size, cfg.sharding))
    if cfg.model.trust_remote_code:
        run.say(
            "WARNING: model.trust_remote_code is on: Python code that comes with "
            f"{cfg.model.name_or_path} runs with your rights"
        )
    ranks.together(lambda: refuse_misfits(cfg))
    ranks.on_main(lambda: publish.check(cfg.hub, run.say))
    model_cfg = ranks.main_first(
        lambda: prepare_tokenizer(
            cfg.model, cfg.data, folder / run_dir.TOKENIZER, keep=run_dir.holds_work(folder)
        )
    )
    model = ranks.together(lambda: models.build_on_meta(model_cfg))
    ranks.together(lambda: models.check_causal(model))
    ranks.together(lambda: models.check_layerdrop(model.config))
    weights = local_folder(cfg.model.name_or_path, cfg.model.revision)
    if cfg.model.init == "pretrained":
        ranks.together(lambda: check_fits(model, weights))
    ranks.together(lambda: apply_fsdp(model, mesh, cfg.sharding))
    check_disk(model, folder, cfg, None if cfg.train.max_steps == -1 else cfg.train.max_steps, run)
    train_set, eval_set = ranks.main_first(lambda: load_data(model, model_cfg, cfg))
    ranks.together(lambda: check_enough(train_set, run.world_size))

    # ---- Where an earlier start left off ---------------------------------------------------------
    ranks.on_main(lambda: run_dir.hold(folder))
    found = checkpoint.newest(root)
    if found is None:
        ranks.together(lambda: checkpoint.refuse_lost(root))
    batch_size = cfg.train.per_device_train_batch_size
    global_batch = batch_size * cfg.train.gradient_accumulation_steps * run.world_size
    position = Position(len(train_set), cfg.seed, global_batch)
    if found is not None:
        ranks.together(lambda: checkpoint.check_same_model(model, found))
        saved = ranks.together(lambda: checkpoint.read_state(found))
        ranks.together(lambda: position.load_state_dict(saved["data"]))
    accumulation = ranks.together(
        lambda: accumulation_for(position.global_batch, batch_size, run.world_size)
    )
    max_steps = cfg.train.max_steps
    if max_steps == -1:
        max_steps = math.ceil(cfg.train.num_train_epochs * len(train_set) / position.global_batch)
        check_disk(model, folder, cfg, max_steps, run)

    # ---- Model: bytes into the shards ------------------------------------------------------------
    if found is not None:
        materialise(model, run.device)
    elif cfg.model.init == "random":
        init_weights(model, run.device, cfg.seed)
    else:
        report = load_pretrained(model, weights, run.device)
        run.say(
            f"loaded {cfg.model.name_or_path}: {report.tensors} tensors, "
            f"{report.file_bytes / 1e9:.2f} GB, "
            f"this rank read {report.bytes_requested / 1e9:.2f} GB in {report.seconds:.1f} s"
        )
    launch.seed_everything(cfg.seed, run.rank)
    optimizer = build_optimizer(model, cfg.optim)
    scheduler = build_scheduler(optimizer, cfg.optim, max_steps)
    state = checkpoint.TrainState(model, optimizer, scheduler, position)
    if found is not None:
        checkpoint.restore(state, found)
        run.say(f"resuming {folder} after step {state.step} (from {found})")
    ranks.on_main(lambda: run_dir.record(folder, cfg))

    # ---- Data: the same samples in the same order for any number of ranks ------------------------
    first_step = state.step
    batches = run.loader(
        train_set,
        GlobalBatches(
            SampleOrder(len(train_set), cfg.seed),
            position.samples_seen,
            max(0, max_steps - first_step),
            batch_size,
            accumulation,
            run.world_size,
        ),
        cfg.data.num_workers,
    )
    metrics = Metrics(
        folder,
        clock=clock(model, cfg, position.global_batch, run.world_size),
        is_main=run.is_main,
        device=run.device,
        first_step=first_step,
        max_steps=max_steps,
        tokens=state.tokens,
        logging_steps=cfg.train.logging_steps,
        disable_tqdm=cfg.metrics.disable_tqdm,
    )
    run.say(describe(model, cfg, train_set, eval_set, position, accumulation, run))
    if first_step >= max_steps:
        run.say(f"nothing to do: {first_step} steps are done, train.max_steps is {max_steps}")

    # ---- The loop --------------------------------------------------------------------------------
    model.train()
    saved_at = first_step if found is not None else None
    stream = iter(batches)
    for step in range(first_step + 1, max_steps + 1):
        unshard_early(model)
        micro_batches = list(islice(stream, accumulation))
        stats = training.train_step(
            model,
            optimizer,
            micro_batches,
            max_grad_norm=cfg.optim.max_grad_norm,
            sync_each=cfg.train.sync_each_batch,
        )
        learning_rate = float(scheduler.get_last_lr()[0])
        scheduler.step()
        position.advance()

        evaluated = {}
        if eval_set is not None and (step == max_steps or due(step, cfg.train.eval_steps)):
            with metrics.pause():
                loss = float(training.evaluate(model, eval_batches(run, eval_set, cfg)))
            evaluated = {"eval_loss": loss, "eval_perplexity": perplexity(loss)}
        metrics.step(step, stats, learning_rate, **evaluated)

        if step == max_steps or due(step, cfg.checkpoint.save_steps):
            metrics.check_finite(step)
            state.step, state.tokens, state.metrics = step, metrics.tokens, evaluated
            with metrics.pause():
                saved_at = step
                path = checkpoint.save(state, root, cfg.checkpoint)
            run.say(f"{'saving' if cfg.checkpoint.async_save else 'saved'} {path}")
        at_end = step == max_steps and cfg.checkpoint.export_at_end
        if at_end or due(step, cfg.checkpoint.export_steps):
            metrics.check_finite(step)
            with metrics.pause():
                run.say(f"exported {export_step(model, folder, step)}")
    checkpoint.wait()
    if first_step >= max_steps and cfg.checkpoint.export_at_end and not exported(folder, max_steps):
        run.say(f"exported {export_step(model, folder, max_steps)}")

    # ---- What was done, and what comes next ------------------------------------------------------
    summary = metrics.close()
    if summary["first_loss"] is not None:
        run.say(
            f"\ndone: step {first_step + 1} to {max_steps} in {summary['seconds']:.0f} s, "
            f"loss {summary['first_loss']:.4f} -> {summary['loss']:.4f}"
            + (
                f", eval perplexity {summary['eval_perplexity']:.1f}"
                if "eval_loss" in summary
                else ""
            )
        )
    run.say(
        f"run        {folder}\n"
        f"checkpoint {root / 'checkpoints'}  (newest: step {saved_at})\n"
        f"next       toolkit consolidate {folder} --output {run_dir.export_path(folder)}"
    )
    ranks.on_main(lambda: publish.publish(folder, cfg.hub, run.say))


def check_disk(
    model: models.PreTrainedModel,
    folder: Path,
    cfg: PretrainConfig,
    max_steps: int | None,
    run: launch.Run,
) -> None:
    """Say what the run will write, and refuse it where the disk is too small."""
    saving = cfg.checkpoint
    needed = ranks.on_main(lambda: disk.need(model, folder, saving, max_steps, run.world_size))
    ranks.on_main(lambda: disk.refuse_overflow(needed, saving))
    run.say(f"disk       {needed}")


def refuse_misfits(cfg: PretrainConfig) -> None:
    """Refuse what is no causal LM, has too few positions, or lacks its weights."""
    hf_config = models.load_config(cfg.model)
    models.causal_lm_class(hf_config, cfg.model)
    models.check_positions(hf_config, cfg.data.sequence_length)
    if cfg.model.init == "pretrained":
        where = local_folder(cfg.model.name_or_path, cfg.model.revision)
        read_weights(weight_files(where, cfg.model.name_or_path, cfg.model.revision))


def load_data(
    model: models.PreTrainedModel, model_cfg: config.ModelConfig, cfg: PretrainConfig
) -> tuple[Samples, Samples | None]:
    """Return the training and the evaluation samples, tokenised and cut."""
    data, vocabulary = cfg.data, models.vocabulary_size(model)
    tokenizer = load_tokenizer(model_cfg)
    if tokenizer is not None:
        check_vocabulary(tokenizer, vocabulary, resize=cfg.model.resize_embeddings)
    documents = load_documents(data, data.train_files)
    if data.eval_files:  # read before the training text is tokenised: that may take an hour
        to_evaluate = load_documents(data, data.eval_files, what="data.eval_files")
    samples = Samples(tokenise(documents, tokenizer, data, vocabulary), data.sequence_length)
    if not data.eval_files:
        return split(samples, data.eval_split, data.max_eval_samples)
    held_out = Samples(tokenise(to_evaluate, tokenizer, data, vocabulary), data.sequence_length)
    return samples, held_out.view(0, min(len(held_out), data.max_eval_samples or len(held_out)))


def eval_batches(run: launch.Run, eval_set: Samples, cfg: PretrainConfig):
    size = cfg.train.per_device_eval_batch_size or cfg.train.per_device_train_batch_size
    return run.loader(eval_set, EvalBatches(len(eval_set), size, run.world_size))


def due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def clock(
    model: models.PreTrainedModel, cfg: PretrainConfig, global_batch: int, world: int
) -> Clock:
    text = model.config.get_text_config()
    width = getattr(text, "hidden_size", 0)
    looked_up = 0 if assets_of(model).tied else models.vocabulary_size(model) * width
    work = flops_per_token(
        sum(p.numel() for p in model.parameters()),
        looked_up,
        len(models.decoder_layers(model)),
        width,
        cfg.data.sequence_length,
    )
    return Clock(global_batch * cfg.data.sequence_length, work, world)


def describe(
    model: models.PreTrainedModel,
    cfg: PretrainConfig,
    train_set: Samples,
    eval_set: Samples | None,
    position: Position,
    accumulation: int,
    run: launch.Run,
) -> str:
    """Return the lines that a run opens with: model, dtypes, data, batch."""
    name = models.plain_name(model)
    held_out = 0 if eval_set is None else len(eval_set)
    return "\n".join(
        [
            f"model      {name}, {sum(p.numel() for p in model.parameters()) / 1e6:,.1f} M "
            "parameters, "
            f"{cfg.model.init} weights",
            *unit_table(model, cfg.sharding).splitlines(),
            f"dtypes     {ledger_line(model, cfg.sharding)}",
            f"data       {len(train_set):,} samples of {cfg.data.sequence_length} tokens to train "
            "on, "
            f"{held_out:,} to evaluate; {train_set.tokens_dropped} tokens at the end left over",
            f"batch      {position.global_batch} samples = {cfg.train.per_device_train_batch_size} "
            "a device "
            f"x {accumulation} accumulated x {run.world_size} process(es) on {run.device.type}",
        ]
    )


if __name__ == "__main__":
    launch.guarded(main)
