"""The loss inside the head: what it equals, what it costs, which models it holds for."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_ranks
from sharded import (
    COUNT,
    apply_fsdp,
    as_batch,
    evaluate,
    init_mesh,
    loss_sum,
    supervised_tokens,
    train_step,
)
from tiny_models import float64_throughout, perturb, rows, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.config.settings import ShardingConfig
from toolkit.data.samples.batch import Batch
from toolkit.training import head_loss, loss_kernel
from toolkit.training.head_loss import HeadLoss, LogitMap
from toolkit.training.loss import _logit_maps, causal_lm_loss

CLOSE = 1e-5
FP32 = ShardingConfig(param_dtype="float32")
# Type -> settings that show, and the map that they make.
MAPS: dict[str, tuple[dict[str, Any], LogitMap]] = {
    "llama": ({}, LogitMap()),
    "phi": ({}, LogitMap()),  # its head has a bias
    "gemma2": ({"final_logit_softcapping": 0.5}, LogitMap(cap=0.5)),
    "granite": ({"logits_scaling": 8.0}, LogitMap(1 / 8)),
    "cohere": ({"logit_scale": 0.25}, LogitMap(0.25)),
}


@pytest.fixture
def small_chunks(monkeypatch) -> None:
    monkeypatch.setitem(head_loss._CHUNK_ELEMENTS, "cpu", 160 * 7)


def from_logits(model: Any, batch: dict[str, torch.Tensor], smoothing: float = 0.0) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    labels = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def off(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    largest = max(float(e.abs().max()) for e in expected.values())
    return max(float((f - expected[n]).abs().max()) for n, f in found.items()) / largest


# --------------------------------------------------------------------------------------------------
# What it equals
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", MAPS)
def test_it_is_the_models_own_loss(kind, smoothing, small_chunks, capsys):
    changes, expected_map = MAPS[kind]
    model, batch = tiny_model(kind, **changes).train(), rows(3)
    own = from_logits(model, batch, smoothing)
    if not smoothing:
        theirs = model(**batch).loss.detach() * supervised_tokens(batch["labels"])
        assert float(theirs) == pytest.approx(own.item(), rel=CLOSE)
    expected = gradients(model, own)
    found = loss_sum(model, batch, label_smoothing=smoothing)
    assert found.item() == pytest.approx(own.item(), rel=CLOSE)
    assert off(gradients(model, found), expected) < CLOSE
    assert _logit_maps[model] == (160, expected_map)
    assert capsys.readouterr().out == ""
    with torch.no_grad():
        assert float(loss_sum(model, batch)) == pytest.approx(float(from_logits(model, batch)))
    if expected_map != LogitMap():  # the control: without its map the model's loss is another
        _logit_maps[model] = (160, LogitMap())
        assert off(gradients(model, loss_sum(model, batch)), expected) > 1e-2


@pytest.fixture
def in_one(monkeypatch) -> list[int]:
    """Loss and gradient of a chunk as they are where they are one kernel, of plain operations;
    returns the rows of each.
    """
    made: list[int] = []
    rule = loss_kernel.loss_and_gradient

    def count(logits, *rest, **options):
        made.append(len(logits))
        return rule(logits, *rest, **options)

    monkeypatch.setattr(head_loss, "_DEVICES_WITH_KERNEL", ("cpu",))
    monkeypatch.setattr(loss_kernel, "loss_and_gradient", count)
    monkeypatch.setattr(torch, "compile", lambda fn: fn)
    loss_kernel._compiled_kernel.cache_clear()
    return made


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", MAPS)
def test_in_one_kernel_it_is_the_models_own_loss(kind, smoothing, small_chunks, in_one):
    model, batch = tiny_model(kind, **MAPS[kind][0]).train(), rows(3)
    own = from_logits(model, batch, smoothing)
    expected = gradients(model, own)
    found = loss_sum(model, batch, label_smoothing=smoothing)
    assert found.item() == pytest.approx(own.item(), rel=CLOSE)
    assert off(gradients(model, found), expected) < CLOSE
    assert in_one
    with torch.no_grad():  # an evaluation needs no gradient
        made = len(in_one)
        assert float(loss_sum(model, batch)) == pytest.approx(float(from_logits(model, batch)))
    assert len(in_one) == made


def chunk(dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    logits = (torch.randn(33, 1003, generator=drawn) * 4).to(dtype)
    targets = torch.randint(0, 1003, (33,), generator=drawn)
    targets[::3] = -100
    return logits, targets


def test_a_kernel_that_does_not_compile_or_is_wrong_is_said_and_not_taken(monkeypatch, capsys):
    logits, targets = chunk()
    expected = loss_kernel.loss_and_gradient(logits, targets, (1.0, None, 0.0, 0.0))
    monkeypatch.setattr(loss_kernel, "_refused", set())

    def fails(*_):
        raise RuntimeError("no compiler\nand more")

    def scaled(z, t):
        """Return gradients that are 1 in 30,000 too large, which no order of a sum explains."""
        loss, gradient = loss_kernel.loss_and_gradient(z, t, (1.0, None, 0.0, 0.0))
        return loss, gradient * (1 + 1 / 30_000)

    wrong = ((lambda z, t: (z.sum(), z), "other values"), (scaled, "other values"))
    for kernel, why in ((fails, "no compiler"), *wrong):
        monkeypatch.setattr(torch, "compile", lambda fn, kernel=kernel: kernel)
        loss_kernel._compiled_kernel.cache_clear()
        loss_kernel._refused.clear()
        for _ in range(2):
            found = loss_kernel.cross_entropy(logits, targets, 1.0, None, 0.0)
            assert all(map(torch.equal, found, expected))
        said = capsys.readouterr().out
        assert said.count("the loss uses plain operations") == 1
        assert why in said
    loss_kernel._compiled_kernel.cache_clear()


@pytest.mark.parametrize("error", [0.0, 1e-2])
def test_a_kernel_that_rounds_otherwise_is_taken(monkeypatch, error):
    """Sure answers have a loss near 0: the difference of numbers as large as the logits, whose
    rounding is all that two kernels differ in.
    """
    logits, targets = torch.full((4, 1003), 1.0), torch.arange(4)
    logits[:, :4] += 29.0 * torch.eye(4)
    monkeypatch.setattr(loss_kernel, "_refused", set())

    def rounding(plain):
        def kernel(*tensors):
            logps, grad = plain(*tensors)
            return logps + 2.0**-19 + error, grad  # the last bit of 30

        return kernel

    monkeypatch.setattr(torch, "compile", rounding)
    loss_kernel._compiled_kernel.cache_clear()
    loss_kernel.weighted_logps(logits, targets, torch.ones(4, 1), 1.0, None)
    assert bool(loss_kernel._refused) == bool(error)
    loss_kernel._compiled_kernel.cache_clear()


def test_a_plan_knows_what_the_kernel_allocates():
    from torch._subclasses.fake_tensor import FakeTensorMode

    logits, targets = chunk(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        loss, grad = loss_kernel.cross_entropy(mode.from_tensor(logits), targets, 1.0, None, 0.0)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    assert (grad.shape, grad.dtype) == (logits.shape, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernel_gives_what_plain_operations_give(dtype, capsys):
    """By torch's compiler for this device; once for any number of rows."""
    logits, targets = chunk(dtype)
    loss_kernel._compiled_kernel.cache_clear()
    for rows_ in (33, 7, 20):
        given = logits[:rows_].clone(), targets[:rows_]
        rule = head_loss._cross_entropy(given[0].clone(), given[1], LogitMap(), 0.0, True, None)
        found = loss_kernel.cross_entropy(*given, 1.0, None, 0.0)
        assert float(found[0]) == pytest.approx(float(rule[0]), rel=1e-6)
        assert torch.allclose(found[1].float(), rule[1].float(), rtol=2e-2, atol=1e-7)
    assert capsys.readouterr().out == ""
    assert not loss_kernel._refused


