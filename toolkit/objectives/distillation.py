"""The objective of distillation: imitate a frozen teacher with the same vocabulary."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.config.distill import DISTILL_METRICS, DistillConfig
from toolkit.config.settings import ModelConfig
from toolkit.data.samples.batch import Batch
from toolkit.data.tokens.tokenizer import load_tokenizer, use_model_tokenizer
from toolkit.errors import ModelError
from toolkit.mesh import Mesh
from toolkit.models import build_on_meta, vocabulary_size
from toolkit.objectives.objective import Objective, register
from toolkit.training.distillation import distillation_loss, run_teacher
from toolkit.training.head_divergence import Divergence
from toolkit.training.loss import LossSum

TEACHER = "teacher"
"""Role of the teacher in `Objective.models` and `Objective.frozen`."""


@register(DistillConfig)
class Distillation(Objective):
    """The objective of distillation: a divergence from the teacher, and a cross entropy.

    The loss is a mean over the supervised tokens of the global batch; see
    `toolkit.training.head_divergence.Divergence`. Evaluations report the cross entropy as the loss,
    so that they compare with those of fine-tuning.
    """

    metrics = DISTILL_METRICS

    def __init__(
        self, cfg: DistillConfig, mesh: Mesh | None = None, device_type: str | None = None
    ) -> None:
        super().__init__(cfg, mesh, device_type)
        settings = cfg.distill
        is_reverse = settings.divergence == "reverse_kl"
        self.divergence = Divergence(
            settings.temperature, settings.alpha, is_reverse, settings.top_k
        )

    def check_models(self, model: PreTrainedModel, model_cfg: ModelConfig) -> str:
        """Refuse a teacher whose vocabulary is not that of the trained model. Collective.

        See `compare_vocabularies`.
        """
        teacher_cfg = use_model_tokenizer(self.models[TEACHER])

        def compare() -> str:
            return compare_vocabularies(
                load_tokenizer(model_cfg),
                load_tokenizer(teacher_cfg),
                (vocabulary_size(model), vocabulary_size(build_on_meta(teacher_cfg))),
                (model_cfg.name_or_path, teacher_cfg.name_or_path),
            )

        return ranks.on_all(compare)

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        """Sum the loss over the supervised tokens of a micro-batch, with its parts as metrics."""
        return self._compute_loss(model, batch)

    def evaluation_loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Sum the cross entropy of the trained model, with the other metrics as parts."""
        loss = self._compute_loss(model, batch, accuracy=True)
        parts = dict(loss.parts)
        return LossSum(parts.pop("cross_entropy"), loss.count, parts)

    def _compute_loss(self, model: nn.Module, batch: Batch, **options: Any) -> LossSum:
        """Run the teacher and then the model on a micro-batch; see `distillation_loss`."""
        options["device_type"] = self.device_type
        frozen = self.frozen[TEACHER].model
        teacher = run_teacher(frozen, batch, self.divergence, self.device_type)
        return distillation_loss(model, teacher, batch, self.divergence, **options)


def compare_vocabularies(
    tokenizer: PreTrainedTokenizerBase | None,
    teacher: PreTrainedTokenizerBase | None,
    rows: tuple[int, int],
    names: tuple[str, str],
) -> str:
    """Check token by token that the trained model and its teacher have one vocabulary.

    Heads may have different numbers of rows, as those of Qwen2.5 0.5B and 7B do, if both have a row
    for every token. The divergence then covers the rows that both heads have.

    Args:
        tokenizer: tokenizer of the run; None if the data is token ids.
        teacher: tokenizer of the teacher; None if it has none.
        rows: number of rows of the embedding, of the trained model and of the teacher.
        names: names of both models, for messages.

    Returns:
        A line for the log: about a difference that is accepted, or empty.

    Raises:
        ModelError: the vocabularies differ. It names the first difference.
    """
    advice = (
        "expected a teacher with the vocabulary of the trained model, because their probabilities "
        "are compared token by token; set teacher.name_or_path to a model of the same family"
    )
    model_name, teacher_name = names
    if tokenizer is None or teacher is None:
        if rows[0] != rows[1]:
            raise ModelError(
                f"{model_name} has {rows[0]:,} tokens and the teacher {teacher_name} {rows[1]:,}, "
                f"and there are no two tokenizers to compare: {advice}"
            )
        missing = model_name if tokenizer is None else teacher_name
        return (
            f"teacher    WARNING: {missing} has no tokenizer, so only the sizes of the "
            "vocabularies were compared"
        )
    tokens, teacher_tokens = (
        {index: token for token, index in t.get_vocab().items()} for t in (tokenizer, teacher)
    )
    for index in sorted({*tokens, *teacher_tokens}):
        pair = tokens.get(index), teacher_tokens.get(index)
        if pair[0] != pair[1]:
            texts = ["no token" if token is None else repr(token) for token in pair]
            raise ModelError(
                f"token id {index} is {texts[0]} of {model_name} and {texts[1]} of the teacher "
                f"{teacher_name}: {advice}"
            )
    smallest = min(rows)
    if max(tokens, default=-1) >= smallest:
        raise ModelError(
            f"the tokenizer has the token id {max(tokens)}, but the embeddings of {model_name} and "
            f"the teacher {teacher_name} have {rows[0]:,} and {rows[1]:,} rows: {advice}"
        )
    if rows[0] != rows[1]:
        return (
            f"teacher    has {rows[1]:,} rows in its head, the trained model {rows[0]:,}: the "
            f"divergence covers the first {smallest:,}, which include all {len(tokens):,} tokens"
        )
    return ""
