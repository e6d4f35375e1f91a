"""Examples as token ids: what is learned, what is too long, what cannot be used; the same for any
number of processes, from the cache, and from a stream.
"""

import json
import os
import random
import signal
from dataclasses import replace
from functools import partial

import datasets
import numpy as np
import pytest
from conftest import save_byte_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from toolkit import ranks
from toolkit.config.data import FinetuneDataConfig
from toolkit.data.examples.recognise import Conversation, PromptCompletion, Text, Tokens
from toolkit.data.feed.feed import build_samples
from toolkit.data.feed.stream import SourceStream, StreamSource
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.data.sources.row_values import BadRow, SkippedRow
from toolkit.data.sources.rows import load_sources
from toolkit.data.tokens import encode as encode_module
from toolkit.data.tokens.encode import Encoder, encode_source
from toolkit.data.tokens.encoded import EMPTY_PROMPT, Counts, EncodedExample, FatalRow
from toolkit.data.tokens.text_ids import TextTokenizer
from toolkit.errors import DataError

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
EOS = 0


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Bytes: a character of ASCII is a token."""
    tokenizer = AutoTokenizer.from_pretrained(save_byte_tokenizer(tmp_path_factory.mktemp("bytes")))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


def config(**changes) -> FinetuneDataConfig:
    return replace(FinetuneDataConfig(sequence_length=64), **changes)


def written(tmp_path, rows: list, name: str = "rows.jsonl"):
    file = tmp_path / name
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    text = "".join(f"{line}\n" for line in lines)
    if not file.exists() or file.read_text("utf-8") != text:  # a file that is written is read anew
        file.write_text(text, "utf-8")
    return str(file)


def source_of(tmp_path, rows: list, cfg: FinetuneDataConfig | None = None):
    cfg = replace(cfg or config(), train_files=[written(tmp_path, rows)])
    (source,) = load_sources(cfg)
    return source


def chat(*contents: str) -> dict:
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}


def learned(tokenizer, ids, spans) -> list[str]:
    return [tokenizer.decode(ids[begin:end]) for begin, end in spans]


# ---- One example


class OneByOne(Encoder):
    """Raises what is wrong with an example."""

    def __call__(self, example) -> EncodedExample:
        (result,) = self.encode_examples([example])
        if isinstance(result, BadRow):
            raise result
        return result


def test_texts_are_learned_whole(tokenizer):
    example = OneByOne(tokenizer, config(), 300)(Text("abc"))
    assert example.input_ids.dtype == np.int32
    assert tokenizer.decode(example.input_ids) == "abc<|endoftext|>"
    assert example.spans == [(0, 4)]
    assert example.supervised == 3  # nothing predicts the first
    bare = OneByOne(tokenizer, config(append_eos=False), 300)(Text("abc"))
    assert tokenizer.decode(bare.input_ids) == "abc"
    pieces = [Text("abc", end=False), Text("def", start=False)]
    joined = np.concatenate(
        [e.input_ids for e in OneByOne(tokenizer, config(), 300).encode_examples(pieces)]
    )
    assert tokenizer.decode(joined) == "abcdef<|endoftext|>"


def test_completions_are_learned_after_their_prompt(tokenizer):
    pair = PromptCompletion("one ", "two")
    example = OneByOne(tokenizer, config(), 300)(pair)
    assert learned(tokenizer, example.input_ids, example.spans) == ["two<|endoftext|>"]
    assert tokenizer.decode(example.input_ids) == "one two<|endoftext|>"
    bare = OneByOne(tokenizer, config(append_eos=False), 300)(pair)
    assert learned(tokenizer, bare.input_ids, bare.spans) == ["two"]
    whole = OneByOne(tokenizer, config(supervise="all"), 300)(pair)
    assert learned(tokenizer, whole.input_ids, whole.spans) == ["one two<|endoftext|>"]


def test_special_tokens_of_the_tokenizer_stand_around_texts_not_around_chats(tokenizer, tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer.save_pretrained(tmp_path)
    framed = AutoTokenizer.from_pretrained(tmp_path)
    framed.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|endoftext|>",
        special_tokens=[
            ("<|im_start|>", framed.convert_tokens_to_ids("<|im_start|>")),
            ("<|endoftext|>", EOS),
        ],
    )
    encoder = OneByOne(framed, config(), 300)
    examples = [Text("a"), PromptCompletion("b", "c"), Conversation(chat("d", "e")["messages"])]
    text, pair, talk = encoder.encode_examples(examples)
    assert framed.decode(text.input_ids) == "<|im_start|>a<|endoftext|>"  # one end, not two
    assert framed.decode(pair.input_ids) == "<|im_start|>bc<|endoftext|>"
    assert learned(framed, pair.input_ids, pair.spans) == ["c<|endoftext|>"]
    assert framed.decode(talk.input_ids).startswith("<|im_start|>user\nd<|im_end|>\n")
    assert learned(framed, talk.input_ids, talk.spans) == ["e<|im_end|>"]


def test_what_begins_a_text_is_not_put_before_it_twice(tokenizer, tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer.save_pretrained(tmp_path)
    framed = AutoTokenizer.from_pretrained(tmp_path)
    bos = ("<|im_start|>", framed.convert_tokens_to_ids("<|im_start|>"))
    framed.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[bos]
    )
    encoder = OneByOne(framed, config(), 300)
    begun, pair = Text("<|im_start|>a"), PromptCompletion("<|im_start|>a", "b")
    assert framed.decode(encoder(begun).input_ids) == "<|im_start|>a<|endoftext|>"
    example = encoder(pair)
    assert framed.decode(example.input_ids) == "<|im_start|>ab<|endoftext|>"
    assert learned(framed, example.input_ids, example.spans) == ["b<|endoftext|>"]
    inner = encoder(Text("a<|im_start|>"))
    assert framed.decode(inner.input_ids) == "<|im_start|>a<|im_start|><|endoftext|>"


def test_tokens_are_taken_with_their_labels(tokenizer):
    encoder = OneByOne(None, config(), 300)
    example = encoder(Tokens([5, 6, 7, 8, 9], [-100, 6, -100, 8, 9]))
    assert example.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert example.spans == [(1, 2), (3, 5)]
    assert encoder(Tokens([5, 6])).spans == [(0, 2)]
    for odd in (300, -1, 2**63, -(2**70)):
        with pytest.raises(BadRow, match=rf"ids from 0 to 299 .* got {odd}"):
            encoder(Tokens([5, odd]))
    with pytest.raises(BadRow, match="expected a supervised token") as caught:
        encoder(Tokens([5, 6], [5, -100]))  # the first one is predicted by nothing
    assert caught.value.reason == "no supervised token"
    with pytest.raises(DataError, match="expected a tokenizer, since the data is text"):
        encoder(Text("a"))


def test_too_long(tokenizer):
    example = PromptCompletion("0123456789", "abcdefghij")
    cut = OneByOne(tokenizer, config(sequence_length=15), 300)(example)
    assert cut.cut_off == 6
    assert tokenizer.decode(cut.input_ids) == "0123456789abcde"
    assert learned(tokenizer, cut.input_ids, cut.spans) == ["abcde"]
    with pytest.raises(SkippedRow, match="none of its first 10 tokens") as caught:
        OneByOne(tokenizer, config(sequence_length=10), 300)(example)
    assert caught.value.reason == "no supervised token within sequence_length"
    with pytest.raises(SkippedRow, match=r"at most 15 tokens \(data.sequence_length\), got 21"):
        OneByOne(tokenizer, config(sequence_length=15, too_long="drop"), 300)(example)
    with pytest.raises(FatalRow, match=r"got 21; set data.too_long to truncate or drop"):
        OneByOne(tokenizer, config(sequence_length=15, too_long="error"), 300)(example)
    for fits in ({"sequence_length": 21}, {"sequence_length": 5, "packing": "wrapped"}):
        whole = OneByOne(tokenizer, config(too_long="error", **fits), 300)(example)
        assert len(whole.input_ids) == 21
        assert not whole.cut_off


@pytest.mark.parametrize("too_long", ["truncate", "drop", "error"])
def test_texts_are_learned_whole_however_long(tokenizer, tmp_path, too_long):
    file = tmp_path / "book.txt"
    file.write_text("".join(f"Line {i} of it.\n" for i in range(40)))
    said = file.read_text()
    rows = written(tmp_path, [{"text": said}, {"text": "short"}])
    for files, texts in ((str(file), [said]), (rows, [said, "short"])):
        cfg = config(train_files=[files], too_long=too_long, sequence_length=32)
        (source,) = load_sources(cfg)
        made = encode_source(source, Encoder(tokenizer, cfg, 300))
        whole = [[*tokenizer(t)["input_ids"], EOS] for t in texts]
        assert made.tokens["input_ids"][:] == whole
        assert (made.counts.truncated, made.counts.cut_off, made.counts.dropped) == (0, 0, {})
        assert made.counts.supervised == sum(len(ids) - -(-len(ids) // 32) for ids in whole)
        # What is trained on: each token once, and all but the first of each piece learned.
        for packing in ("bfd", "none"):
            shape = SampleShape(packing, 32)
            stream = StreamSource(
                "s",
                source.rows.to_iterable_dataset(),
                partial(Encoder(tokenizer, cfg, 300).encode_row, source),
            )
            streamed = SourceStream(stream, 0, shape, seed=0, window=1000, first=1000)
            read = [streamed.next()]
            read += [streamed.next() for _ in streamed.items[1:]]
            prepared = build_samples(made, shape)
            for samples in ([shape.sample(i.pieces) for i in read], list(prepared)):
                kept, learned = [], 0
                for sample in samples:
                    labels = sample["labels"].tolist()
                    learned += sum(label != -100 for label in labels)
                    kept += [t for t in sample["input_ids"].tolist() if t]
                assert sorted(kept) == sorted(t for ids in whole for t in ids if t)
                assert learned == sum(len(ids) - -(-len(ids) // 32) for ids in whole)


def test_a_part_of_a_document_may_be_one_token(tokenizer):
    encoder = OneByOne(tokenizer, config(), 300)
    assert encoder(Text("a", start=False, end=False)).supervised == 0
    with pytest.raises(BadRow, match="expected a supervised token"):
        OneByOne(tokenizer, config(append_eos=False), 300)(Text("a"))


@pytest.mark.parametrize("supervise", ["completion", "assistant", "last_assistant"])
def test_what_does_not_go_with_texts(tokenizer, supervise):
    encoder = OneByOne(tokenizer, config(supervise=supervise), 300)
    with pytest.raises(DataError, match=f"data.supervise {supervise} does not go with texts"):
        encoder(Text("a"))
    with pytest.raises(DataError, match="does not go with token ids without labels"):
        encoder(Tokens([1, 2]))
    if supervise != "completion":
        with pytest.raises(DataError, match="does not go with prompts and completions"):
            encoder(PromptCompletion("a", "b"))


def test_a_tokenizer_with_more_ids_than_the_model(tokenizer):
    with pytest.raises(DataError, match=r"ids up to 258, .* has 258 rows .* model.resize_emb"):
        OneByOne(tokenizer, config(), 258)


# ---- Tokens across an edge


@pytest.fixture(scope="module")
def merging(tmp_path_factory):
    """Two tokenizers of words; offsets with the space before a word, and without it."""
    out = []
    for trim in (False, True):
        tokenizer = Tokenizer(models.BPE())
        # As in GPT-4's pattern, a word takes the space before it and the newlines after it.
        words = pre_tokenizers.Split(Regex(r" ?[^\s]+[\r\n]*|\s+(?!\S)|\s+"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=340,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(["The answer is forty two. Is it two?\n" * 9] * 9, trainer)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
        out.append(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>"))
    return out


def test_an_answer_is_learned_whole_after_the_tokens_of_its_prompt(merging):
    for tokenizer in merging:
        encoder = OneByOne(tokenizer, config(), 400)
        for prompt, completion, cut in (
            ("The answer is", " forty two.", False),
            ("The answer is ", "forty two.", True),
            ("The answer is for", "ty two.", True),
            ("The answer is  ", "two.", True),
            ("ü🤖", "🤖 two.", False),
            ("", "The answer", False),
        ):
            example = encoder(PromptCompletion(prompt, completion))
            rest = f"{completion}<|endoftext|>"
            assert learned(tokenizer, example.input_ids, example.spans) == [rest], prompt
            ((begin, end),) = example.spans
            assert example.input_ids[:begin].tolist() == tokenizer(prompt)["input_ids"], prompt
            notes = {} if prompt else {EMPTY_PROMPT: 1}
            assert (end, example.notes) == (len(example.input_ids), notes)
            whole = tokenizer(prompt + completion)["input_ids"]
            assert (example.input_ids.tolist() != [*whole, EOS]) == cut, prompt


def test_white_space_of_the_prompt_is_not_learned_where_offsets_leave_it_out():
    """A token of spaces and a newline begins before its offsets do."""
    tokenizers = {}
    for trim in (False, True):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(["hello  world  \n\n \t x  \n over\r\n"] * 50, trainer)
        byte_level = processors.ByteLevel(trim_offsets=trim)
        around = processors.TemplateProcessing("h $A", special_tokens=[("h", 71)])
        tokenizer.post_processor = processors.Sequence([byte_level, around])
        tokenizers[trim] = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    draw, signs = random.Random(0), ["hello", " ", "  ", "\n", "\t", "\r\n", "x", "é"]
    cases = [("hello  \n", 7)]
    for _ in range(1500):
        text = "".join(draw.choices(signs, k=draw.randrange(1, 12)))
        cases.append((text, draw.randrange(len(text))))
    texts, spans = [t for t, _ in cases], [[(at, len(t))] for t, at in cases]
    expected = TextTokenizer(tokenizers[False]).encode(texts, spans)
    found = TextTokenizer(tokenizers[True]).encode(texts, spans)
    for case, one, two in zip(cases, expected, found, strict=True):
        assert (one.ids.tolist(), one.spans) == (two.ids.tolist(), two.spans), case
    assert TextTokenizer(tokenizers[True]).special_tokens() == ([71], [])


def test_every_span_of_a_text_is_learned_whole(merging):
    """With awkward white space, and offsets that leave it out."""
    text = "The answer  is \n\n forty\ttwo. Is it two?\n ü🤖 is"
    for tokenizer in merging:
        spans = [[(a, b)] for a in range(len(text)) for b in range(a + 1, len(text) + 1)]
        found = TextTokenizer(tokenizer).encode([text] * len(spans), spans)
        cuts = 0
        for ((a, b),), marked in zip(spans, found, strict=True):
            ((first, last),) = marked.spans
            ids = marked.ids.tolist()
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode(ids[first:last]) == text[a:b], tokenizer is merging[1]
            assert ids[:first] == tokenizer(text[:a])["input_ids"]
            cuts += ids != tokenizer(text)["input_ids"]
        assert 0 < cuts < len(spans)


def test_a_tokenizer_without_offsets(merging):
    class Slow:
        """What transformers' Python tokenizers offer."""

        is_fast = False

        def __call__(self, text, **options):
            return {"input_ids": merging[0](text, add_special_tokens=False)["input_ids"]}

    slow = TextTokenizer(Slow())
    fine, cut = slow.encode(["The answer is forty"] * 2, [[(13, 19)], [(14, 19)]])
    fast = TextTokenizer(merging[0]).encode(["The answer is forty"], [[(13, 19)]])[0]
    assert fine.ids.tolist() == fast.ids.tolist()
    assert fine.spans == fast.spans
    assert isinstance(cut, BadRow)
    assert "does not report the characters of its tokens" in str(cut)


