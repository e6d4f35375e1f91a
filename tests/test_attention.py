"""Attention within documents: equal to one by one, without masks, without waiting for a device."""

import peft
import pytest
import torch
import torch.nn.functional as F
from sharded import CLOSE, loss_sum, relative_difference, train_step
from tiny_models import TYPES, own_section, tiny_class, tiny_config, tiny_model
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.data.samples.sample_shape import SampleShape
from toolkit.errors import ModelError
from toolkit.models import attention
from toolkit.models.attention import BORDERS, attend_within_documents, document_borders
from toolkit.models.packing_probe import probe_packing
from toolkit.sharding import recompute
from toolkit.training import head_loss

LENGTHS = [[7, 1, 11, 5], [3, 9, 12], [24]]
WINDOW = 4


def batch_of(lengths=LENGTHS, seed=0):
    """Return rows of documents with their positions, labels and borders."""
    torch.manual_seed(seed)
    ids = torch.randint(8, 120, (len(lengths), sum(lengths[0])))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    labels = torch.where(positions == 0, -100, ids)
    batch = {"input_ids": ids, "position_ids": positions, "labels": labels}
    return batch | document_borders(batch)


def forward_of(batch):
    return {k: v for k, v in batch.items() if k != "labels"}


def within_documents(kind, **changes):
    model = tiny_model(kind, **changes).eval()
    attend_within_documents(model)
    return model


@torch.no_grad()
def off_alone(model, lengths, without=()):
    """Return by how much of their spread packed logits differ from those of each by itself."""
    batch = {k: v for k, v in forward_of(batch_of(lengths)).items() if k not in without}
    logits = model(**batch).logits
    off = 0.0
    for row, parts in enumerate(lengths):
        split = zip(batch["input_ids"][row].split(parts), logits[row].split(parts), strict=True)
        for ids, among in split:
            off = max(off, float((model(input_ids=ids[None]).logits[0] - among).abs().max()))
    return off / float(logits.std())


# --------------------------------------------------------------------------------------------------
# Right numbers
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [LENGTHS, [[1300, 100], [700, 700]]])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma3_text", "gpt2", "opt"])
def test_packed_equals_one_by_one(kind, lengths):
    """In short and long documents; each alone runs with the model's own attention."""
    positions = {"n_positions": 2048} if kind == "gpt2" else {"max_position_embeddings": 2048}
    windows = {"sliding_window": WINDOW} if kind == "gemma3_text" else {}
    model = within_documents(kind, **positions, **windows)
    assert off_alone(model, lengths) < 1e-5


def test_borders_are_what_keeps_documents_apart():
    """The controls: borders of rows, and a window of another length, change the logits."""
    model = within_documents("gemma3_text", sliding_window=WINDOW)
    inputs = forward_of(batch_of())
    with torch.no_grad():
        right = model(**inputs).logits
        rows = model(**inputs | document_borders({"input_ids": inputs["input_ids"]})).logits
        for layer in model.model.layers:
            layer.self_attn.sliding_window = None
        wide = model(**inputs).logits
    assert float((rows - right).abs().max() / right.std()) > 0.1
    assert float((wide - right).abs().max() / right.std()) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_every_safe_type_packs_to_the_numbers_of_one_by_one(kind):
    try:
        config = own_section(tiny_config(kind), tiny_class(kind))
        verdict = probe_packing(config, tiny_class(kind))
    except (ImportError, ValueError) as error:
        pytest.skip(f"cannot be built here: {error}")
    if not verdict.ok:
        pytest.skip(verdict.why)
    model = tiny_model(kind).eval()
    if verdict.mask is None:
        attend_within_documents(model)
    assert off_alone(model, LENGTHS, without=() if verdict.mask is None else BORDERS) < 1e-5


