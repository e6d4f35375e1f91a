"""Generate answers of a sharded model to a few prompts while it trains, with transformers.

[Note: one forward each] `generate` calls the transformers model. With adapters around it, FSDP's
hooks are on the outermost module instead, and the parameters of the outermost unit would not be
gathered. So each call goes through the outermost module, which calls the transformers model.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from toolkit import ranks
from toolkit.config.settings import FinetuneTrainConfig
from toolkit.errors import TrainingError, one_line
from toolkit.formats import reshard
from toolkit.formats.metrics_file import append_lines
from toolkit.models.modes import isolated_forward, replaced_forward
from toolkit.models.peft_model import base_of
from toolkit.training.guards import preemption


def generate(
    model: nn.Module, tokenizer: Tokenizer, prompts: Sequence[str], max_new_tokens: int
) -> list[str]:
    """Generate the model's greedy answer to each prompt, on every rank. Collective.

    With a chat template a prompt is the message of a user, otherwise a text to continue. Each
    prompt is answered separately, without padding, on one of the ranks, so that answers do not
    depend on the number of ranks. All ranks run until the longest answer of a round is done. That
    takes at most `ceil(prompts / ranks) * max_new_tokens` forwards, each with its all-gathers. The
    model keeps its mode and is sharded again afterwards. The random state does not change.

    Raises:
        TrainingError: on every rank, for a prompt without tokens, a prompt that leaves no room for
            an answer, or one that the chat template refuses.
    """
    if not prompts:
        return []
    base = base_of(model)
    encoded = ranks.on_all(lambda: encoded_prompts(model, tokenizer, prompts, max_new_tokens))
    before, settings = base.generation_config, _greedy_config(base, tokenizer, max_new_tokens)
    parameter = next(base.parameters())
    device = parameter.device
    # With CPU offload the parameters are not on the device that computes.
    if isinstance(parameter, DTensor):
        device = torch.device(parameter.device_mesh.device_type)
    forward = base.forward if base is model else _through(model, base.forward)
    world, mine = ranks.world_size(), {}
    reshard(model)
    base.generation_config = settings
    try:
        with replaced_forward(base, forward), isolated_forward(model, device):
            for first in range(0, len(encoded), world):
                # None waits: some repeat the last one.
                number = min(first + ranks.rank(), len(encoded) - 1)
                prompt = torch.tensor([encoded[number]], device=device)
                answer = cast(Any, base).generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    generation_config=settings,
                    synced_gpus=world > 1,
                )
                mine[number] = answer[0, prompt.shape[1] :].tolist()
    finally:
        base.generation_config = before
        reshard(model)
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    texts = ranks.gather_results(lambda: {n: decode(ids) for n, ids in mine.items()})
    answers: dict[int, Any] = {n: text for part in texts for n, text in part.items()}
    return [answers[number] for number in range(len(prompts))]


MAX_ANSWER_TOKENS = 64


def answer_prompts(
    model: nn.Module, tokenizer: Tokenizer | None, cfg: FinetuneTrainConfig, file: Path, step: int
) -> None:
    """Print answers to `train.eval_prompts` on rank 0, and append them to `file`. Collective."""
    if not cfg.eval_prompts or tokenizer is None or preemption.is_stopping():
        return
    count = ranks.on_all(lambda: _answer_tokens(model, tokenizer, cfg.eval_prompts))
    answers = generate(model, tokenizer, cfg.eval_prompts, count)

    def keep() -> None:
        lines = []
        for prompt, answer in zip(cfg.eval_prompts, answers, strict=True):
            ranks.print_line(f"step {step}  {prompt!r}\n    {answer!r}")
            lines.append({"step": step, "prompt": prompt, "answer": answer})
        try:
            append_lines(file, lines)
        except OSError as error:
            ranks.print_line(f"WARNING: {file} lacks the answers of step {step}: {error.strerror}")

    ranks.on_main(keep)


@ranks.collective
def check_prompts(model: nn.Module, tokenizer: Tokenizer | None, cfg: FinetuneTrainConfig) -> None:
    """Refuse `train.eval_prompts` that `generate` would; the model may be on meta. Collective."""
    if tokenizer is not None:
        encoded_prompts(model, tokenizer, cfg.eval_prompts, 1)


def _answer_tokens(model: nn.Module, tokenizer: Tokenizer, prompts: Sequence[str]) -> int:
    """Return how many tokens an answer may have, given the positions of the model."""
    longest = max(map(len, encoded_prompts(model, tokenizer, prompts, 1)))
    positions = _positions(model)
    return MAX_ANSWER_TOKENS if positions is None else min(MAX_ANSWER_TOKENS, positions - longest)


def _positions(model: nn.Module) -> int | None:
    config = base_of(model).config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def encoded_prompts(
    model: nn.Module, tokenizer: Any, prompts: Sequence[str], max_new_tokens: int
) -> list[list[int]]:
    """Encode prompts as `generate` does; the model may be on meta.

    Raises:
        TrainingError: as `generate`.
    """
    chat = tokenizer.chat_template is not None
    positions = _positions(model)
    encoded: list[list[int]] = []
    for prompt in prompts:
        ids = _chat_prompt(tokenizer, prompt) if chat else tokenizer(prompt)["input_ids"]
        if not ids:
            raise TrainingError(f"the prompt {prompt[:60]!r} has no tokens; give one that has text")
        if positions is not None and positions < len(ids) + max_new_tokens:
            raise TrainingError(
                f"the prompt {prompt[:60]!r} has {len(ids)} tokens, and with {max_new_tokens} more "
                f"the model's {positions} positions do not hold it; shorten it, or ask for fewer"
            )
        encoded.append(list(ids))
    return encoded


def _chat_prompt(tokenizer: Any, prompt: str) -> list[int]:
    turns = [{"role": "user", "content": prompt}]
    try:
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        text.encode()  # raises for surrogates, which no tokenizer accepts
    except Exception as error:  # a template may raise anything
        raise TrainingError(
            f"the chat template refuses the prompt {prompt[:60]!r} as the only turn "
            f"({one_line(error)}); leave train.eval_prompts out, or set data.chat_template"
        ) from error
    # The template has printed the special tokens already.
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _greedy_config(base: PreTrainedModel, tokenizer: Any, max_new_tokens: int) -> GenerationConfig:
    """Build settings for greedy decoding that ends at the end tokens of model and tokenizer."""
    # A checkpoint's generation_config.json may ask for sampling, penalties or forced tokens.
    ends: set[int] = set()
    for holder in (getattr(base, "generation_config", None), tokenizer):
        end_ids = getattr(holder, "eos_token_id", None)
        ends.update([end_ids] if isinstance(end_ids, int) else end_ids or [])
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        eos_token_id=sorted(ends) or None,
        pad_token_id=tokenizer.pad_token_id or min(ends, default=0),  # no row is padded
    )


def _through(outer: nn.Module, forward: Any) -> Any:
    """Return a forward of the base that goes through `outer`; see [Note: one forward each]."""
    inside = False

    @functools.wraps(forward)  # transformers reads the names of its parameters
    def forward_through_outer(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return forward(*args, **kwargs)
        inside = True
        try:
            return outer(*args, **kwargs)
        finally:
            inside = False

    return forward_through_outer
