"""Store what TRL's trainers compute for preference losses: figures that tests compare with.

    python benchmarks/trl_figures.py [--output tests/data/trl_figures.json]

Needs TRL 1.16.0, which no test needs. A tiny Llama and another one as its reference, both of seeded
weights, in float32 on one process; six pairs of unequal lengths, two of them longer than the rest.
For each objective the loss of the whole batch, its metrics, and the sums of the
gradients' values and squares of three parameters.
"""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from machine import describe
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

CONFIG = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
EXTRAS = ("log_probs", "entropy", "mean_logits", "is_top1")  # what its metrics ask of the head
METRICS = {
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "margin": "rewards/margins",
    "accuracy": "rewards/accuracies",
    "logps_chosen": "logps/chosen",
    "logps_rejected": "logps/rejected",
}
"""Metric of the toolkit -> TRL's name for it."""
SHOWN = ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight")
"""Parameters whose gradients are kept."""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sigmoid": {"beta": 0.1},
    "sigmoid_beta_0.5": {"loss_type": "sigmoid", "beta": 0.5},
    "sigmoid_norm": {"beta": 0.3},
    "robust": {"beta": 0.1, "label_smoothing": 0.1},
    "hinge": {"beta": 0.1},
    "ipo": {"beta": 0.1},
    "apo_zero": {"beta": 0.1},
    "apo_down": {"beta": 0.1},
    "bco_pair": {"beta": 0.1},
    "nca_pair": {"beta": 0.1},
    "exo_pair": {"beta": 0.1, "label_smoothing": 1e-3},
    "sppo_hard": {"beta": 0.1},
    "aot": {"beta": 0.1, "label_smoothing": 0.05},
    "aot_unpaired": {"beta": 0.1},
    "discopop": {"beta": 0.1},
    "discopop_tau": {"loss_type": "discopop", "beta": 0.1, "discopop_tau": 0.5},
    "mpo": {
        "loss_type": ["sigmoid", "bco_pair", "sft"],
        "loss_weights": [0.8, 0.2, 1.0],
        "beta": 0.1,
    },
    "mpo_sorted": {
        "loss_type": ["aot_unpaired", "exo_pair", "discopop"],
        "loss_weights": [0.5, 2.0, 0.25],
        "beta": 0.2,
        "label_smoothing": 0.01,
    },
    "mpo_equal": {"loss_type": ["hinge", "nca_pair"], "beta": 0.3},
    "rpo": {"loss_type": "sigmoid", "beta": 0.1, "rpo_alpha": 0.7},
    "simpo": {"beta": 2.0, "simpo_gamma": 0.5},
    "orpo": {"beta": 0.2},
    "kto": {"beta": 0.1, "desirable_weight": 1.3, "undesirable_weight": 0.8},
    "kto_turned": {"loss_type": "kto", "beta": 0.1},
}
"""Name -> settings of `preference`, the loss type where it is not the name."""
REWARDS: dict[str, dict[str, Any]] = {
    "reward": {},
    "reward_margin": {"margin": True},
    "reward_centred": {"center_rewards_coefficient": 0.05},
}
"""Name -> settings of `preference` for reward models, and whether pairs have their margins."""
MARGINS = [0.5, 0.0, 1.5, -0.25, 1.0, 0.125]
REWARD_SHOWN = (*SHOWN[:2], "score.weight")


def models(turned: bool = False) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Return the model and its reference; `turned`: the other way round."""
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made.append(LlamaForCausalLM(LlamaConfig(**CONFIG)))
    return (made[1], made[0]) if turned else (made[0], made[1])


def reward_model() -> LlamaForSequenceClassification:
    torch.manual_seed(4)
    return LlamaForSequenceClassification(LlamaConfig(**CONFIG, num_labels=1, pad_token_id=0))  # type: ignore[call-arg]


def pairs() -> list[dict[str, list[int]]]:
    """Return token ids of prompts and of both answers."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for prompt, chosen, rejected in (
        (3, 4, 6),
        (7, 2, 2),
        (2, 9, 1),
        (5, 1, 7),
        (12, 15, 11),
        (4, 3, 14),
    ):
        parts = [
            torch.randint(1, int(CONFIG["vocab_size"]), (n,), generator=generator).tolist()
            for n in (prompt, chosen, rejected)
        ]
        found.append(dict(zip(("prompt", "chosen", "rejected"), parts, strict=True)))
    return found


