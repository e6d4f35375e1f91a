"""The objective of distillation: imitate a frozen teacher with the same vocabulary."""

import gc
import json
from functools import cached_property
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.adapters.base import base_digest
from toolkit.checkpoint.store import Folder, read_json_object
from toolkit.config.distill import DISTILL_METRICS, DistillConfig
from toolkit.config.settings import ModelConfig, model_settings
from toolkit.data.prepare import TrainingData
from toolkit.data.samples.batch import Batch
from toolkit.data.tokens.tokenizer import load_tokenizer, use_model_tokenizer
from toolkit.errors import CheckpointError, ConfigError, ModelError
from toolkit.formats import local_folder
from toolkit.mesh import Mesh
from toolkit.models import build_on_meta, vocabulary_size
from toolkit.objectives.objective import Objective, register
from toolkit.objectives.teacher_values import TeacherValues, teacher_values_bytes
from toolkit.sharding import Sharded
from toolkit.training.distillation import distillation_loss, run_teacher
from toolkit.training.head_divergence import Divergence, StoredTeacher, Teacher, TopLogps
from toolkit.training.loss import LossSum
from toolkit.training.train_state import StateFile

TEACHER = "teacher"
"""Role of the teacher in `Objective.models` and `Objective.frozen`."""
TEACHER_FILE = "teacher.json"
"""File of each checkpoint with a digest of the live teacher's weights."""


@register(DistillConfig)
class Distillation(Objective):
    """The objective of distillation: a divergence from the teacher, and a cross entropy.

    The loss is a mean over the supervised tokens of the global batch; see
    `toolkit.training.head_divergence.Divergence`. Evaluations report the cross entropy as the loss,
    so that they compare with those of fine-tuning.
    """

    metrics = DISTILL_METRICS
    supports_context_parallel = True

    def __init__(
        self, cfg: DistillConfig, mesh: Mesh | None = None, device_type: str | None = None
    ) -> None:
        super().__init__(cfg, mesh, device_type)
        settings = cfg.distill
        is_reverse = settings.divergence == "reverse_kl"
        self.divergence = Divergence(
            settings.temperature, settings.kl_weight, is_reverse, settings.top_k
        )
        self._values: TeacherValues | None = None

    def check_models(self, model: PreTrainedModel, model_cfg: ModelConfig) -> str:
        """Refuse a teacher whose vocabulary is not that of the trained model. Collective.

        See `compare_vocabularies`.
        """
        teacher_cfg = use_model_tokenizer(self.models[TEACHER])

        def compare() -> str:
            rows = vocabulary_size(model), vocabulary_size(build_on_meta(teacher_cfg))
            k = self.divergence.top_k
            if k is not None and k > min(rows):
                raise ConfigError(
                    f"distill.top_k {k}: expected at most the {min(rows):,} tokens of the "
                    "vocabulary; remove it to compare all of them"
                )
            return compare_vocabularies(
                load_tokenizer(model_cfg),
                load_tokenizer(teacher_cfg),
                rows,
                (model_cfg.name_or_path, teacher_cfg.name_or_path),
            )

        return ranks.on_all(compare)

    @cached_property
    def _stored_width(self) -> int:
        """Number of tokens of the vocabulary that the stored distributions cover."""
        models = (model_settings(self.cfg), self.models[TEACHER])
        return min(vocabulary_size(build_on_meta(cfg)) for cfg in models)

    def shard_models(self) -> None:
        """Build and shard the teacher on meta; see `Objective.shard_models`."""
        super().shard_models()
        if self.cfg.distill.stored:
            # Models are read here, because the forward of a plan has fake tensors.
            _ = self._stored_width

    def restore(self, model: nn.Module, data: TrainingData, root: Any, saved: Any) -> None:
        """Read the stored values of the teacher from a checkpoint, if `distill.stored`. Collective.

        The weights of a live teacher are compared with those that the run began with.

        Raises:
            CheckpointError: the checkpoint has no values, or those of other rows, another teacher
                or other settings; or it is of a run with another live teacher.
        """
        if self.cfg.distill.stored:
            width = ranks.on_all(lambda: self._stored_width)
            self._values = TeacherValues(self.cfg, width, data, root, saved)
            return
        teacher = self.models[TEACHER]
        file = ranks.on_main(lambda: identify_teacher(teacher, saved))
        self.files = {TEACHER_FILE: file} if ranks.rank() == 0 else {}

    def prepare(self, sharded: Sharded) -> str:
        """Load the teacher; or, if `distill.stored`, complete its values and free it. Collective.

        Returns:
            A line for the log.

        Raises:
            RuntimeError: `distill.stored` is set, and `restore` was not called.
        """
        if not self.cfg.distill.stored:
            return super().prepare(sharded)
        if self._values is None:
            raise RuntimeError("call restore before prepare")
        lines = [self._values.load_parts()]
        if not self._values.is_complete:
            ranks.log_once(super().prepare(sharded))
            frozen = self.frozen.pop(TEACHER)
            lines.append(self._values.complete(frozen, self.divergence))
            del frozen
            gc.collect()  # modules hold each other in cycles
        self._values.attach()
        self.files = self._values.files
        summary = "; ".join(filter(None, lines)) or "all positions read from the checkpoint"
        return f"teacher    {summary}; each checkpoint holds the values"

    def file_bytes(self, data: TrainingData) -> int:
        """Estimate an upper limit of the bytes that `files` add to each checkpoint."""
        return teacher_values_bytes(self.cfg, data) if self.cfg.distill.stored else 1024

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
        teacher: Teacher
        if self.cfg.distill.stored:
            ids, logps = batch.columns["teacher_ids"], batch.columns["teacher_logps"]
            top = TopLogps(ids.flatten(0, 1), logps.flatten(0, 1))
            teacher = StoredTeacher(top, self._stored_width)
        else:
            frozen = self.frozen[TEACHER].model
            teacher = run_teacher(frozen, batch, self.divergence, self.device_type)
        return distillation_loss(model, teacher, batch, self.divergence, **options)


def identify_teacher(settings: ModelConfig, saved: Folder | None) -> StateFile:
    """Compute the digest of a live teacher's weights, and compare it with that of a checkpoint.

    Not collective. Reads 16 kB per tensor.

    Args:
        settings: settings of the teacher.
        saved: the checkpoint to resume from; None for a new run.

    Returns:
        The file of every checkpoint that holds the digest.

    Raises:
        CheckpointError: the checkpoint is of a run whose teacher had other weights, or holds no
            digest.
    """
    name = settings.name_or_path
    digest = base_digest(local_folder(name, settings.revision), name, settings.revision)
    if saved is not None:
        before = (read_json_object(saved / TEACHER_FILE) or {}).get("digest")
        if before != digest:
            raise CheckpointError(
                f"{saved} is of a run whose teacher has the digest {str(before)[:20]}, and the "
                f"weights of {name} have the digest {digest[:20]}: expected the teacher that the "
                "run began with. Restore its weights, or start in another output_dir"
            )
    content = json.dumps({"name_or_path": name, "digest": digest}, indent=2)
    return StateFile.of(content.encode() + b"\n")


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