@pytest.mark.parametrize("kind", [*MAPS, "from logits"])
def test_it_counts_what_the_model_ranks_first(kind, small_chunks, monkeypatch):
    changes, _ = MAPS.get(kind, ({}, None))
    model, batch = tiny_model(kind if kind in MAPS else "llama", **changes).train(), rows(3)
    if kind not in MAPS:
        _logit_maps[model] = None
    best = model(input_ids=batch["input_ids"]).logits[:, :-1].argmax(-1)
    batch["labels"][:, 1::2] = best[:, ::2]
    batch["labels"][:, 3] = -100
    right = int((best == batch["labels"][:, 1:]).sum())
    assert 0.3 < right / int(supervised_tokens(batch["labels"])) < 0.7
    for counted in (("cpu",), ()):  # with the rows that have labels alone, and with all
        monkeypatch.setattr(head_loss, "_DEVICES_WITH_HOST_COUNTS", counted)
        for wanted in (True, False):
            with torch.set_grad_enabled(wanted):
                found = causal_lm_loss(model, as_batch(batch), accuracy=True)
            assert int(found.parts["accuracy"]) == right
            assert int(found.count) == supervised_tokens(batch["labels"])
            assert found.total.item() == pytest.approx(loss_sum(model, batch).item())


@pytest.mark.parametrize("kind", [*MAPS, "qwen3_5_text"])
def test_in_fp64_it_is_the_models_own_gradient(kind, small_chunks, capsys):
    """What is left between the two in fp32 is rounding, which Qwen3.5's layers multiply."""
    changes, logit_map = MAPS.get(kind, ({}, LogitMap()))
    model, batch = tiny_model(kind, **changes).train(), rows(3)
    fp32 = gradients(model, from_logits(model, batch))
    model.double()
    _logit_maps[model] = (160, logit_map)  # a map is found in fp32 only
    with float64_throughout():
        expected = gradients(model, from_logits(model, batch))
        assert off(gradients(model, loss_sum(model, batch)), expected) < 1e-13
    assert capsys.readouterr().out == ""
    assert off(fp32, expected) > 1e-9


