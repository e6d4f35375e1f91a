"""Preference rows as other tools and public data sets lay them out: each is read completely, or it
is refused with the mapping that makes it work.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from toolkit.config.settings import FinetuneDataConfig, Learned
from toolkit.data.examples.pairs import Answer, Pair
from toolkit.data.examples.recognise import Conversation, PromptCompletion
from toolkit.data.sources.rows import DataSource, load_sources
from toolkit.errors import DataError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


S, Q, GOOD, BAD = "Be brief.", "Two and two?", "It is four.", "It is five."
EARLIER = [("user", "Hi."), ("assistant", "Hello.")]


def turns(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in said]


def sharegpt(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": name, "value": text} for name, text in said]


ASK = turns(("user", Q))
YES, NO = turns(("assistant", GOOD)), turns(("assistant", BAD))
SYSTEM = turns(("system", S))


class Layout(NamedTuple):
    row: dict[str, Any]
    prompt: Any  # a text, or turns that the chat template renders
    mapping: dict[str, str | None] | None = None  # that the refusal has to offer
    label: bool | None = None  # of a single answer; None: a pair
    answers: tuple[str, str] = (GOOD, BAD)


def human(text: str) -> dict[str, str]:
    return {"from": "human", "value": text}


DIALOGUE = f"\n\nHuman: Hi.\n\nAssistant: Hello.\n\nHuman: {Q}\n\nAssistant:"
LAYOUTS = {
    # TRL: docs/source/dataset_formats.md, preference with an explicit prompt, and without one
    "trl, texts": Layout({"prompt": Q, "chosen": GOOD, "rejected": BAD}, Q),
    "trl, turns": Layout({"prompt": ASK, "chosen": YES, "rejected": NO}, ASK),
    "trl, implicit turns": Layout({"chosen": ASK + YES, "rejected": ASK + NO}, ASK),
    "trl, implicit texts": Layout(
        {"chosen": f"{Q} {GOOD}", "rejected": f"{Q} {BAD}"},
        f"{Q} It is",
        answers=(" four.", " five."),
    ),
    "trl, unpaired texts": Layout({"prompt": Q, "completion": GOOD, "label": True}, Q, label=True),
    "trl, unpaired turns": Layout(
        {"prompt": ASK, "completion": NO, "label": False}, ASK, label=False
    ),
    # axolotl: src/axolotl/prompt_strategies/dpo/chatml.py, functions of these names
    "axolotl argilla": Layout(
        {"system": S, "instruction": Q, "chosen_response": GOOD, "rejected_response": BAD},
        SYSTEM + ASK,
    ),
    "axolotl argilla, question": Layout({"question": Q, "chosen": GOOD, "rejected": BAD}, ASK),
    "axolotl icr": Layout({"system": S, "input": Q, "chosen": GOOD, "rejected": BAD}, SYSTEM + ASK),
    "axolotl intel": Layout(
        {"system": S, "question": Q, "chosen": GOOD, "rejected": BAD}, SYSTEM + ASK
    ),
    "axolotl prompt_pairs": Layout(
        {"system": S, "prompt": Q, "chosen": GOOD, "rejected": BAD}, SYSTEM + ASK
    ),
    "axolotl ultra": Layout(
        {"system": S, "prompt": Q, "chosen": ASK + YES, "rejected": ASK + NO}, SYSTEM + ASK
    ),
    # axolotl: src/axolotl/prompt_strategies/dpo/chat_template.py
    "axolotl chat_template": Layout(
        {"messages": SYSTEM + ASK, "chosen": YES[0], "rejected": NO[0]}, SYSTEM + ASK
    ),
    "axolotl chat_template of many turns": Layout(
        {"messages": turns(*EARLIER) + ASK, "chosen": YES[0], "rejected": NO[0]},
        turns(*EARLIER) + ASK,
    ),
    # axolotl: src/axolotl/prompt_strategies/bradley_terry/README.md
    "axolotl bradley_terry": Layout(
        {"system": S, "input": Q, "chosen": GOOD, "rejected": BAD}, SYSTEM + ASK
    ),
    # axolotl: src/axolotl/prompt_strategies/kto/chatml.py
    "axolotl kto argilla": Layout(
        {"system": S, "instruction": Q, "completion": GOOD, "label": True}, SYSTEM + ASK, label=True
    ),
    "axolotl kto intel": Layout(
        {"system": S, "question": Q, "completion": BAD, "label": False}, SYSTEM + ASK, label=False
    ),
    "axolotl kto argilla_chat": Layout({"completion": ASK + YES, "label": True}, ASK, label=True),
    # LLaMA-Factory: data/README.md, preference and KTO data sets of both formats
    "llama-factory alpaca": Layout(
        {"instruction": "Add.", "input": "2 2", "chosen": GOOD, "rejected": BAD},
        turns(("user", "Add.\n\n2 2")),
    ),
    "llama-factory alpaca with history": Layout(
        {
            "instruction": Q,
            "input": "",
            "chosen": GOOD,
            "rejected": BAD,
            "system": S,
            "history": [["Hi.", "Hello."]],
        },
        SYSTEM + turns(*EARLIER) + ASK,
    ),
    "llama-factory sharegpt": Layout(
        {
            "conversations": sharegpt(("human", "Hi."), ("gpt", "Hello."), ("human", Q)),
            "chosen": {"from": "gpt", "value": GOOD},
            "rejected": {"from": "gpt", "value": BAD},
            "system": S,
        },
        SYSTEM + turns(*EARLIER) + ASK,
    ),
    "llama-factory kto": Layout(
        {"instruction": "Add.", "input": "2 2", "output": GOOD, "kto_tag": True},
        turns(("user", "Add.\n\n2 2")),
        label=True,
    ),
    "llama-factory kto sharegpt": Layout(
        {"messages": ASK + NO, "label": False},  # data/kto_en_demo.json
        ASK,
        label=False,
    ),
    # OpenRLHF: openrlhf/datasets/reward_dataset.py and unpaired_preference_dataset.py
    "openrlhf, chat": Layout({"chosen": ASK + YES, "rejected": ASK + NO, "score": 1.0}, ASK),
    "openrlhf, prompt_key": Layout({"prompt": ASK, "chosen": YES, "rejected": NO}, ASK),
    "openrlhf, unpaired": Layout({"input": Q, "output": BAD, "label": False}, ASK, label=False),
    # ms-swift: docs/source_en/Customization/Custom-dataset.md, RLHF
    "ms-swift": Layout({"messages": SYSTEM + ASK + YES, "rejected_response": BAD}, SYSTEM + ASK),
    "ms-swift, rejected_messages": Layout(
        {"messages": ASK + YES, "rejected_messages": ASK + NO}, ASK
    ),
    "ms-swift, query": Layout(
        {"system": S, "query": Q, "response": GOOD, "rejected_response": BAD}, SYSTEM + ASK
    ),
    "ms-swift kto": Layout(
        {"messages": SYSTEM + ASK + YES, "label": True}, SYSTEM + ASK, label=True
    ),
    # NeMo-RL: docs/guides/dpo.md, the preference format, and a binary one
    "nemo-rl": Layout(
        {
            "context": SYSTEM + ASK,
            "completions": [{"rank": 1, "completion": NO}, {"rank": 0, "completion": YES}],
        },
        SYSTEM + ASK,
    ),
    # NeMo-Aligner: docs/user-guide/dpo.rst and kto.rst
    "nemo-aligner dpo": Layout(
        {
            "prompt": Q,
            "chosen_response": GOOD,
            "rejected_response": BAD,
            "chosen_reward": 5,
            "rejected_reward": 1,
        },
        Q,
    ),
    "nemo-aligner kto": Layout(
        {"prompt": Q, "response": BAD, "preference": "rejected"}, Q, label=False
    ),
    # torchtune: docs/source/basics/preference_datasets.rst
    "torchtune": Layout(
        {"chosen_conversations": ASK + YES, "rejected_conversations": ASK + NO}, ASK
    ),
    "torchtune stack_exchange_paired": Layout(
        {"question": Q, "response_j": GOOD, "response_k": BAD},
        ASK,
        {"chosen": "response_j", "rejected": "response_k", "instruction": "question"},
    ),
    # Intel/orca_dpo_pairs
    "intel": Layout({"system": S, "question": Q, "chosen": GOOD, "rejected": BAD}, SYSTEM + ASK),
    # Anthropic/hh-rlhf
    "hh-rlhf": Layout(
        {"chosen": f"{DIALOGUE} {GOOD}", "rejected": f"{DIALOGUE} {BAD}"}, turns(*EARLIER) + ASK
    ),
    # argilla/ultrafeedback-binarized-preferences
    "argilla ultrafeedback": Layout(
        {
            "source": "evol instruct",
            "instruction": Q,
            "chosen_response": GOOD,
            "rejected_response": BAD,
            "chosen_avg_rating": 4.5,
        },
        ASK,
    ),
    # argilla/ultrafeedback-binarized-preferences-cleaned
    "argilla ultrafeedback cleaned": Layout(
        {
            "source": "evol instruct",
            "prompt": Q,
            "chosen": ASK + YES,
            "chosen-model": "one model",
            "rejected": ASK + NO,
        },
        ASK,
    ),
    # HuggingFaceH4/ultrafeedback_binarized: `messages` repeats the chosen conversation
    "ultrafeedback_binarized": Layout(
        {
            "prompt": Q,
            "prompt_id": "a1",
            "chosen": ASK + YES,
            "rejected": ASK + NO,
            "messages": ASK + YES,
            "score_chosen": 8.0,
        },
        ASK,
    ),
    # argilla/dpo-mix-7k
    "argilla dpo-mix": Layout(
        {"dataset": "a mix", "chosen": SYSTEM + ASK + YES, "rejected": SYSTEM + ASK + NO},
        SYSTEM + ASK,
    ),
    # argilla/kto-mix-15k
    "argilla kto-mix": Layout(
        {"dataset": "a mix", "prompt": Q, "completion": ASK + NO, "label": False, "rating": 2},
        ASK,
        label=False,
    ),
    # argilla/distilabel-intel-orca-dpo-pairs
    "distilabel orca": Layout(
        {
            "system": S,
            "input": Q,
            "chosen": GOOD,
            "rejected": BAD,
            "generations": [GOOD, BAD],
            "labelling_prompt": turns(("user", "Which is better?")),
            "status": "unchanged",
        },
        SYSTEM + ASK,
    ),
    # argilla/distilabel-intel-orca-kto
    "distilabel orca kto": Layout(
        {"system": S, "prompt": Q, "completion": GOOD, "label": True}, SYSTEM + ASK, label=True
    ),
    # argilla/distilabel-capybara-dpo-7k-binarized
    "distilabel capybara": Layout(
        {
            "conversation": [{"input": "Hi.", "output": "Hello."}, {"input": Q, "output": GOOD}],
            "prompt": Q,
            "chosen": turns(*EARLIER) + ASK + YES,
            "rejected": turns(*EARLIER) + ASK + NO,
        },
        turns(*EARLIER) + ASK,
    ),
    # argilla/distilabel-math-preference-dpo
    "distilabel math": Layout(
        {"metadata": "{}", "instruction": Q, "chosen_response": GOOD, "rejected_response": BAD},
        ASK,
    ),
    # nvidia/HelpSteer2, folder preference
    "helpsteer2": Layout(
        {
            "prompt": Q,
            "response_1": BAD,
            "response_2": GOOD,
            "preference_strength": 2,
            "preference_statement": "Response 2 is better.",
        },
        Q,
    ),
    # nvidia/HelpSteer3
    "helpsteer3": Layout(
        {
            "domain": "general",
            "language": "english",
            "context": turns(*EARLIER) + ASK,
            "response1": GOOD,
            "response2": BAD,
            "overall_preference": -2,
        },
        turns(*EARLIER) + ASK,
    ),
    # mlabonne/orpo-dpo-mix-40k
    "orpo-dpo-mix": Layout(
        {"source": "x", "chosen": ASK + YES, "rejected": ASK + NO, "prompt": Q, "question": Q}, ASK
    ),
    # OpenAI: guide of direct preference optimization
    "openai": Layout(
        {"input": {"messages": ASK}, "preferred_output": YES, "non_preferred_output": NO}, ASK
    ),
    # Names that no tool documents
    "a prompt of another name": Layout(
        {"ask": Q, "chosen": GOOD, "rejected": BAD}, ASK, {"instruction": "ask"}
    ),
    "a prompt of turns of another name": Layout(
        {"before": SYSTEM + ASK, "chosen": YES, "rejected": NO}, SYSTEM + ASK, {"prompt": "before"}
    ),
    "an answer next to a prompt of another name": Layout(
        {"ask": Q, "completion": YES, "label": True}, ASK, {"instruction": "ask"}, True
    ),
    "sides of other names": Layout(
        {"prompt": Q, "better": GOOD, "worse": BAD}, Q, {"chosen": "better", "rejected": "worse"}
    ),
}


def sources_of(
    folder: Path, rows: list[dict[str, Any]], learned: Learned, ending: str = "jsonl", **more: Any
) -> DataSource:
    file = folder / f"rows.{ending}"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (source,) = load_sources(FinetuneDataConfig(train_files=str(file), **more), learned=learned)
    return source


def examples(source: DataSource) -> list[Any]:
    return [source.example(stored) for stored in source.rows]


def expected(layout: Layout) -> Pair | Answer:
    def side(answer: str) -> PromptCompletion | Conversation:
        if isinstance(layout.prompt, str):
            return PromptCompletion(layout.prompt, answer)
        messages = [*layout.prompt, {"role": "assistant", "content": answer}]
        return Conversation(messages, supervised_from=len(layout.prompt))

    if layout.label is None:
        return Pair(*map(side, layout.answers))
    return Answer(side(layout.answers[0 if layout.label else 1]), layout.label)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_is_read_completely(tmp_path: Path, name: str, ending: str) -> None:
    layout = LAYOUTS[name]
    learned: Learned = "pairs" if layout.label is None else "answers"
    rows = [layout.row] * 3
    if layout.mapping is None:
        source = sources_of(tmp_path, rows, learned, ending)
    else:
        with pytest.raises(DataError) as refusal:
            sources_of(tmp_path, rows, learned, ending)
        offered = [yaml.safe_load(text) for text in re.findall(r"\{.*?\}", str(refusal.value))]
        assert layout.mapping in offered, refusal.value
        source = sources_of(tmp_path, rows, learned, ending, columns=layout.mapping)
    assert examples(source) == [expected(layout)] * 3
    # Rows by their standard names, as a rehearsal writes them, mean the same.
    used = (*source.layout.columns, *source.layout.optional)
    renamed = [
        {k: v for k, v in source.row(stored).items() if k in used and v is not None}
        for stored in source.rows
    ]
    assert examples(sources_of(tmp_path, renamed, learned)) == [expected(layout)] * 3


def test_the_table_is_long() -> None:
    assert len(LAYOUTS) > 45
