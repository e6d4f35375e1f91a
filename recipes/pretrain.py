"""Pretrain a causal language model, from random weights or from a checkpoint, sharded with FSDP2.

    accelerate launch --config_file accelerate_configs/cpu.yaml \\
        recipes/pretrain.py --config recipes/configs/pretrain_tiny.yaml --train.max_steps 20

Also under `torchrun --nproc_per_node 2 recipes/pretrain.py ...` and plain `python`. Without a
config and a model it runs the demo's. The same command on the same output_dir resumes.
"""

import sys
from pathlib import Path

from toolkit import checkpoint, config, hub, ranks
from toolkit.checkpoint import disk, run_dir
from toolkit.config.settings import PretrainConfig
from toolkit.data import pretrain as pretrain_data
from toolkit.data.tokens.tokenizer import prepare_tokenizer
from toolkit.data.training_data import TrainingData
from toolkit.export import export_step, exported
from toolkit.formats import local_folder
from toolkit.loading.pretrained import check_fits, init_weights, load_pretrained, materialise
from toolkit.models import causal_lm as models
from toolkit.sharding.fsdp import apply_fsdp, init_mesh, unshard_early
from toolkit.sharding.unit_table import ledger_line, unit_table
from toolkit.training import launch
from toolkit.training import step as training
from toolkit.training.metrics import Clock, Metrics, evaluation_metrics
from toolkit.training.model_flops import training_flops
from toolkit.training.optim import build_optimizer, build_scheduler

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
    ranks.on_all(lambda: run_dir.reach(cfg))
    folder = ranks.on_all(lambda: run_dir.claim(cfg))
    root = ranks.on_all(lambda: run_dir.root_of(cfg))
    mesh = ranks.on_all(lambda: init_mesh(run.device.type, run.world_size, cfg.sharding))
    if cfg.model.trust_remote_code:
        run.say(
            "WARNING: model.trust_remote_code is on: Python code that comes with "
            f"{cfg.model.name_or_path} runs with your rights"
        )
    ranks.on_all(lambda: models.check_usable(cfg.model, cfg.data.sequence_length))
    hub.check(cfg.hub, run.say)
    model_cfg = ranks.main_first(
        lambda: prepare_tokenizer(
            cfg.model, cfg.data, folder / run_dir.TOKENIZER, keep=run_dir.holds_work(folder)
        )
    )
    model = ranks.on_all(lambda: models.build_on_meta(model_cfg))
    ranks.on_all(lambda: models.check_causal(model))
    ranks.on_all(lambda: models.check_layerdrop(model.config))
    weights = local_folder(cfg.model.name_or_path, cfg.model.revision)
    if cfg.model.init == "pretrained":
        ranks.on_all(lambda: check_fits(model, weights))
    data = pretrain_data.prepare(cfg, model, model_cfg, run)
    ranks.on_all(lambda: apply_fsdp(model, mesh, cfg.sharding))

    # ---- Where an earlier start left off ---------------------------------------------------------
    ranks.on_main(lambda: run_dir.hold(folder))
    found = checkpoint.find(root, model, data)
    max_steps = data.max_steps
    disk.preflight(model, folder, cfg.checkpoint, max_steps, run.say)

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
    state = checkpoint.TrainState(model, optimizer, scheduler, data.position)
    if found is not None:
        checkpoint.restore(state, found)
        run.say(f"resuming {folder} after step {state.step} (from {found})")
    ranks.on_main(lambda: run_dir.record(folder, cfg))

    first_step = state.step
    metrics = Metrics(
        folder,
        clock=Clock(
            data.tokens_per_step,
            training_flops(model, cfg.data.sequence_length),
            run.world_size,
        ),
        is_main=run.is_main,
        device=run.device,
        first_step=first_step,
        max_steps=max_steps,
        tokens=state.tokens,
        logging_steps=cfg.train.logging_steps,
        disable_tqdm=cfg.metrics.disable_tqdm,
    )
    run.say(describe(model, cfg, data))
    if first_step >= max_steps:
        run.say(f"nothing to do: {first_step} steps are done, train.max_steps is {max_steps}")

    # ---- The loop --------------------------------------------------------------------------------
    model.train()
    saved_at = first_step if found is not None else None
    for step, micro_batches in data.steps(after=first_step):
        unshard_early(model)
        stats = training.train_step(
            model,
            optimizer,
            micro_batches,
            max_grad_norm=cfg.optim.max_grad_norm,
            sync_each=cfg.train.sync_each_batch,
        )
        learning_rate = float(scheduler.get_last_lr()[0])
        scheduler.step()
        data.position.advance()

        evaluated = {}
        if data.evals and (step == max_steps or due(step, cfg.train.eval_steps)):
            with metrics.pause():
                evaluated = evaluation_metrics(training.evaluate_sources(model, data.evals))
        metrics.step(step, stats, learning_rate, **evaluated)

        if step == max_steps or due(step, cfg.checkpoint.save_steps):
            metrics.check_finite(step)
            state.step, state.tokens, state.metrics = step, metrics.tokens, evaluated
            with metrics.pause():
                saved_at = step
                path = checkpoint.save(state, root, cfg.checkpoint)
            run.say(f"{'saving' if cfg.checkpoint.async_save else 'saved'} {path}")
            for line in data.reading_lines():
                run.say(line)
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
    hub.publish(folder, cfg.hub, run.say)


def due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def describe(model: models.PreTrainedModel, cfg: PretrainConfig, data: TrainingData) -> str:
    """Return the lines that a run opens with: model, dtypes, data, batch."""
    name = models.plain_name(model)
    return "\n".join(
        [
            f"model      {name}, {sum(p.numel() for p in model.parameters()) / 1e6:,.1f} M "
            "parameters, "
            f"{cfg.model.init} weights",
            *unit_table(model, cfg.sharding).splitlines(),
            f"dtypes     {ledger_line(model, cfg.sharding)}",
            *data.lines(),
        ]
    )


if __name__ == "__main__":
    launch.guarded(main)
