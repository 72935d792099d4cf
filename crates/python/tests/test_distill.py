"""Distillation: the loss falls, the teacher stays as it is bit for bit, a seed gives one result, and what cannot be compared is refused."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from torch import nn  # noqa: E402
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel  # noqa: E402

import resolvent  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "bert": lambda: BertModel(BertConfig(**SIZES, vocab_size=60, pad_token_id=0), add_pooling_layer=False),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60, n_positions=32, bos_token_id=None, eos_token_id=None)),
    "torch": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2),
}
PARTS = {"bert": ("attention", "hidden", "output"), "gpt2": ("attention", "hidden", "output"), "torch": ("attention", "output")}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def batches(name, count=4):
    found = []
    for _ in range(count):
        ids, keep = torch.randint(2, 60, (4, 12)), torch.ones(4, 12, dtype=torch.long)
        keep[0, 8:] = 0
        if name == "torch":
            found.append({"src": torch.randn(4, 12, 32), "src_key_padding_mask": keep == 0})
        else:
            found.append({"input_ids": ids, "attention_mask": keep})
    return found


def pair(name, mechanism="linear"):
    """A teacher that does not attend to all tokens alike, as small random weights do, and its converted copy."""
    teacher = MODELS[name]()
    for parameter in teacher.parameters():
        if parameter.dim() == 2 and name != "torch":
            parameter.data.mul_(8.0)
    student = copy.deepcopy(teacher).eval()
    resolvent.convert(student, mechanism, dropout=0.0)
    return student, teacher


def copied(model):
    return {key: x.clone() for key, x in model.state_dict().items()}


def same(model, state):
    return all(torch.equal(x, state[key]) for key, x in model.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_the_student_nears_its_teacher(name):
    student, teacher = pair(name)
    teacher.train()
    state, own = copied(teacher), copied(student)
    grad = next(student.parameters()).grad = torch.ones_like(next(student.parameters()))
    data = batches(name, 6)
    report = resolvent.distill(student, teacher, data, held_out=data[:2], steps=25, lr=2e-3)
    assert len(report.steps) == 25 and report.seconds > 0.0
    assert sum(one.total for one in report.steps[-5:]) < 0.85 * sum(one.total for one in report.steps[:5])
    assert report.after.total < report.before.total
    found = tuple(part for part in ("attention", "hidden", "output") if getattr(report.steps[0], part) is not None)
    assert found == PARTS[name]
    first = report.steps[0]
    assert first.total == pytest.approx(sum(getattr(first, part) for part in found), rel=1e-5)
    assert same(teacher, state) and not same(student, own)
    assert teacher.training and all(module.training for module in teacher.modules())
    hooks = [hook for model in (student, teacher) for module in model.modules() for hook in module._forward_hooks.values()]
    assert not student.training and not any(hook.__module__.startswith("resolvent") for hook in hooks)
    assert next(student.parameters()).grad is grad and all(x.grad is None for x in teacher.parameters())
    assert set(report.parameters) == {key for key, _ in student.named_parameters()}
    lines = str(report).splitlines()
    assert lines[0].split() == ["total", *found] and lines[1].startswith("step 1 ") and lines[6].startswith("step 25 ")
    assert lines[-3].startswith("held out, before") and f"{len(report.parameters)} parameters trained" in lines[-1]
    assert torch.backends.mha.get_fastpath_enabled()


def test_losses_are_what_they_say():
    student, teacher = pair("gpt2")
    batch = batches("gpt2", 1)[0]
    options = {"steps": 1, "held_out": batch, "lr": 1e-9}
    report = resolvent.distill(student, teacher, batch, temperature=2.0, attention=0.5, hidden=0.25, output=2.0, **options)
    assert len(str(report).splitlines()) == 5
    keep = batch["attention_mask"].bool()
    with torch.no_grad():
        own, other = (model.eval()(**batch, output_hidden_states=True) for model in (student, teacher))
    logs = [made.logits[keep].div(2.0).log_softmax(-1) for made in (own, other)]
    divergence = 4.0 * (logs[1].exp() * (logs[1] - logs[0])).sum(-1).mean()
    states = [[x[keep] for x in made.hidden_states[1:]] for made in (own, other)]
    hidden = torch.stack([(a - b).square().mean() / b.var(correction=0) for a, b in zip(*states)]).mean()
    before = report.before
    assert before.output == pytest.approx(divergence.item(), rel=1e-3) and before.hidden == pytest.approx(hidden.item(), rel=1e-3)
    assert before.total == pytest.approx(0.5 * before.attention + 0.25 * before.hidden + 2.0 * before.output, rel=1e-5)
    assert report.steps[0].total == pytest.approx(before.total, rel=1e-5)


def test_a_seed_gives_one_result():
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(0)
        student, teacher = pair("bert")
        data = torch.utils.data.DataLoader([batch["input_ids"][0] for batch in batches("bert", 6)], batch_size=2, shuffle=True)
        state = torch.get_rng_state()
        report = resolvent.distill(student, teacher, data, steps=5, seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        runs.append(([one.total for one in report.steps], copied(student)))
    assert runs[0][0] == runs[1][0] != runs[2][0]
    assert all(torch.equal(x, runs[1][1][key]) for key, x in runs[0][1].items())


def test_what_is_trained():
    student, teacher = pair("bert", "fna")
    state = copied(student)
    student.encoder.layer[1].attention.self.value.bias.requires_grad_(False)
    report = resolvent.distill(student, teacher, batches("bert"), steps=3, parameters="attention")
    changed = {key for key, x in student.state_dict().items() if not torch.equal(x, state[key])}
    assert changed and changed <= set(report.parameters)
    assert all(".attention.self." in key for key in report.parameters) and "encoder.layer.1.attention.self.value.bias" not in report.parameters
    assert "encoder.layer.0.attention.self.resolvent.kappa_log" in changed
    frozen = [key for key, x in student.named_parameters() if not x.requires_grad]
    assert frozen == ["encoder.layer.1.attention.self.value.bias"]
    report = resolvent.distill(student, teacher, batches("bert"), steps=2, parameters=lambda name, parameter: "kappa" in name)
    assert report.parameters == tuple(f"encoder.layer.{n}.attention.self.resolvent.kappa_log" for n in (0, 1))


def test_plain_modules_and_every_form_of_data():
    teacher, student = nn.Linear(4, 3), nn.Linear(4, 3)
    x = [torch.randn(8, 4) for _ in range(3)]
    report = resolvent.distill(student, teacher, x, steps=200, lr=0.05, warmup=0.0)
    assert report.steps[-1].total < 1e-2 * report.steps[0].total and report.steps[0].attention is None and report.before is None
    for data in (x[0], (x[0],), iter(x), [(one,) for one in x], [{"input": one} for one in x], torch.utils.data.TensorDataset(torch.cat(x))):
        assert len(resolvent.distill(student, teacher, data, steps=7, held_out=iter(x)).steps) == 7


def test_a_student_of_a_fit():
    teacher = MODELS["bert"]().eval()
    student = copy.deepcopy(teacher)
    heads = resolvent.HeadMechanisms([([0, 2], resolvent.Mechanism("local", window=2)), ([1, 3], "softmax")])
    resolvent.convert(student, heads)
    report = resolvent.distill(student, teacher, batches("bert"), steps=3, lr=1e-3, held_out=batches("bert", 1))
    assert "encoder.layer.0.attention.self.resolvent.groups.0.scale_log" in report.parameters


class Words(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.inner = nn.Linear(4, count)

    def forward(self, x):
        return {"logits": self.inner(x)}


def test_what_is_refused():
    x, linear = torch.randn(8, 4), nn.Linear(4, 3)

    def refuse(kind, field, student=linear, teacher=None, data=x, **options):
        with pytest.raises(kind) as refused:
            resolvent.distill(student, teacher or nn.Linear(4, 3), data, **{"steps": 2, **options})
        assert refused.value.remedy and field in (refused.value.field or refused.value.tensor)
        assert all(module.training for module in student.modules())

    wrong = resolvent.ConfigurationError
    refuse(wrong, "data", data=[])
    refuse(wrong, "data", data=iter([]))
    refuse(wrong, "held_out", held_out=[])
    refuse(wrong, "teacher", teacher=linear)
    refuse(wrong, "parameters", parameters="none")
    refuse(wrong, "parameters", parameters=lambda name, parameter: False)
    for name, value in (("steps", 0), ("lr", 0.0), ("lr", float("nan")), ("temperature", -1.0), ("warmup", 1.5), ("clip", 0.0), ("weight_decay", -0.1)):
        refuse(wrong, name, **{name: value})
    refuse(wrong, "hidden", hidden=-1.0)
    refuse(wrong, "hidden", hidden=1.0)
    refuse(wrong, "output", attention=0.0, hidden=0.0, output=0.0)
    refuse(resolvent.TensorError, "output", teacher=nn.Linear(4, 5))
    refuse(resolvent.TensorError, "output", student=Words(3))
    refuse(resolvent.TensorError, "output", student=Words(3), teacher=Words(4))
    refuse(resolvent.NumericalError, "lr", data=torch.full((2, 4), float("nan")))
    deep = BertModel(BertConfig(**{**SIZES, "num_hidden_layers": 3}, vocab_size=60))
    given = batches("bert")
    refuse(resolvent.TensorError, "attention", student=deep, teacher=MODELS["bert"](), data=given)
    refuse(resolvent.TensorError, "hidden", student=deep, teacher=MODELS["bert"](), data=given, attention=0.0)
    resolvent.distill(deep, MODELS["bert"](), given, attention=0.0, hidden=0.0, steps=1)