# ---- Sources


def test_a_source_counts_and_cache(tokenizer, tmp_path, monkeypatch):
    rows = [chat(f"Say {i}", "x" * i) for i in range(1, 60)]
    cfg = config(sequence_length=70)
    encoded = encode_source(source_of(tmp_path, rows, cfg), Encoder(tokenizer, cfg, 300))
    counts = encoded.counts
    assert encoded.tokens.column_names == ["input_ids", "spans", "row"]
    assert counts.rows == counts.kept + sum(counts.dropped.values()) == 59
    assert counts.tokens == sum(len(row["input_ids"]) for row in encoded.tokens)
    assert counts.truncated == sum(len(row["input_ids"]) == 70 for row in encoded.tokens) - 1
    supervised = 0
    for row in encoded.tokens:
        (begin, end) = row["spans"]
        supervised += end - begin
        said = "x" * (row["row"] + 1) + "<|im_end|>"
        assert said.startswith(learned(tokenizer, row["input_ids"], [(begin, end)])[0])
    assert counts.supervised == supervised
    # Again, from the cache: nothing is encoded, counts come along.
    with monkeypatch.context() as patched:
        patched.setattr(Encoder, "encode_rows", None)
        again = encode_source(source_of(tmp_path, rows, cfg), Encoder(tokenizer, cfg, 300))
        assert again.counts == counts
        assert again.tokens.data.equals(encoded.tokens.data)
        for other in (
            replace(cfg, supervise="last_assistant"),
            replace(cfg, sequence_length=71),
            replace(cfg, too_long="drop"),
            replace(cfg, chat_template=CHATML + " "),
        ):
            with pytest.raises(TypeError, match="NoneType"):
                encode_source(source_of(tmp_path, rows, cfg), Encoder(tokenizer, other, 300))
        with pytest.raises(TypeError, match="NoneType"):
            encode_source(source_of(tmp_path, [*rows, rows[0]], cfg), Encoder(tokenizer, cfg, 300))
    # The tokens without the counts are no cache.
    for file in (tmp_path / "cache").rglob("encoded-*.json"):
        file.unlink()
    assert (
        encode_source(source_of(tmp_path, rows, cfg), Encoder(tokenizer, cfg, 300)).counts == counts
    )