@pytest.mark.parametrize("setting", ["target_modules", "modules_to_save"])
def test_a_head_with_an_adapter(setting, small_chunks):
    import peft

    targets = {"target_modules": ["q_proj"], setting: ["lm_head"]}
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=4, **targets)).train()
    perturb(model)
    batch = rows(3)
    expected = gradients(model, from_logits(model, batch))
    assert any("lm_head" in name for name in expected)
    assert off(gradients(model, loss_sum(model, batch)), expected) < CLOSE
    assert _logit_maps[model] is not None


def test_labels_that_only_the_device_knows(monkeypatch, small_chunks):
    """Elsewhere than on a CPU no row is left out, since the host would have to wait."""
    model, batch = tiny_model("gemma2", final_logit_softcapping=0.5).train(), rows(3)
    expected = gradients(model, from_logits(model, batch))
    monkeypatch.setattr(head_loss, "_DEVICES_WITH_HOST_COUNTS", ())
    assert off(gradients(model, loss_sum(model, batch)), expected) < CLOSE


def test_a_number_of_labels_that_the_host_brings(monkeypatch):
    """Then tokens without one are left out there too: 11 rows of 45."""
    model, batch = tiny_model("gemma2", final_logit_softcapping=0.5).train(), rows(3)
    batch["labels"][:, 6:] = -100
    expected = gradients(model, from_logits(model, batch))
    monkeypatch.setattr(head_loss, "_DEVICES_WITH_HOST_COUNTS", ())
    made, count = [], int(supervised_tokens(batch["labels"]))
    rule = head_loss._cross_entropy
    monkeypatch.setattr(
        head_loss, "_cross_entropy", lambda z, *a: made.append(len(z)) or rule(z, *a)
    )
    loss_sum(model, batch)
    for said in (count, count + 5, 48):
        made.clear()
        found = gradients(model, loss_sum(model, batch | {COUNT: said}))
        assert off(found, expected) < CLOSE
        assert made == [said]
    assert loss_sum(model, batch | {COUNT: count - 1}).isnan()  # not a loss of fewer tokens
    nothing = batch | {"labels": torch.full_like(batch["labels"], -100), COUNT: 0}
    assert loss_sum(model, nothing).item() == 0.0


def test_no_supervised_token_is_an_exact_zero():
    model, batch = tiny_model("gemma2").train(), rows(2)
    batch["labels"].fill_(-100)
    loss = loss_sum(model, batch)
    assert loss.item() == 0.0
    found = gradients(model, loss)
    assert len(found) == len(list(model.parameters()))
    assert all(not g.any() for g in found.values())


def test_several_losses_and_several_backwards(small_chunks):
    model, batch = tiny_model("llama").train(), rows(2)
    once = gradients(model, from_logits(model, batch))
    first, second = loss_sum(model, batch), loss_sum(model, rows(2, seed=5))
    assert off(gradients(model, first), once) < CLOSE
    model.zero_grad()
    second.backward()
    again = loss_sum(model, batch) * 0.5
    model.zero_grad()
    again.backward(retain_graph=True)
    again.backward()
    twice = {n: p.grad for n, p in model.named_parameters()}
    assert off(twice, once) < CLOSE


def test_a_head_alone_and_a_body_alone():
    model, batch = tiny_model("llama").train(), rows(2)
    expected = gradients(model, from_logits(model, batch))
    for head_only in (True, False):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("lm_head") == head_only)
        found = gradients(model, loss_sum(model, batch))
        assert off(found, {n: expected[n] for n in found}) < CLOSE
        assert len(found) == (1 if head_only else len(expected) - 1)
    model.requires_grad_(False)
    assert not loss_sum(model, batch).requires_grad


