"""Vision transformers of timm: their fused path taken over, and their attention layer replaced."""

import pytest

torch = pytest.importorskip("torch", minversion="2.9")
timm = pytest.importorskip("timm", reason="SKIPPED: timm is not installed: its layers are not tested")

import resolvent.timm  # noqa: E402
import resolvent.torch  # noqa: E402
from resolvent import HeadMechanisms  # noqa: E402

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}


def model_of(**options):
    torch.manual_seed(0)
    return timm.models.vision_transformer.VisionTransformer(**SMALL, **options)


@pytest.fixture
def pictures():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_the_fused_path_is_taken_over(pictures):
    model = model_of()
    expected = model(pictures)
    expected.square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with resolvent.torch.accelerate() as takeover:
        got = model(pictures)
        got.square().sum().backward()
    assert takeover.report.taken == 4 and not takeover.report.handed_on
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    for p, gradient in zip(model.parameters(), gradients):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-3, atol=1e-4)


def test_softmax_in_its_layer_is_its_own(pictures):
    theirs, ours = model_of(qk_norm=True), model_of(qk_norm=True, attn_layer=resolvent.timm.attention_layer("softmax"))
    assert ours.load_state_dict(theirs.state_dict(), strict=False) == ([], [])
    torch.testing.assert_close(ours(pictures), theirs(pictures), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mechanism", ["fna", "infsa", "soft", HeadMechanisms([([0], "softmax"), ([1, 2], "infsa")])], ids=str)
def test_mechanisms_learn_in_its_layer(pictures, mechanism):
    theirs, ours = model_of(), model_of(attn_layer=resolvent.timm.attention_layer(mechanism))
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert not unexpected and all(".attn.mechanism." in name for name in missing)
    ours(pictures).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for name, p in ours.named_parameters() if ".mechanism." in name or "qkv" in name)
    assert not torch.allclose(ours(pictures), theirs(pictures), atol=1e-4)
