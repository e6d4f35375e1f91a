"""The cross entropy of the next token: the objective of pretraining and fine-tuning."""

from torch import nn

from toolkit.config.measures import TOKEN_METRICS
from toolkit.config.settings import RunConfig
from toolkit.data.samples.batch import Batch
from toolkit.objectives.objective import Objective, register
from toolkit.training.loss import LossSum, causal_lm_loss


@register(RunConfig)
class CausalLM(Objective):
    """The training objective of next-token prediction: mean cross entropy of supervised tokens."""

    metrics = TOKEN_METRICS
    supports_context_parallel = True

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        """Sum the cross entropy over the supervised tokens of a micro-batch.

        `train.z_loss` and, in fine-tuning, `train.label_smoothing_factor` add their terms.
        """
        train = self.cfg.train
        return causal_lm_loss(
            model,
            batch,
            label_smoothing=getattr(train, "label_smoothing_factor", 0.0),
            z_loss=train.z_loss,
            device_type=self.device_type,
        )

    def evaluation_loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Sum the cross entropy, and count the targets that the model predicts correctly (argmax).

        Z-loss and label smoothing are not applied, so that evaluations of different runs compare.
        """
        return causal_lm_loss(model, batch, device_type=self.device_type, accuracy=True)