def padded(rows: list[list[int]], value: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def sides(kind: str) -> list[tuple[list[int], list[int]]]:
    return [(pair["prompt"], pair[kind]) for pair in pairs()]


def columns(rows: list[tuple[list[int], list[int]]], before: str = "") -> dict[str, torch.Tensor]:
    """Return rows of prompt and answer as TRL's collators do."""
    return {
        f"{before}input_ids": padded([p + a for p, a in rows], 0),
        f"{before}attention_mask": padded([[1] * len(p + a) for p, a in rows], 0),
        f"{before}completion_mask": padded([[0] * len(p) + [1] * len(a) for p, a in rows], 0),
    }


def labels_of(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return them as the older trainers name them, with labels instead of a mask."""
    mask = given.pop("completion_mask")
    return given | {"labels": given["input_ids"].masked_fill(mask == 0, -100)}


def stub(model: Any, reference: Any, settings: dict[str, Any]) -> Any:
    """Return what TRL's loss functions ask of their trainer, in one process."""
    kind = settings["loss_type"]
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        unwrap_model=lambda x: x,
    )
    alpha = settings.get("rpo_alpha")
    kinds = kind if isinstance(kind, list) else [kind]
    weights = settings.get("loss_weights", [1.0] * len(kinds))
    return SimpleNamespace(
        model=model,
        ref_model=reference,
        accelerator=accelerator,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        is_encoder_decoder=False,
        padding_value=0,
        pad_token_id=0,
        label_smoothing=settings.get("label_smoothing", 0.0),
        beta=settings["beta"],
        simpo_gamma=settings.get("simpo_gamma"),
        loss_type=kind,
        loss_types=[*kinds, "sft"] if alpha else kinds,
        loss_weights=[*weights, alpha] if alpha else weights,
        calculate_KL=True,
        desirable_weight=settings.get("desirable_weight", 1.0),
        undesirable_weight=settings.get("undesirable_weight", 1.0),
        alpha=0.0,
        cpo_alpha=0.0,
        args=SimpleNamespace(
            gradient_checkpointing_kwargs=None, discopop_tau=settings.get("discopop_tau", 0.05)
        ),
        _tp_size=1,
        _total_train_tokens=0,
        _metrics={"train": Lists(), "eval": Lists()},
    )


class Lists(dict[str, Any]):
    def __missing__(self, key: str) -> list[Any]:
        self[key] = []
        return self[key]


def loss_of(name: str, model: Any, reference: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the loss as TRL computes it, and its rewards."""
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.kto_trainer import KTOTrainer
    from trl.trainer.utils import add_fused_lm_head

    settings = {"loss_type": name} | OBJECTIVES[name]
    trainer = stub(model, reference, settings)
    chosen, rejected = sides("chosen"), sides("rejected")
    if name in ("simpo", "orpo"):
        kind = ORPOTrainer if name == "orpo" else CPOTrainer
        batch = {}
        for side, rows in (("chosen", chosen), ("rejected", rejected)):
            batch |= {f"{side}_{n}": x for n, x in labels_of(columns(rows)).items()}
        for method in ("concatenated_inputs", "get_batch_logps"):
            setattr(trainer, method, getattr(kind, method))
        for method in ("concatenated_forward", "odds_ratio_loss", "cpo_loss"):
            if hasattr(kind, method):
                bound = getattr(kind, method).__get__(trainer)
                setattr(trainer, method, bound)
        loss, metrics = kind.get_batch_loss_metrics(trainer, model, batch)
        return loss, {name: metrics[theirs] for name, theirs in METRICS.items()}
    for one in (model, reference):
        add_fused_lm_head(one, outputs=EXTRAS)
    if settings["loss_type"] == "kto":
        answers = [row for pair in zip(chosen, rejected, strict=True) for row in pair]
        others = [answers[i ^ 1][1] for i in range(len(answers))]
        mixed = [(prompt, other) for (prompt, _), other in zip(answers, others, strict=True)]
        batch = columns(answers) | columns(mixed, "KL_")
        batch["label"] = torch.tensor([True, False] * len(chosen))
        trainer._compute_kl_logps = KTOTrainer._compute_kl_logps.__get__(trainer)
        loss = KTOTrainer._compute_loss(trainer, model, batch, False)
        metrics = trainer._metrics["train"]
        names = METRICS | {"kl": "kl"}
        return loss, {n: metrics[x][0] for n, x in names.items() if n != "accuracy"}
    batch = columns([*chosen, *rejected])
    loss = DPOTrainer._compute_loss(trainer, model, batch, False)
    metrics = trainer._metrics["train"]
    return loss, {name: metrics[theirs][0] for name, theirs in METRICS.items()}


def reward_loss(name: str, model: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the loss of a reward model as TRL computes it, and its metrics."""
    from trl.trainer.reward_trainer import DataCollatorForPreference, RewardTrainer

    told = {"train": Lists(), "eval": Lists()}
    trainer = SimpleNamespace(
        model=model,
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        args=SimpleNamespace(
            center_rewards_coefficient=REWARDS[name].get("center_rewards_coefficient")
        ),
        _total_train_tokens=0,
        _tp_size=1,
        _metrics=told,
    )
    rows: list[dict[str, Any]] = [
        {f"{side}_ids": pair["prompt"] + pair[side] for side in ("chosen", "rejected")}
        for pair in pairs()
    ]
    if REWARDS[name].get("margin"):
        rows = [row | {"margin": margin} for row, margin in zip(rows, MARGINS, strict=True)]
    batch = DataCollatorForPreference(pad_token_id=0)(rows)
    loss = RewardTrainer.compute_loss(trainer, model, batch)
    return loss, {name: told["train"][name][0] for name in ("mean_reward", "margin", "accuracy")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("tests/data/trl_figures.json"))
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for name in (*OBJECTIVES, *REWARDS):
        model, reference = models(turned=name.endswith("turned"))
        parameters = SHOWN
        if name in REWARDS:
            model, parameters = reward_model(), REWARD_SHOWN
            loss, shown = reward_loss(name, model)
        else:
            loss, shown = loss_of(name, model, reference)
        loss.backward()
        gradients = {n: model.get_parameter(n).grad.double() for n in parameters}
        found[name] = {
            "loss": float(loss),
            **{n: float(x) for n, x in shown.items()},
            "gradients": {
                n: [float(g.sum()), float(g.square().sum())] for n, g in gradients.items()
            },
        }
        print(name, found[name]["loss"], shown)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    page = {"by": describe("trl_figures.py", "torch", "transformers", "trl"), "figures": found}
    args.output.write_text(json.dumps(page, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