@pytest.mark.parametrize("window", [None, 5, 700])
@pytest.mark.parametrize(("heads", "widths"), [((4, 2), (16, 16)), ((3, 3), (24, 16))])
def test_the_plain_path_is_attention_under_a_dense_mask(window, heads, widths):
    torch.manual_seed(0)
    lengths = [1, 1100, 30, 600]
    tokens = sum(lengths)
    q = torch.randn(tokens, heads[0], widths[0], requires_grad=True)
    k = torch.randn(tokens, heads[1], widths[0], requires_grad=True)
    v = torch.randn(tokens, heads[1], widths[1], requires_grad=True)
    borders = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    found = attention._attend_each_document((q, k, v), borders, 0.3, window, 0.0)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    back = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen = (document[:, None] == document) & (back >= 0) & (back < (window or tokens))
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(heads[0] // heads[1], 1)) * 0.3
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", shares, v.repeat_interleave(heads[0] // heads[1], 1))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad(found, (q, k, v), weights)
    for one, other in zip(ours, torch.autograd.grad(expected, (q, k, v), weights), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_dropout_is_dropped():
    q, k, v = torch.randn(3, 900, 2, 8)
    borders = torch.tensor([0, 900], dtype=torch.int32)
    kept = [
        attention._attend_each_document((q, k, v), borders, 0.3, None, p) for p in (0.0, 0.0, 0.5)
    ]
    assert torch.equal(kept[0], kept[1])
    assert not torch.allclose(kept[0], kept[2], atol=0.1)


# --------------------------------------------------------------------------------------------------
# No mask, no waiting
# --------------------------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """Counts operations whose result the host waits for, and tensors of all tokens by all."""

    WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique")

    def __init__(self, tokens):
        super().__init__()
        self.tokens, self.waits, self.masks, self.kernels = tokens, [], [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        by_mask = name in ("index", "index_put", "index_put_") and any(
            t is not None and t.dtype == torch.bool for t in args[1]
        )
        if by_mask or any(name.startswith(w) for w in self.WAITING):
            self.waits.append(name)
        self.kernels += name == "_varlen_attn"
        self.masks += [
            name
            for t in tree_leaves(out)
            if isinstance(t, torch.Tensor) and t.shape[-2:] == (self.tokens, self.tokens)
        ]
        return out


CASES = ["llama", "qwen3_moe", "gemma3_text", "lora"]


def training_model(case, ours=True, dtype=torch.float32):
    kind = "llama" if case == "lora" else case
    windows = {"sliding_window": WINDOW} if kind == "gemma3_text" else {}
    config = tiny_config(kind, max_position_embeddings=2048, **windows)
    model = tiny_class(kind)._from_config(config, dtype=dtype)
    if ours:
        attend_within_documents(model)
    if case == "lora":
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    return model.train()


def step_batch(packing):
    batch = batch_of([[400, 130, 70], [300, 299, 1]])
    if packing == "wrapped":
        batch = {"input_ids": batch["input_ids"], "labels": batch["input_ids"].clone()}
        batch |= document_borders(batch)
    return batch


@pytest.fixture
def like_a_device(monkeypatch):
    """The loss looks at the values of labels on CPUs, which costs nothing there."""
    monkeypatch.setattr(head_loss, "_DEVICES_WITH_HOST_COUNTS", ())


def steps(model, batch):
    """Run two steps; return what the second did."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    train_step(model, optimizer, [batch, batch])
    with Counted(batch["input_ids"].shape[1]) as seen:
        train_step(model, optimizer, [batch, batch])
    return seen


@pytest.mark.parametrize("packing", ["packed", "wrapped"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("like_a_device")
def test_a_step_builds_no_mask_and_waits_for_nothing(case, packing):
    seen = steps(training_model(case), step_batch(packing))
    assert seen.waits == []
    assert seen.masks == []


@pytest.mark.parametrize("packing", ["packed", "wrapped"])
@pytest.mark.usefixtures("like_a_device")
def test_the_own_attention_of_a_model_waits_and_masks(packing):
    """The control."""
    batch = {k: v for k, v in step_batch(packing).items() if k not in BORDERS}
    case = "llama" if packing == "packed" else "gemma3_text"  # whose window takes a mask
    seen = steps(training_model(case, ours=False), batch)
    assert len(seen.masks) > 0
    assert packing == "wrapped" or len(seen.waits) > 0


@pytest.mark.parametrize("packing", ["packed", "wrapped"])
@pytest.mark.parametrize(  # PEFT cannot be put on tensors without values
    "case", [CASES[0], *(pytest.param(c, marks=pytest.mark.slow) for c in CASES[1:-1])]
)
@pytest.mark.usefixtures("like_a_device")
def test_a_step_waits_for_nothing_where_values_are_not_at_hand(case, packing, monkeypatch):
    """Tensors without values, with a GPU's kernel: each look at a value is an error. What
    transformers leaves out for such tensors, the test before this one counts.
    """
    monkeypatch.setattr(attention, "_can_use_varlen_kernel", lambda query, dropout: True)
    batch = step_batch(packing)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        model = training_model(case, dtype=torch.bfloat16)
        batch = {k: fake.from_tensor(v) if torch.is_tensor(v) else v for k, v in batch.items()}
        seen = steps(model, batch)
        with pytest.raises(DataDependentOutputException):  # the control
            batch[BORDERS[0]].tolist()
    assert (seen.waits, seen.masks) == ([], [])
    windows = case == "gemma3_text"
    if packing == "packed" or windows:  # else SDPA does it, row by row
        layers = model.config.num_hidden_layers
        if packing == "wrapped":
            layers = model.config.layer_types.count("sliding_attention")
        assert seen.kernels == 2 * layers  # two micro-batches


# --------------------------------------------------------------------------------------------------
# Around it
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("selective", [False, True])
def test_recomputed_layers_attend_as_they_did(selective):
    """Also where the last forward came without borders, before the backward."""
    packed = batch_of()
    padded = {"input_ids": packed["input_ids"], "labels": packed["labels"]}
    padded["attention_mask"] = (torch.arange(24) < torch.tensor([[24], [20], [9]])).long()
    gradients = []
    for checkpointed in (False, True):
        model = within_documents("gemma3_text", sliding_window=WINDOW).train()
        for layer in model.model.layers if checkpointed else ():
            recompute.recompute_in_backward(layer, selective=selective)
        losses = [loss_sum(model, batch) for batch in (packed, padded, packed)]
        (losses[0] + 2 * losses[1] + 3 * losses[2]).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert relative_difference(*gradients) < CLOSE
    wrong = [1.00001 * gradient for gradient in gradients[0]]  # the control
    assert relative_difference(wrong, gradients[0]) > CLOSE


def test_selective_checkpointing_keeps_what_attention_gave():
    kept = recompute._kept_operations()
    assert torch.ops.torch_attn._varlen_attn.default in kept
    model = within_documents("llama").train()
    for layer in model.model.layers:
        recompute.recompute_in_backward(layer, selective=True)

    class Attentions(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += "scaled_dot_product" in func._schema.name and func in kept
            return func(*args, **(kwargs or {}))

    loss_sum(model, batch_of())  # the first one tries a row beside
    with Attentions() as seen:
        loss_sum(model, batch_of()).backward()
    documents = sum(len(row) for row in LENGTHS)
    assert seen.count == documents * model.config.num_hidden_layers


def test_other_forwards_are_the_models_own():
    """Padded on the left, and generating with a cache."""
    own = tiny_model("gemma3_text", sliding_window=WINDOW).eval()
    ours = within_documents("gemma3_text", sliding_window=WINDOW)
    ids = batch_of()["input_ids"]
    mask = (torch.arange(24) >= torch.tensor([[0], [4], [15]])).long()
    with torch.no_grad():
        logits = [m(input_ids=ids, attention_mask=mask).logits for m in (own, ours)]
    assert relative_difference(logits[:1], logits[1:]) < CLOSE
    written = [
        m.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, use_cache=True)
        for m in (own, ours)
    ]
    assert torch.equal(*written)


def test_a_saved_config_does_not_name_it(tmp_path):
    model = within_documents("llama")
    assert model.config._attn_implementation.startswith("documents_")
    model.save_pretrained(tmp_path)
    assert "documents_" not in (tmp_path / "config.json").read_text()


def test_borders_beside_a_mask_are_refused():
    batch = forward_of(batch_of())
    with pytest.raises(ModelError, match="attention_mask together with document borders"):
        within_documents("llama")(**batch, attention_mask=torch.ones_like(batch["input_ids"]))


def test_the_loss_is_the_same_with_borders():
    """In the head and, found by one row's trial, outside of it."""
    batch = batch_of()
    without = {k: v for k, v in batch.items() if k not in BORDERS}
    for kind in ("llama", "cohere"):
        losses = [loss_sum(within_documents(kind), b) for b in (batch, without)]
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


def test_what_it_does_not_know_is_refused_by_name():
    module, q = torch.nn.Module(), torch.randn(1, 2, 6, 8)
    borders = dict(zip(BORDERS, (torch.tensor([0, 2, 6]).int(),) * 2 + (4, 4), strict=True))
    for unknown in ({"softcap": 30.0}, {"s_aux": q}, {"position_bias": q}):
        with pytest.raises(ModelError, match=f"takes {next(iter(unknown))}"):
            attention._attention_forward("sdpa", module, q, q, q, None, **borders, **unknown)
    for wrong in ({"is_causal": False}, {"attention_mask": q}):
        given = {"attention_mask": None} | wrong
        with pytest.raises(ModelError, match="its own mask"):
            attention._attention_forward("sdpa", module, q, q, q, **given, **borders)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("gemma2", "eager"), ("llama4_text", "by itself"), ("stablelm", "see each other")],
)
def test_types_that_it_does_not_fit_keep_their_mask(kind, reason):
    """Soft caps; chunks; borders that do not reach the attention: still packed, with a mask."""
    verdict = probe_packing(tiny_config(kind), tiny_class(kind))
    assert verdict.ok
    assert reason in verdict.mask


def test_whole_rows_are_tried_too():
    verdicts = {
        kind: probe_packing(tiny_config(kind), tiny_class(kind), packed=False)
        for kind in ("llama", "gemma3_text", "gemma2", "llama4_text")
    }
    assert all(verdict.ok for verdict in verdicts.values())
    assert [kind for kind, v in verdicts.items() if v.mask is None] == ["llama", "gemma3_text"]


def test_flash_attention_is_handed_the_borders(monkeypatch):
    """A stand-in for the kernel, which no CPU has."""
    seen = []

    def kernel(query, key, value, mask, **options):
        seen.append(options)
        q, k, v = (t.flatten(0, 1) for t in (query, key, value))
        window, scaling = options["sliding_window"], options["softmax_scale"]
        out = attention._attend_each_document(
            (q, k, v), options["cu_seq_lens_q"], scaling, window, 0.0
        )
        return out.unflatten(0, query.shape[:2])

    monkeypatch.setattr(attention, "_flash_attention_forward", kernel)
    model = tiny_model("gemma3_text", sliding_window=WINDOW).eval()
    own = within_documents("gemma3_text", sliding_window=WINDOW)
    model.config._attn_implementation = "flash_attention_3"
    attend_within_documents(model)
    batch = forward_of(batch_of())
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, own(**batch).logits)
    assert {options["attn_implementation"] for options in seen} == {"flash_attention_3"}
    assert {type(options["max_length_k"]) for options in seen} == {int}
    assert all(options["is_causal"] for options in seen)


@pytest.mark.parametrize("packing", ["bfd", "wrapped"])
def test_micro_batches_carry_borders(packing):
    samples = [
        {"input_ids": torch.arange(6), "labels": torch.arange(6)},
        {"input_ids": torch.arange(6), "labels": torch.arange(6)},
    ]
    if packing == "bfd":
        samples[0]["position_ids"] = torch.tensor([0, 1, 2, 0, 1, 0])
        samples[1]["position_ids"] = torch.tensor([0, 0, 1, 2, 3, 4])
        samples = [sample | {"used": torch.tensor(6)} for sample in samples]
    batch = SampleShape(packing, 6, borders=True).batch(samples).inputs
    expected, longest = ([0, 3, 5, 6, 7, 12], 5) if packing == "bfd" else ([0, 6, 12], 6)
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == expected
    assert batch["max_length_q"] == batch["max_length_k"] == longest
    assert not SampleShape(packing, 6).batch(samples).inputs.keys() & set(BORDERS)
