"""A model of diffusers whose attention the takeover answers."""

import pytest

torch = pytest.importorskip("torch", minversion="2.9")
diffusers = pytest.importorskip("diffusers", reason="SKIPPED: diffusers is not installed: the takeover is not tested with its models")

import resolvent.torch  # noqa: E402


def test_a_denoiser_is_taken_over():
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=16,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=8,
    )
    noise = torch.randn(2, 1, 16, 16)
    expected = model(noise, 10).sample
    with resolvent.torch.accelerate() as takeover:
        got = model(noise, 10).sample
        got.square().mean().backward()
    assert takeover.report.taken > 4 and not takeover.report.handed_on
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)
    assert all(p.grad is not None for p in model.parameters())
