"""The takeover of scaled_dot_product_attention: what is taken is right, what is not is PyTorch's own, and off is off."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", minversion="2.9")
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

from resolvent.torch import accelerate  # noqa: E402

KEEP = torch.ones(2, 1, 1, 24, dtype=torch.bool)
KEEP[0, ..., 17:] = False
LOWEST = torch.finfo(torch.float32).min
EARLIER = torch.ones(24, 24, dtype=torch.bool).tril()
#: Queries that come before all kept keys see nothing.
LEFT = EARLIER & KEEP.flip(-1)


def numbers(keep, hidden=-torch.inf):
    return torch.zeros(keep.shape).masked_fill(~keep, hidden)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch._dynamo.reset()


def dense():
    return [torch.randn(2, 3, 24, 8) for _ in range(3)]


def within_tokens():
    return [torch.randn(2, 24, 3, 8).transpose(1, 2) for _ in range(3)]


def run(tensors, **call):
    torch.manual_seed(7)
    tensors = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in tensors]
    out = sdpa(*tensors, **call)
    return [out.detach(), *torch.autograd.grad((out * out.detach().cos()).sum(), tensors)]


TAKEN = {
    "plain": (dense, {}),
    "heads within tokens": (within_tokens, {}),
    "one projection": (lambda: [x.transpose(1, 2) for x in torch.randn(2, 24, 3, 3, 8).unbind(2)], {}),
    "causal": (dense, {"is_causal": True}),
    "scale": (dense, {"scale": 0.3}),
    "other keys": (lambda: [x[:, :, : 24 - 8 * n] for x, n in zip(dense(), (0, 1, 1))], {}),
    "three axes": (lambda: [x[0] for x in dense()], {}),
    "padding": (dense, {"attn_mask": KEEP}),
    "padding, the same for all": (dense, {"attn_mask": KEEP[:1]}),
    "padding, in two axes": (dense, {"attn_mask": KEEP[0, 0]}),
    "padding, in two axes, in numbers": (dense, {"attn_mask": numbers(KEEP[0, 0].expand(24, 24), LOWEST)}),
    "padding, a row per query": (dense, {"attn_mask": KEEP.expand(2, 1, 24, 24)}),
    "padding, in numbers": (dense, {"attn_mask": numbers(KEEP, LOWEST)}),
    "a causal mask": (dense, {"attn_mask": EARLIER}),
    "a causal mask, in numbers": (dense, {"attn_mask": numbers(EARLIER)}),
    "a causal mask, for every head": (dense, {"attn_mask": numbers(EARLIER, LOWEST).expand(2, 3, 24, 24).contiguous()}),
    "causal and padded": (dense, {"attn_mask": EARLIER & KEEP}),
    "causal and padded, in numbers": (dense, {"attn_mask": numbers(EARLIER & KEEP, LOWEST)}),
    "queries that see nothing": (dense, {"attn_mask": LEFT}),
    "queries that see nothing, in numbers": (dense, {"attn_mask": numbers(LEFT)}),
}
HANDED_ON = {
    "dtype bfloat16": (lambda: [x.bfloat16() for x in dense()], {}),
    "dtype float64": (lambda: [x.double() for x in dense()], {}),
    "causal with queries that are not as many as the keys": (
        lambda: [x[:, :, : 24 - 8 * n] for x, n in zip(dense(), (0, 1, 1))],
        {"is_causal": True},
    ),
    "attn_mask that differs between queries": (dense, {"attn_mask": torch.linspace(-1, 1, 576).view(24, 24)}),
    # PyTorch weighs all keys of a query alike where they are hidden by one finite number.
    "attn_mask that differs between queries ": (dense, {"attn_mask": numbers(LEFT, LOWEST)}),
    "attn_mask that differs between queries  ": (dense, {"attn_mask": EARLIER ^ (torch.arange(576) == 50).view(24, 24)}),
    "attn_mask that differs between heads": (dense, {"attn_mask": torch.linspace(-1, 1, 72).view(1, 3, 1, 24)}),
    "attn_mask that weighs keys": (dense, {"attn_mask": torch.linspace(-1, 1, 24).view(1, 1, 1, 24)}),
    "attn_mask that hides all keys": (dense, {"attn_mask": KEEP & (torch.arange(2) > 0)[:, None, None, None]}),
    "range of q": (lambda: [1e8 * x for x in dense()], {}),
    "scale out of range": (dense, {"scale": 1e-30}),
}


@pytest.mark.parametrize("case", TAKEN)
def test_taken_calls_are_right_forward_and_backward(case):
    tensors, call = TAKEN[case][0](), TAKEN[case][1]
    expected = run(tensors, **call)
    with accelerate() as takeover:
        got = run(tensors, **call)
    assert takeover.report.taken == 2 and not takeover.report.handed_on
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert one.stride() == other.stride()
    assert any(not torch.equal(one, other) for one, other in zip(got, expected)), "the kernels differ in rounding"


@pytest.mark.parametrize("reason", HANDED_ON)
def test_other_calls_are_those_of_torch_to_the_bit(reason):
    make, call = HANDED_ON[reason]
    tensors = make()
    expected = run(tensors, **call)
    with accelerate() as takeover:
        got = run(tensors, **call)
    assert takeover.report.taken == 0
    assert takeover.report.handed_on[reason.strip()] >= 1, takeover.report
    assert sum(takeover.report.handed_on.values()) == 2
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_calls_that_never_reach_the_operator_are_left_alone():
    tensors = dense()
    expected = run(tensors, dropout_p=0.5)
    with accelerate() as takeover:
        got = run(tensors, dropout_p=0.5)
    assert takeover.report.taken == 0
    assert all(torch.equal(one, other) for one, other in zip(got, expected))


def test_off_is_off():
    tensors = dense()
    expected = run(tensors)
    outer = accelerate()
    with accelerate() as inner:
        run(tensors)
    assert (inner.report.taken, outer.report.taken) == (2, 2)
    run(tensors)
    assert (inner.report.taken, outer.report.taken) == (2, 4), "one that has ended counts no more"
    outer.off()
    outer.off()
    assert all(torch.equal(one, other) for one, other in zip(run(tensors), expected))
    assert outer.report.taken == 4
    with accelerate() as again:
        run(tensors)
    assert again.report.taken == 2


def test_masks_are_read_again_when_they_have_changed():
    tensors, mask = dense(), numbers(EARLIER)
    with accelerate() as takeover:
        first = run(tensors, attn_mask=mask)
        mask[:, 20:] = 0.0
        second = run(tensors, attn_mask=mask)
    assert takeover.report.taken == 2
    assert not torch.equal(first[0], second[0])
    assert all(torch.equal(one, other) for one, other in zip(second, run(tensors, attn_mask=mask)))


def test_masks_with_gradients_never_reach_the_operator():
    mask = torch.randn(24, 24, requires_grad=True)
    with accelerate() as takeover:
        sdpa(*dense(), attn_mask=mask).sum().backward()
    assert mask.grad.any() and takeover.report.taken == 0 and not takeover.report.handed_on


def test_off_after_an_error():
    with pytest.raises(KeyError), accelerate() as takeover:
        raise KeyError
    run(dense())
    assert takeover.report.taken == 0


def test_backward_after_off():
    q, k, v = (x.requires_grad_() for x in dense())
    expected = torch.autograd.grad(sdpa(q, k, v).square().sum(), [q, k, v])
    with accelerate():
        out = sdpa(q, k, v)
    for one, other in zip(torch.autograd.grad(out.square().sum(), [q, k, v]), expected):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_report_is_printed(capsys):
    with accelerate(report=True):
        run(dense())
        run([x.double() for x in dense()])
    printed = capsys.readouterr().out
    assert "2 calls taken, 2 handed on" in printed and "2 dtype float64" in printed


def test_compiled_models_are_taken_over():
    layer = torch.nn.TransformerEncoderLayer(24, 3, 48, dropout=0.0, batch_first=True)
    x = torch.randn(2, 16, 24)

    def step(x):
        layer.zero_grad()
        out = layer(x)
        out.square().sum().backward()
        return [out.detach(), layer.self_attn.in_proj_weight.grad.clone()]

    expected = step(x)
    compiled = torch.compile(layer)
    with accelerate() as takeover:
        layer.zero_grad()
        out = compiled(x)
        out.square().sum().backward()
    assert takeover.report.taken == 2
    torch.testing.assert_close(out.detach(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.self_attn.in_proj_weight.grad, expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(
    not hasattr(torch.nn.attention, "activate_flash_attention_impl"), reason="this PyTorch has no opt-in of its own"
)
def test_the_opt_in_of_torch():
    expected = run(dense())
    torch.nn.attention.activate_flash_attention_impl("resolvent")
    try:
        assert torch.nn.attention.current_flash_attention_impl() == "resolvent"
        torch.manual_seed(0)
        got = run(dense())
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    torch.manual_seed(0)
    tensors = dense()
    with accelerate():
        again = run(tensors)
    assert all(torch.equal(one, other) for one, other in zip(got, again))
    assert len(expected) == 4


def test_a_process_may_end_with_it_on():
    code = "import torch, resolvent.torch as r; r.accelerate(report=True); x = torch.randn(1, 2, 9, 4); print(torch.nn.functional.scaled_dot_product_attention(x, x, x).shape)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "[1, 2, 9, 4]" in done.stdout


def outweighed(size):
    """Queries whose logits, all equal, are about `size`, and the gradient of the values in float64."""
    q, k, v, dout = (torch.randn(1, 2, rows, 16) for rows in (5, 3, 3, 5))
    k = k[:, :, :1].expand_as(k).contiguous()
    q *= 4 * size / (q @ k.mT).abs().max()
    exact = v.double().requires_grad_()
    (expected,) = torch.autograd.grad(sdpa(q.double(), k.double(), exact), exact, dout.double())
    return [x.requires_grad_() for x in (q, k, v)], dout, expected


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("compiled", [False, True])
def test_large_logits_keep_the_gradient_of_the_values(size, compiled):
    tensors, dout, expected = outweighed(size)
    function = torch.compile(sdpa) if compiled else sdpa
    with accelerate() as takeover:
        (dv,) = torch.autograd.grad(function(*tensors), tensors[2], dout)
    assert takeover.report.taken == 2
    # A compiled graph copies the sums, and leaves behind what f32 leaves off them.
    rounded = 1e-7 * size if compiled else 0
    assert (dv - expected).abs().max() < (1e-6 + rounded) * expected.abs().max()


def test_sums_that_were_copied_on_the_way_are_taken_as_they_are():
    tensors, dout, expected = outweighed(1e3)
    with accelerate() as takeover, torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        (dv,) = torch.autograd.grad(sdpa(*tensors), tensors[2], dout)
    assert takeover.report.taken == 2
    assert (dv - expected).abs().max() < 1e-3 * expected.abs().max()


THREADS = """
import threading
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from resolvent.torch import accelerate

torch.set_num_threads(1)
q = torch.randn(2, 4, 40, 16)
expected, wrong, done = sdpa(q, q, q), [], threading.Event()

def attend():
    while not done.is_set():
        try:
            torch.testing.assert_close(sdpa(q, q, q), expected)
        except BaseException as error:
            wrong.append(error)

threads = [threading.Thread(target=attend) for _ in range(4)]
[thread.start() for thread in threads]
for _ in range(2000):
    with accelerate():
        sdpa(q, q, q)
done.set()
[thread.join() for thread in threads]
assert not wrong, wrong[0]
print("right")
"""


def test_other_threads_attend_while_it_is_turned_on_and_off():
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=300)
    assert done.stdout == "right\n", done.stderr
