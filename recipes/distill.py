r"""Distill a frozen teacher into a smaller causal language model of the same vocabulary.

    accelerate launch --config_file accelerate_configs/cpu.yaml \
        recipes/distill.py --config recipes/configs/distill_tiny.yaml

`torchrun` and plain `python` work, too. Without a config and a model, the demo runs. The same
command on the same output_dir resumes the run.

Every rank makes every call below. If a call fails on one rank, it fails on all of them.
"""

from pathlib import Path

from toolkit import adapters, assembly, checkpoint, export, hub, objectives, planning, training
from toolkit.checkpoint import RunFolder, TrainState
from toolkit.config import DistillConfig
from toolkit.data.prepare import prepare_data
from toolkit.mesh import init_mesh
from toolkit.sharding import apply_fsdp
from toolkit.training import Run

DEMO = Path(__file__).parent / "configs" / "distill_tiny.yaml"


def distill(cfg: DistillConfig, run: Run) -> None:
    """Distill a teacher into a model from start to export, or resume the run in `output_dir`."""
    # ---- Checks, model, data and mesh; no weights are loaded yet ---------------------------------
    folder = RunFolder(cfg, run)  # locks output_dir for this run
    cfg = checkpoint.apply_adapter_settings(cfg)  # takes rank and targets from `lora.from`
    base, model_cfg = assembly.build(cfg, run, folder)  # on meta: shapes without values
    cfg = planning.resolve_auto(cfg, base, run, folder)  # settings on `auto` get values
    mesh = init_mesh(run.device.type, run.world_size, cfg.sharding)
    objective = objectives.build(cfg, mesh)  # the loss, its metrics and the teacher
    data = prepare_data(cfg, base, model_cfg, run, mesh, objective.metrics)
    model = adapters.prepare_adapters(base, cfg.adapters, cfg.sharding.param_dtype)
    assembly.check_before_loading(cfg, model, data, objective)
    sharded = apply_fsdp(model, mesh, cfg.sharding, fixed_length=data.fixed_length)

    # ---- The training state: new, or restored from a checkpoint ----------------------------------
    # The newest checkpoint that verifies, if there is one. The data position is set to it.
    saved = checkpoint.find_resumable(folder.root, model, data, cfg.checkpoint)
    objective.restore(model, data, folder.root, saved)  # reads stored values of the teacher
    assembly.load_weights(sharded, cfg, run, empty=saved is not None)  # and adapters of `lora.from`
    run.log(objective.prepare(sharded))  # loads the teacher, or stores its values and frees it
    training.seed_everything(cfg.seed, run.rank)
    optimizer = training.build_optimizer(model, cfg.optim)  # after sharding: its state is sharded
    scheduler = training.build_scheduler(optimizer, cfg.optim, data.max_steps)
    state = TrainState(model, optimizer, scheduler, data.position, files=objective.files)
    checkpoint.restore(state, saved)
    stopping = training.build_early_stopping(cfg.train, cfg.checkpoint, state.extra)
    folder.save_config(state, data, has_ended=stopping.should_stop)
    metrics = training.start_metrics(cfg, run, folder.path, sharded, data, state)
    exporter = export.Exporter(model, folder.path, cfg.checkpoint)
    training.add_embedding_noise(model, cfg.train.neftune_noise_alpha)

    # ---- The loop --------------------------------------------------------------------------------
    model.train()
    run.log(stopping.summarize(state.step))
    for step, micro_batches in data.steps(after=state.step) if not stopping.should_stop else ():
        update = training.Update(sharded, micro_batches, router=metrics.router)  # over all ranks
        for batch in update:
            loss = objective(model, batch)  # the sum over the targets of the micro-batch
            update.mean(loss).backward()  # its share of the mean over the global batch
        stats = update.step(optimizer, cfg.optim.max_grad_norm, metrics.guards.spikes)
        learning_rate = float(scheduler.get_last_lr()[0])
        scheduler.step()
        data.position.advance()
        training.collect_garbage(step)
        is_last = step == data.max_steps or training.stop_requested()
        eval_metrics = {}
        if data.evals and (is_last or training.is_due(step, cfg.train.eval_steps)):
            with metrics.pause():
                eval_metrics = training.evaluate_metrics(sharded, data.evals, objective)
                training.answer_prompts(model, data.tokenizer, cfg.train, folder.samples, step)
            is_last = stopping.update(eval_metrics) or is_last
            run.log(stopping.summarize(step))
        metrics.step(step, stats, learning_rate, **eval_metrics)
        if step == metrics.first_step + 5:  # in the first steps the learning rate may be zero
            run.log(*adapters.idle_adapter_warnings(model))
        if is_last or training.is_due(step, cfg.checkpoint.save_steps):
            metrics.check_finite(step)
            state.step, state.tokens, state.metrics = step, metrics.tokens, eval_metrics
            with metrics.pause():
                path = checkpoint.save(state, folder.root, cfg.checkpoint, may_fail=not is_last)
                run.log(checkpoint.saved_line(path))
                run.log(*data.reading_lines(), export.prove_adapter(state, path))
        if training.is_due(step, cfg.checkpoint.export_steps):
            metrics.check_finite(step)
            with metrics.pause():
                run.log(*exporter.export(step, may_fail=not is_last))
        if is_last:
            break

    # ---- Export and publish ----------------------------------------------------------------------
    checkpoint.wait()
    training.leave_loop(state.step)
    run.log(*exporter.finish(state.step))
    run.log(metrics.close(), *folder.next_lines(state.step, adapted=cfg.adapters is not None))
    hub.publish(folder.path, cfg.hub, run.log)
    run.log(*exporter.wait())


if __name__ == "__main__":
    training.main(distill, DistillConfig, demo=DEMO)