MIXED = [
    chat("What?", "That."),
    {"messages": [{"role": "user", "content": "no answer"}]},
    "{broken",
    chat("Long " * 30, "lost"),
    chat("cut", "x" * 90),
    chat("<|im_end|>", "y", "z" * 10, "w"),
    *(chat(f"{i}", f"{i}!") for i in range(40)),
]


def test_any_number_of_processes_and_a_stream_give_the_same(tokenizer, tmp_path, monkeypatch):
    cfg = config(on_bad_row="skip")
    source = source_of(tmp_path, MIXED, cfg)
    one = encode_source(source, Encoder(tokenizer, cfg, 300))
    datasets.disable_caching()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(ranks, "available_cores", lambda: {0, 1, 2})
            patched.setattr(encode_module, "_ROWS_PER_PROCESS", 1)
            three = encode_source(source, Encoder(tokenizer, cfg, 300))
    finally:
        datasets.enable_caching()
    with monkeypatch.context() as patched:  # what three processes wrote is read by one
        patched.setattr(Encoder, "encode_rows", None)
        again = encode_source(source, Encoder(tokenizer, cfg, 300))
    assert again.counts == three.counts
    assert again.tokens["input_ids"][:] == three.tokens["input_ids"][:]
    assert three.counts == one.counts
    assert three.tokens["input_ids"][:] == one.tokens["input_ids"][:]
    assert three.tokens["spans"][:] == one.tokens["spans"][:]
    assert one.tokens["row"][:] == [0, 4, *range(5, 46)]
    reasons = ["no assistant turn", "not JSON", "no supervised token within sequence_length"]
    assert set(one.counts.dropped) == set(reasons), one.counts.dropped
    assert one.counts.truncated == 1
    frame = sum(map(len, ("user\n", "cut", "\n", "assistant\n", "x" * 90, "\n"))) + 4
    assert one.counts.cut_off == frame - cfg.sequence_length
    (place,) = one.counts.places["not JSON"]
    assert "rows.jsonl line 3" in place
    # Row by row, as streams are read.
    streamed = partial(Encoder(tokenizer, cfg, 300).encode_row, source)
    examples = [streamed(stored, i) for i, stored in enumerate(source.rows)]
    assert [i for i, e in enumerate(examples) if not isinstance(e, BadRow)] == one.tokens["row"][:]
    kept = [e.input_ids.tolist() for e in examples if not isinstance(e, BadRow)]
    assert kept == one.tokens["input_ids"][:]
    counts = Counts()
    for example in examples:
        counts.add(example)
    assert counts == one.counts