# --------------------------------------------------------------------------------------------------
# What it costs
# --------------------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """The products that ran, by their shapes (`wide` ones from bf16 to fp32), and the elements of
    the largest result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[int, ...]] = []
        self.largest = 0
        self.wide: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            self.products.append(tuple(out.shape))
        if func in (torch.ops.aten.mm.dtype, torch.ops.aten.addmm.dtype_out):
            assert out.dtype == torch.float32
            self.wide.append(tuple(out.shape))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.untyped_storage().nbytes() // out.itemsize)
        return out


def head_alone(vocabulary: int = 640, tokens: int = 96) -> tuple[Any, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(16, vocabulary, bias=False)
    hidden = torch.randn(1, tokens, 16, requires_grad=True)
    labels = torch.randint(0, vocabulary, (1, tokens))
    labels[:, : tokens // 2] = -100
    return head, hidden, labels


@pytest.mark.parametrize(("case", "products"), [("all", 3), ("frozen", 2), ("evaluation", 1)])
def test_products_and_memory_of_a_chunk(case, products, monkeypatch):
    head, hidden, labels = head_alone()
    monkeypatch.setitem(head_loss._CHUNK_ELEMENTS, "cpu", 640 * 24)
    head.requires_grad_(case != "frozen")
    with torch.set_grad_enabled(case != "evaluation"), Seen() as forward:
        loss, _ = HeadLoss(head, head.forward, 640)(hidden, Batch.of(labels).targets)
    # Half of the tokens have a label: two chunks of 24.
    assert len(forward.products) == 2 * products, forward.products
    assert forward.largest == 640 * 24
    if case != "evaluation":
        with Seen() as backward:
            loss.backward()
        assert not backward.products
        assert backward.largest <= head.weight.numel()
    with Seen() as control:
        F.cross_entropy(head(hidden[0]), labels[0], reduction="sum").backward()
    assert control.largest == 640 * 96


def test_a_bf16_head_gradient_is_as_exact_as_one_product(monkeypatch):
    head, hidden, labels = head_alone(vocabulary=2000, tokens=1025)
    labels[:, :512] = torch.randint(0, 2000, (1, 512))
    head, hidden = head.bfloat16(), hidden.detach().bfloat16()
    monkeypatch.setitem(head_loss._CHUNK_ELEMENTS, "cpu", 2000 * 64)  # 16 chunks

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        weight = head.weight.detach().to(dtype).requires_grad_()
        logits = hidden[0, :-1].to(dtype) @ weight.t()
        logits = logits if dtype == torch.float64 else logits.float()
        F.cross_entropy(logits, labels[0, 1:], reduction="sum").backward()
        assert weight.grad is not None
        return weight.grad.double()

    exact, one = gradient(torch.float64), gradient(torch.bfloat16)
    HeadLoss(head, head.forward, 2000)(hidden, Batch.of(labels).targets)[0].backward()
    assert head.weight.grad.dtype == torch.bfloat16
    error = (head.weight.grad.double() - exact).norm() / (one - exact).norm()
    assert error < 1.2
    # The control: chunks whose gradients are added in bf16, as recomputation does.
    head.zero_grad()
    for part, wanted in zip(hidden[0, :-1].split(64), labels[0, 1:].split(64), strict=True):
        F.cross_entropy(head(part).float(), wanted, reduction="sum").backward()
    assert (head.weight.grad.double() - exact).norm() / (one - exact).norm() > 1.5


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.13",
    reason="before torch 2.13 tensors without values have no such product",
)
def test_products_in_fp32_where_the_device_has_them(monkeypatch):
    """On tensors without values, which take the same calls as a GPU's."""
    head, hidden, labels = (x.to("meta") for x in head_alone())
    head, hidden = head.bfloat16(), hidden.detach().bfloat16().requires_grad_()
    monkeypatch.setattr(head_loss, "_DEVICES_WITH_FP32_PRODUCTS", ("meta",))
    with Seen() as seen:
        HeadLoss(head, head.forward, 640)(hidden, Batch.of(labels).targets)[0].backward()
    assert seen.wide == [(96, 16), (640, 16)]
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.bfloat16
    assert hidden.grad.shape == hidden.shape


# --------------------------------------------------------------------------------------------------
# Which models it holds for
# --------------------------------------------------------------------------------------------------


def test_only_numbers_of_tokens_are_cut_for_the_trial():
    model, batch, given = tiny_model("llama").train(), rows(2), []
    forward = model.forward

    def recorded(cu_seq_lens_q=None, max_length_q=None, **inputs):
        given.append((cu_seq_lens_q, max_length_q, inputs["input_ids"].shape))
        return forward(**inputs)

    model.forward = recorded
    ends = torch.tensor([0, 16, 32], dtype=torch.int32)
    loss_sum(model, batch | {"cu_seq_lens_q": ends, "max_length_q": 16})
    assert given == [(None, None, (1, 8))] * 2 + [(ends, 16, (2, 16))]


def shifted(logits: torch.Tensor) -> torch.Tensor:
    return logits + 0.5


def masked(logits: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(torch.arange(logits.shape[-1]) == 7, -1e4)


def cut(logits: torch.Tensor) -> torch.Tensor:
    return logits[..., :150]


def squared(logits: torch.Tensor) -> torch.Tensor:
    return logits * logits.abs() / 50


def vanishing(logits: torch.Tensor) -> torch.Tensor:
    return logits * (-logits.abs()).exp()


def refused(logits: torch.Tensor) -> torch.Tensor:
    if logits.shape[-1] == 0:
        raise ValueError("no logits")
    return logits


class Trained(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * self.scale


@pytest.mark.parametrize("change", [shifted, masked, cut, squared, vanishing, refused, Trained()])
def test_what_no_map_fits_is_said_and_computed_from_logits(change, capsys):
    model, batch = tiny_model("llama").train(), rows(2)
    batch["input_ids"], batch["labels"] = batch["input_ids"] % 100, batch["labels"].clamp(max=99)
    if isinstance(change, torch.nn.Module):
        model.add_module("logit_scale", change)
    forward = model.forward

    def changed(**inputs):
        out = forward(**inputs)
        out.logits = change(out.logits)
        return out

    model.forward = changed
    expected = gradients(model, from_logits(model, batch))
    assert off(gradients(model, loss_sum(model, batch)), expected) < CLOSE
    assert _logit_maps[model] is None
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert "from all logits of a micro-batch at once" in said[0]
    assert "LlamaForCausalLM" in said[0]
    loss_sum(model, batch)  # once a model
    assert capsys.readouterr().out == ""


def test_a_device_that_failed_is_no_reason_to_go_on():
    model, batch = tiny_model("llama").train(), rows(2)

    def failed(**_):
        raise torch.OutOfMemoryError("full")

    model.forward = failed
    with pytest.raises(torch.OutOfMemoryError):
        loss_sum(model, batch)
    assert model not in _logit_maps


# --------------------------------------------------------------------------------------------------
# Sharded
# --------------------------------------------------------------------------------------------------


class Keep(torch.optim.SGD):
    """Keeps the gradients of its step."""

    def step(self, closure=None):
        self.given = [p.grad.full_tensor() for p in self.param_groups[0]["params"]]


SHARDED = [(kind, "float32") for kind in ("gemma2", "granite", "cohere")] + [("gemma2", "bfloat16")]


def sharded(rank: int, world: int) -> dict[str, Any]:
    head_loss._CHUNK_ELEMENTS["cpu"] = 160 * 7
    found = {}
    for kind, dtype in SHARDED:
        cfg = ShardingConfig(param_dtype=dtype)
        model = tiny_model(kind, **MAPS[kind][0]).train()
        apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
        optimizer = Keep(model.parameters(), lr=0.1)
        micro = [{k: v[rank::world] for k, v in rows(4, seed=s).items()} for s in (1, 2)]
        if rank == 1:
            micro[0]["labels"].fill_(-100)  # nothing to learn from
        before = float(evaluate(model, {"": micro})[0].loss)
        stats = train_step(model, optimizer, micro, max_grad_norm=0.0)
        inside = _logit_maps[model] is not None
        found[kind, dtype] = (float(stats.loss), before, optimizer.given, inside)
    return found


@pytest.mark.slow
def test_sharded_models_learn_as_one_process_does():
    ranks = run_ranks(sharded, 2)
    for kind, dtype in SHARDED:
        model = tiny_model(kind, **MAPS[kind][0]).train()
        batch = [rows(4, seed=s) for s in (1, 2)]
        batch[0]["labels"][1::2] = -100
        whole = {k: torch.cat([b[k] for b in batch]) for k in batch[0]}
        loss = from_logits(model, whole) / supervised_tokens(whole["labels"])
        expected = gradients(model, loss)
        close = CLOSE if dtype == "float32" else 5e-2
        for rank in ranks:
            mean, before, given, inside = rank[kind, dtype]
            assert inside
            assert mean == pytest.approx(loss.item(), rel=close)
            assert before == pytest.approx(loss.item(), rel=close)
            assert off(dict(zip(expected, given, strict=True)), expected) < close, (kind, dtype)
