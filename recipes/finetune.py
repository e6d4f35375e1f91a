"""Fine-tune a causal language model on examples: all its parameters, or adapters (`lora.r`).

    accelerate launch --config_file accelerate_configs/cpu.yaml \\
        recipes/finetune.py --config recipes/configs/finetune_tiny.yaml

Also under `torchrun --nproc_per_node 2 recipes/finetune.py ...` and plain `python`. Without a
config and a model it runs the demo's, on what `make demo` trained. The same command on the same
output_dir resumes.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from toolkit import checkpoint, config, hub, ranks
from toolkit.adapters.coverage import coverage_lines, idle_adapters
from toolkit.adapters.lora import add_adapters
from toolkit.checkpoint import disk, resuming, run_dir
from toolkit.config.settings import FinetuneConfig
from toolkit.data import finetune as finetune_data
from toolkit.data.tokens.tokenizer import own_tokenizer
from toolkit.data.training_data import TrainingData
from toolkit.errors import CheckpointError
from toolkit.export import export_step, exported, prove
from toolkit.formats import local_folder
from toolkit.loading.pretrained import check_fits, init_weights, load_pretrained, materialise
from toolkit.models import causal_lm as models
from toolkit.models import quantise
from toolkit.models.packed_linear import count_values
from toolkit.models.peft_model import base_of
from toolkit.sharding.fsdp import apply_fsdp, init_mesh, mesh_shape, unshard_early
from toolkit.sharding.unit_table import ledger_line, unit_table
from toolkit.training import launch
from toolkit.training import step as training
from toolkit.training.early_stopping import KEY as STOPPING
from toolkit.training.early_stopping import early_stopping
from toolkit.training.generation import encoded_prompts, generate
from toolkit.training.metrics import SAMPLES, Clock, Metrics, evaluation_metrics, keep_until
from toolkit.training.model_flops import training_flops
from toolkit.training.neftune import EmbeddingNoise
from toolkit.training.optim import build_optimizer, build_scheduler

DEMO_CONFIG = Path(__file__).parent / "configs" / "finetune_tiny.yaml"


def main() -> None:
    own = any(a.startswith(("--config", "--model")) for a in sys.argv[1:])
    cfg = config.parse(
        FinetuneConfig, default_file=None if own else DEMO_CONFIG, defaults=launch.settings()
    )
    with launch.start() as run:
        if not own:
            run.say(f"no --config and no model given: running the demo's config, {DEMO_CONFIG}")
        finetune(cfg, run)


def finetune(cfg: FinetuneConfig, run: launch.Run) -> None:
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
    ranks.on_all(lambda: quantise.check_quantisation(cfg.lora, cfg.sharding, cfg.model, run.device))
    adapted = cfg.model.name_or_path if cfg.lora.r else None
    hub.check(cfg.hub, run.say, adapted=adapted)
    model_cfg = ranks.on_all(lambda: own_tokenizer(config.model_settings(cfg)))
    base = ranks.on_all(lambda: models.build_on_meta(model_cfg))
    ranks.on_all(lambda: models.check_causal(base))
    ranks.on_all(lambda: models.check_layerdrop(base.config))
    weights = local_folder(cfg.model.name_or_path, cfg.model.revision)
    if cfg.model.init == "pretrained":
        ranks.on_all(lambda: check_fits(base, weights))
    data = finetune_data.prepare(cfg, base, model_cfg, run)
    tokenizer = data.tokenizer

    # ---- Adapters, where asked for, and the shards -----------------------------------------------
    if cfg.lora.load_in_4bit:
        ranks.on_all(lambda: quantise.quantise_on_meta(base, cfg.lora, cfg.sharding.param_dtype))
    model: torch.nn.Module = base
    if cfg.lora.r:
        model = ranks.on_all(lambda: add_adapters(base, cfg.lora))
    ranks.on_all(lambda: apply_fsdp(model, mesh, cfg.sharding))
    if tokenizer is not None:  # what cannot be answered is refused now, not at an evaluation
        ranks.on_all(
            lambda: encoded_prompts(
                base,
                tokenizer,
                cfg.train.eval_prompts,
                max_new_tokens=cfg.train.eval_max_new_tokens,
                chat=tokenizer.chat_template is not None,
            )
        )

    # ---- Where an earlier start left off ---------------------------------------------------------
    ranks.on_main(lambda: run_dir.hold(folder))
    found = checkpoint.find(root, model, data)
    max_steps = data.max_steps
    disk.preflight(model, folder, cfg.checkpoint, max_steps, run.say)

    # ---- Model: bytes into the shards ------------------------------------------------------------
    if found is not None and not cfg.lora.r:
        materialise(base, run.device)
    elif cfg.model.init == "random":
        init_weights(model, run.device, cfg.seed)
    else:
        report = load_pretrained(model, weights, run.device, seed=cfg.seed)
        run.say(
            f"loaded {cfg.model.name_or_path}: {report.tensors} tensors, "
            f"{report.file_bytes / 1e9:.2f} GB, "
            f"this rank read {report.bytes_requested / 1e9:.2f} GB in {report.seconds:.1f} s"
        )
    launch.seed_everything(cfg.seed, run.rank)
    optimizer = build_optimizer(model, cfg.optim)
    scheduler = build_scheduler(optimizer, cfg.optim, max_steps)
    stopping = early_stopping(cfg.train, cfg.checkpoint)
    state = checkpoint.TrainState(model, optimizer, scheduler, data.position)
    if found is not None:
        checkpoint.restore(state, found)
        run.say(f"resuming {folder} after step {state.step} (from {found})")
        if stopping is not None and STOPPING in state.extra:
            stopping.load_state_dict(state.extra[STOPPING])
    ranks.on_main(lambda: run_dir.record(folder, cfg))
    ranks.on_main(lambda: keep_until(folder / SAMPLES, state.step))
    if cfg.train.neftune_noise_alpha is not None:
        EmbeddingNoise(model, cfg.train.neftune_noise_alpha)
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
    run.say(describe(model, cfg, data, run))
    if found is None and (supervision := ranks.on_main(data.report)):
        run.say(supervision)
    stopped = stopping is not None and stopping.stop
    if first_step >= max_steps or stopped:
        why = "it had stopped early" if stopped else f"train.max_steps is {max_steps}"
        run.say(f"nothing to do: {first_step} steps are done, {why}")

    # ---- The loop --------------------------------------------------------------------------------
    model.train()
    step = saved_at = first_step
    for step, micro_batches in () if stopped else data.steps(after=first_step):
        unshard_early(model)
        stats = training.train_step(
            model,
            optimizer,
            micro_batches,
            max_grad_norm=cfg.optim.max_grad_norm,
            sync_each=cfg.train.sync_each_batch,
            label_smoothing=cfg.train.label_smoothing_factor,
        )
        learning_rate = float(scheduler.get_last_lr()[0])
        scheduler.step()
        data.position.advance()

        evaluated = {}
        if data.evals and (step == max_steps or due(step, cfg.train.eval_steps)):
            with metrics.pause():
                evaluated = evaluation_metrics(training.evaluate_sources(model, data.evals))
                answer_prompts(model, tokenizer, cfg, folder, step, run)
            if stopping is not None and stopping.update(evaluated):
                stopped = True
                run.say(
                    f"stopping early at step {step}: {stopping.metric} was not better than "
                    f"{stopping.best} in {stopping.waited} evaluation(s)"
                )
        metrics.step(step, stats, learning_rate, **evaluated)
        if cfg.lora.r and step == first_step + 5 and (idle := idle_adapters(model)):
            run.say(  # not at the first step, whose learning rate a warm-up makes zero
                f"WARNING: {len(idle)} adapters get no gradient, such as {idle[0]}: the model "
                "reads their weights without a forward; name them in lora.exclude_modules"
            )

        last = stopped or step == max_steps
        if last or due(step, cfg.checkpoint.save_steps):
            metrics.check_finite(step)
            state.step, state.tokens, state.metrics = step, metrics.tokens, evaluated
            if stopping is not None:
                state.extra[STOPPING] = stopping.state_dict()
            with metrics.pause():
                saved_at = step
                path = checkpoint.save(state, root, cfg.checkpoint)
                run.say(f"{'saving' if cfg.checkpoint.async_save else 'saved'} {path}")
                for line in data.reading_lines():
                    run.say(line)
                if cfg.lora.r:
                    run.say(proven(model, path))
        if (last and cfg.checkpoint.export_at_end) or due(step, cfg.checkpoint.export_steps):
            metrics.check_finite(step)
            with metrics.pause():
                run.say(f"exported {export_step(model, folder, step)}")
        if last:
            break
    checkpoint.wait()
    if step == first_step and cfg.checkpoint.export_at_end and not exported(folder, step):
        run.say(f"exported {export_step(model, folder, step)}")

    # ---- What was done, and what comes next ------------------------------------------------------
    summary = metrics.close()
    if summary["first_loss"] is not None:
        run.say(
            f"\ndone: step {first_step + 1} to {step} in {summary['seconds']:.0f} s, "
            f"loss {summary['first_loss']:.4f} -> {summary['loss']:.4f}"
            + (
                f", eval perplexity {summary['eval_perplexity']:.1f}"
                if "eval_loss" in summary
                else ""
            )
        )
    export = f"toolkit consolidate {folder} --output {run_dir.export_path(folder)}"
    run.say(
        f"run        {folder}\n"
        f"checkpoint {root / 'checkpoints'}  (newest: step {saved_at})\n"
        f"next       {export}" + ("   (--merge: with the base)" if cfg.lora.r else "")
    )
    hub.publish(folder, cfg.hub, run.say)


def answer_prompts(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    cfg: FinetuneConfig,
    folder: Path,
    step: int,
    run: launch.Run,
) -> None:
    """Let the model answer `train.eval_prompts`: shown, and kept in samples.jsonl of the run."""
    prompts = cfg.train.eval_prompts
    if not prompts or tokenizer is None:
        return
    answers = generate(
        model,
        tokenizer,
        prompts,
        max_new_tokens=cfg.train.eval_max_new_tokens,
        chat=tokenizer.chat_template is not None,
    )
    ranks.on_main(lambda: keep_answers(folder / SAMPLES, step, prompts, answers))


def keep_answers(file: Path, step: int, prompts: list[str], answers: list[str]) -> None:
    with open(file, "a", encoding="utf-8") as f:
        for prompt, answer in zip(prompts, answers, strict=True):
            print(f"step {step}  {prompt!r}\n    {answer!r}", flush=True)
            f.write(json.dumps({"step": step, "prompt": prompt, "answer": answer}) + "\n")


def proven(model: torch.nn.Module, path: str) -> str:
    """Prove the adapter of a checkpoint; one that does not come back is set aside."""
    try:
        return prove(model, path)
    except CheckpointError as error:
        resuming.quarantine(path, str(error))
        raise


def due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def describe(
    model: torch.nn.Module,
    cfg: FinetuneConfig,
    data: TrainingData,
    run: launch.Run,
) -> str:
    """Return the lines that a run opens with: model, adapters, dtypes, data, batch."""
    base = base_of(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = count_values(model)
    return "\n".join(
        [
            f"model      {models.plain_name(base)}, {total / 1e6:,.1f} M parameters, "
            f"{cfg.model.init} weights; {trained / 1e6:,.2f} M are trained",
            *(coverage_lines(model) if cfg.lora.r else []),
            *filter(None, [quantise.describe(model, mesh_shape(run.world_size, cfg.sharding)[1])]),
            *unit_table(model, cfg.sharding).splitlines(),
            f"dtypes     {ledger_line(model, cfg.sharding)}",
            *data.lines(),
        ]
    )


if __name__ == "__main__":
    launch.guarded(main)
