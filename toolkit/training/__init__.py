"""Training: launch, optimizer step, loss, optimizer, metrics, generation, guards of a run."""

from typing import TYPE_CHECKING

from toolkit.lazy import import_when_used

if TYPE_CHECKING:
    from toolkit.training.device import collect_garbage
    from toolkit.training.early_stopping import build_early_stopping
    from toolkit.training.generation import answer_prompts, check_prompts, generate
    from toolkit.training.guards.preemption import is_due, leave_loop, stop_requested
    from toolkit.training.launch import Run, main, seed_everything
    from toolkit.training.loss import LossSum, causal_lm_loss, token_logps
    from toolkit.training.metrics import evaluate_metrics
    from toolkit.training.neftune import add_embedding_noise
    from toolkit.training.optim import build_optimizer, build_scheduler, check_optimizer
    from toolkit.training.run_start import start_metrics
    from toolkit.training.step import EvalStats, StepStats, Update, evaluate, train_step

import_when_used(__name__)