def in_two(monkeypatch) -> None:
    """Have conversations encoded in two processes, also where there are few."""
    monkeypatch.setattr(ranks, "available_cores", lambda: {0, 1})
    monkeypatch.setattr(encode_module, "_ROWS_PER_PROCESS", 1)


def test_the_first_bad_row_ends_the_run(tokenizer, tmp_path, monkeypatch):
    in_two(monkeypatch)
    cfg = config()
    with pytest.raises(DataError, match=r"line 2: expected a turn of the assistant.*skip"):
        encode_source(source_of(tmp_path, MIXED, cfg), Encoder(tokenizer, cfg, 300))
    rows = [chat("a", "b"), chat("a", "b" * 80)]
    for changes in ({}, {"on_bad_row": "skip"}):  # too long is no bad row
        cfg = config(too_long="error", **changes)
        with pytest.raises(DataError, match=r"rows.jsonl line 2: expected at most 64 tokens"):
            encode_source(source_of(tmp_path, rows, cfg), Encoder(tokenizer, cfg, 300))
    cfg = config(too_long="drop")
    encoded = encode_source(source_of(tmp_path, rows, cfg), Encoder(tokenizer, cfg, 300))
    assert encoded.counts.dropped == {"too long": 1}
    assert encoded.tokens["row"][:] == [0]


def killed(first: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_ends_the_run(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(encode_module, "_encode_in_worker", killed)
    in_two(monkeypatch)
    cfg = config()
    with pytest.raises(DataError, match=r"one of 2 processes .* was killed.*taskset"):
        encode_source(source_of(tmp_path, [chat("a", "b")] * 4, cfg), Encoder(tokenizer, cfg, 300))


def test_a_source_of_which_nothing_is_left(tokenizer, tmp_path):
    cfg = config(too_long="drop", sequence_length=5)
    encoded = encode_source(
        source_of(tmp_path, [chat("a", "b")] * 4, cfg), Encoder(tokenizer, cfg, 300)
    )
    assert len(encoded.tokens) == encoded.counts.kept == 0
    assert encoded.counts.dropped == {"too long": 4}
    assert len(encoded.counts.places["too long"]) == 3


def test_no_chat_template(tokenizer, tmp_path):
    bare = AutoTokenizer.from_pretrained(save_byte_tokenizer(tmp_path / "bare"))
    cfg = config()
    with pytest.raises(DataError, match="has no chat template, and the data holds conversations"):
        encode_source(source_of(tmp_path, [chat("a", "b")], cfg), Encoder(bare, cfg, 300))
