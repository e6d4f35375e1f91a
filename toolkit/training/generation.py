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
    """Generate the model's greedy answers to prompts, and return them on every rank. Collective.

    If the tokenizer has a chat template, a prompt is a user message, otherwise a text to continue.
    Each prompt is answered separately by one of the ranks and without padding, so answers do not
    depend on the number of ranks. The ranks answer one prompt each per round, and all run until the
    longest answer of the round is done. That takes at most `ceil(prompts / ranks) * max_new_tokens`
    forwards, each with its all-gathers. Training mode and random state do not change; the model is
    resharded afterwards.

    Returns:
        The answers in the order of the prompts, without special tokens.

    Raises:
        TrainingError: a prompt has no tokens, leaves no room for an answer, or is refused by the
            chat template. Every rank raises it.
    """
    if not prompts:
        return []
    base = base_of(model)
    encoded = ranks.on_all(lambda: encode_prompts(model, tokenizer, prompts, max_new_tokens))
    before, settings = base.generation_config, _build_greedy_config(base, tokenizer, max_new_tokens)
    parameter = next(base.parameters())
    device = parameter.device
    # With CPU offload the parameters are not on the device that computes.
    if isinstance(parameter, DTensor):
        device = torch.device(parameter.device_mesh.device_type)
    forward = base.forward if base is model else _route_through_outer(model, base.forward)
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
    """Answer `train.eval_prompts`; rank 0 prints the answers and appends them to `file`.

    Collective. Does nothing without prompts or tokenizer, or if a signal has stopped the run. If
    `file` cannot be written, a warning is printed.

    Args:
        model: the sharded model.
        tokenizer: its tokenizer.
        cfg: the section `train` of the config.
        file: a JSON Lines file.
        step: number of the step, which the lines state.
    """
    if not cfg.eval_prompts or tokenizer is None or preemption.is_stopping():
        return
    count = ranks.on_all(lambda: _count_answer_tokens(model, tokenizer, cfg.eval_prompts))
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
    """Raise a `TrainingError` if `generate` would refuse one of `train.eval_prompts`. Collective.

    Does nothing without a tokenizer. The model may be on meta.
    """
    if tokenizer is not None:
        encode_prompts(model, tokenizer, cfg.eval_prompts, 1)


def _count_answer_tokens(model: nn.Module, tokenizer: Tokenizer, prompts: Sequence[str]) -> int:
    """Return the largest answer length, in tokens, that fits after every prompt; at most 64."""
    longest = max(map(len, encode_prompts(model, tokenizer, prompts, 1)))
    positions = _max_positions(model)
    return MAX_ANSWER_TOKENS if positions is None else min(MAX_ANSWER_TOKENS, positions - longest)


def _max_positions(model: nn.Module) -> int | None:
    """Return `max_position_embeddings` of the model's config; None if it is no positive number."""
    config = base_of(model).config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def encode_prompts(
    model: nn.Module, tokenizer: Any, prompts: Sequence[str], max_new_tokens: int
) -> list[list[int]]:
    """Encode prompts to token ids as `generate` does. The model may be on meta.

    Raises:
        TrainingError: a prompt has no tokens, is refused by the chat template, or does not fit into
            the model's positions together with `max_new_tokens`.
    """
    chat = tokenizer.chat_template is not None
    positions = _max_positions(model)
    encoded: list[list[int]] = []
    for prompt in prompts:
        ids = _encode_chat_prompt(tokenizer, prompt) if chat else tokenizer(prompt)["input_ids"]
        if not ids:
            raise TrainingError(f"the prompt {prompt[:60]!r} has no tokens; give one that has text")
        if positions is not None and positions < len(ids) + max_new_tokens:
            raise TrainingError(
                f"the prompt {prompt[:60]!r} has {len(ids)} tokens, and with {max_new_tokens} more "
                f"the model's {positions} positions do not hold it; shorten it, or ask for fewer"
            )
        encoded.append(list(ids))
    return encoded


def _encode_chat_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Encode `prompt` to token ids as the only user message of a conversation.

    Raises:
        TrainingError: the chat template refuses it.
    """
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


def _build_greedy_config(
    base: PreTrainedModel, tokenizer: Any, max_new_tokens: int
) -> GenerationConfig:
    """Build settings for greedy decoding that stops at any end token of the model or tokenizer.

    Apart from its end tokens, the model's own generation config is ignored.
    """
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


def _route_through_outer(outer: nn.Module, forward: Any) -> Any:
    """Wrap the base's `forward`, so that it calls `outer`, which then calls the base's `forward`.

    See [Note: one forward each].
    """
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
