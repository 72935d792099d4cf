"""Attention on arrays: right against formulas in float64, whatever the library, layout, type and number of threads."""

import gc
import threading
import weakref

import numpy as np
import pytest

import resolvent
from resolvent import Mechanism

ml_dtypes = pytest.importorskip("ml_dtypes")


def problem(shape=(2, 3, 41, 16), seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape, dtype=np.float32) for _ in range(4))


def softmax(q, k, v, keep=None):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if keep is not None:
        scores = np.where(keep, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def close(got, expected, tolerance=2e-6):
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=0, atol=tolerance * np.abs(expected).max())


def untied(mechanism, k):
    return None if Mechanism(mechanism).tied else k


def test_softmax_is_its_formula():
    q, k, v, _ = problem()
    close(resolvent.attend(q, k, v), softmax(q, k, v))
    close(resolvent.attend(q[0], k[0], v[0]), softmax(q[0], k[0], v[0]))
    close(resolvent.attend(q[0, 0], k[0, 0], v[0, 0]), softmax(q[0, 0], k[0, 0], v[0, 0]))
    seen = np.tril(np.ones((41, 41), bool))
    close(resolvent.attend(q, k, v, causal=True), softmax(q, k, v, seen))


def test_fewer_queries_than_keys_and_values_of_another_width():
    q, k, v, _ = problem()
    q, v = q[:, :, :7], v[..., :5]
    close(resolvent.attend(q, k, v), softmax(q, k, v))


def test_strided_read_only_and_unaligned_inputs_are_taken():
    q, k, v, _ = problem()
    strided = q[:, :, ::2], k[:, :, ::-1], np.asfortranarray(v)
    close(resolvent.attend(*strided), softmax(*strided))
    q.flags.writeable = False
    close(resolvent.attend(q, k, v), softmax(q, k, v))
    bytes_off_by_one = np.frombuffer(b"\0" + k.tobytes(), np.uint8)[1:].view(np.float32).reshape(k.shape)
    close(resolvent.attend(q, bytes_off_by_one, v), softmax(q, k, v))


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2)])
def test_halves(dtype, tolerance):
    q, k, v, dout = (x.astype(dtype) for x in problem())
    out, state = resolvent.attend(q, k, v, return_state=True)
    assert out.dtype == dtype
    close(out, softmax(q, k, v), tolerance)
    halves = resolvent.attend_backward(q, k, v, dout, state=state)
    full = resolvent.attend_backward(*(x.astype(np.float32) for x in (q, k, v, dout)))
    for half, single in zip(halves[:3], full[:3]):
        assert half.dtype == dtype
        close(half, single.astype(np.float64), tolerance)


@pytest.mark.parametrize("mechanism", list(resolvent.mechanisms()))
def test_gradients_are_slopes_of_the_reference(mechanism):
    """Against finite differences of the naive float64 path, along random directions."""
    q, k, v, dout = problem((1, 2, 12, 8), seed=3)
    k = untied(mechanism, k)
    q = q * 0.5
    m = Mechanism(mechanism)
    if m.clustered:
        m = Mechanism(mechanism, estimator="centroid", clusters=2)
    plan = {"clusters": resolvent.clusters(q, k, v, m)} if m.clustered else {}
    got = resolvent.attend_backward(q, k, v, dout, m, **plan)

    def loss(q, k, v):
        out = resolvent.attend(q, k, v, m, strategy="reference", **plan)
        return float((out.astype(np.float64) * dout).sum())

    rng = np.random.default_rng(5)
    for name, x, gradient in (("q", q, got.q), ("k", k, got.k), ("v", v, got.v)):
        if x is None:
            assert gradient is None
            continue
        step = 1e-2 * np.sign(rng.standard_normal(x.shape)).astype(np.float32)
        up, down = ({"q": q, "k": k, "v": v, name: x + sign * step} for sign in (1, -1))
        slope = (loss(**up) - loss(**down)) / 2
        expected = float((gradient.astype(np.float64) * step).sum())
        size = float(np.abs(gradient * step).sum())
        assert abs(slope - expected) <= 2e-2 * max(size, 1e-3), (name, slope, expected)


@pytest.mark.parametrize("mechanism", list(resolvent.mechanisms()))
def test_masked_tokens_change_no_bit(mechanism):
    q, k, v, dout = problem((2, 2, 24, 8))
    k = untied(mechanism, k)
    keep = np.ones((2, 24), bool)
    keep[0, 17:] = keep[1, [0, 5, 23]] = False
    results = []
    for junk in (0.0, np.nan):
        at = ~keep[:, None, :, None]
        inputs = [None if x is None else np.where(at, np.float32(junk), x) for x in (q, k, v)]
        masks = {"key_mask": keep, "query_mask": keep}
        out, state = resolvent.attend(*inputs, mechanism, **masks, return_state=True)
        gradients = resolvent.attend_backward(*inputs, dout, mechanism, **masks, state=state)
        results.append([out, *(g for g in gradients[:3] if g is not None)])
    for clean, dirty in zip(*results):
        np.testing.assert_array_equal(clean, dirty)
        assert not clean[0, :, 17:].any(), "masked rows and their gradients are zero"
    assert results[0][0][0, :, :17].any() and results[0][-1][0, :, :17].any()


def test_masks_may_be_bytes_and_without_a_batch():
    q, k, v, _ = problem()
    keep = np.arange(41) < 30
    expected = softmax(q[0], k[0], v[0], keep)
    close(resolvent.attend(q[0], k[0], v[0], key_mask=keep), expected)
    close(resolvent.attend(q[0], k[0], v[0], key_mask=keep.astype(np.uint8)), expected)


def test_threads_change_no_bit():
    q, k, v, dout = problem((2, 4, 130, 32))
    for mechanism in ("softmax", "infsa", "nystromformer"):
        one, two = (resolvent.attend(q, k, v, mechanism, threads=n) for n in (1, 2))
        np.testing.assert_array_equal(one, two)
        one, two = (resolvent.attend_backward(q, k, v, dout, mechanism, threads=n) for n in (1, 2))
        np.testing.assert_array_equal(one.q, two.q)


def test_calls_from_many_python_threads():
    q, k, v, _ = problem((1, 2, 200, 32))
    expected = resolvent.attend(q, k, v)
    results = [None] * 8

    def call(n):
        for _ in range(5):
            results[n] = resolvent.attend(q, k, v)

    workers = [threading.Thread(target=call, args=(n,)) for n in range(8)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    assert all(np.array_equal(result, expected) for result in results)


def test_parameters_and_their_gradients():
    q, k, v, dout = problem()
    gamma = np.array([0.3, 0.6, 0.9], np.float32)
    out = resolvent.attend(q, k, v, "infsa", parameters={"gamma": gamma})
    plain = resolvent.attend(q, k, v, "infsa")
    close(out, plain.astype(np.float64) / 0.7 * gamma[:, None, None], 1e-5)
    gradients = resolvent.attend_backward(q, k, v, dout, "infsa", parameters={"gamma": gamma})
    expected = (plain.astype(np.float64) / 0.7 * dout).sum((0, 2, 3))
    close(gradients.parameters["gamma"], expected, 1e-4)
    asked = resolvent.attend_backward(q, k, v, dout, "fna", wrt=["kappa"])
    assert list(asked.parameters) == ["kappa"] and asked.parameters["kappa"].any()


def test_dropout_is_drawn_from_the_seed():
    q, k, v, dout = problem()
    first, again, other = (resolvent.attend(q, k, v, dropout=0.3, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    with pytest.raises(resolvent.UnsupportedError):
        resolvent.attend(q, k, v, "infsa", dropout=0.3)


def test_out_is_written_in_place():
    q, k, v, _ = problem()
    out = np.full_like(v, np.nan)
    assert resolvent.attend(q, k, v, out=out) is out
    close(out, softmax(q, k, v))


@pytest.mark.parametrize("share", ["q", "k", "v"])
def test_out_in_the_memory_of_an_input_is_refused(share):
    tensors = dict(zip("qkv", problem()[:3]))
    before = tensors[share].copy()
    with pytest.raises(resolvent.TensorError, match="shares memory") as caught:
        resolvent.attend(**tensors, out=tensors[share])
    assert (caught.value.code, caught.value.tensor) == ("overlap", "out")
    np.testing.assert_array_equal(tensors[share], before)


def test_out_that_cannot_be_written_is_refused():
    q, k, v, _ = problem()
    read_only = np.empty_like(v)
    read_only.flags.writeable = False
    for out, code in [(read_only, "read-only"), (np.empty((*v.shape, 2), np.float32)[..., 0], "strides"), (v[:1].copy(), "shape")]:
        with pytest.raises(resolvent.TensorError) as caught:
            resolvent.attend(q, k, v, out=out)
        assert caught.value.code == code
    with pytest.raises(resolvent.DTypeError):
        resolvent.attend(q, k, v, out=np.empty_like(v, dtype=np.float16))


def test_rows_are_read_and_written_where_they_lie():
    packed = np.random.default_rng(3).standard_normal((2, 41, 4, 3, 16), dtype=np.float32)  # tokens, (q, k, v, dout), heads
    q, k, v, dout = (packed[:, :, n].swapaxes(1, 2) for n in range(4))
    dense = [np.ascontiguousarray(x) for x in (q, k, v, dout)]
    for mechanism in ("softmax", "infsa", "fna", "ssa", "linear", "sigmoid"):
        out = np.full((2, 3, 50, 20), 7.0, np.float32)[:, :, :41, :16]
        whole = out.base
        _, state = resolvent.attend(q, k, v, mechanism, out=out, return_state=True)
        expected, saved = resolvent.attend(*dense[:3], mechanism, return_state=True)
        np.testing.assert_array_equal(out, expected)
        assert (whole[:, :, 41:] == 7).all() and (whole[..., 16:] == 7).all(), "nothing between the rows is written"
        got = resolvent.attend_backward(q, k, v, dout, mechanism, state=state)
        for one, other in zip(got[:3], resolvent.attend_backward(*dense, mechanism, state=saved)[:3]):
            np.testing.assert_array_equal(one, other)
    # Backwards, or with channels apart: copied once.
    np.testing.assert_array_equal(resolvent.attend(q[:, :, ::-1], k, v), resolvent.attend(q, k, v)[:, :, ::-1])
    apart = np.repeat(dense[0], 2, -1)[..., ::2]
    np.testing.assert_array_equal(resolvent.attend(apart, k, v), resolvent.attend(q, k, v))


def test_heads_of_keys_that_serve_several():
    q, k, v, dout = problem((2, 6, 41, 16))
    k, v = k[:, ::3], v[:, ::3]
    for mechanism in ("softmax", "fna", "linear"):
        each = [np.repeat(x, 3, 1) for x in (k, v)]
        np.testing.assert_array_equal(resolvent.attend(q, k, v, mechanism), resolvent.attend(q, *each, mechanism))
        got = resolvent.attend_backward(q, k, v, dout, mechanism)
        expected = resolvent.attend_backward(q, *each, dout, mechanism)
        for one, other in ((got.k, expected.k), (got.v, expected.v)):
            close(one, other.reshape(2, 2, 3, 41, 16).sum(2, dtype=np.float64), 1e-6)
    with pytest.raises(resolvent.TensorError, match="divide"):
        resolvent.attend(q[:, :5], k, v)


def test_biases_and_windows():
    q, k, v, dout = problem()
    bias = np.random.default_rng(4).standard_normal((3, 41, 41), dtype=np.float32)
    seen = bias > -1
    seen[:, :, 0] = True
    hidden = np.where(seen, bias, -np.inf)
    scores = q.astype(np.float64) @ k.swapaxes(-1, -2).astype(np.float64) / 4 + hidden
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out, state = resolvent.attend(q, k, v, bias=hidden, return_state=True)
    close(out, weights @ v)
    gradients = resolvent.attend_backward(q, k, v, dout, bias=hidden, state=state)
    pulled = weights * (dout.astype(np.float64) @ v.swapaxes(-1, -2) - (dout * out).sum(-1, keepdims=True, dtype=np.float64))
    close(gradients.parameters["bias"], pulled.sum(0, keepdims=True), 1e-5)
    close(resolvent.attend(q, k, v, bias=seen), softmax(q, k, v, seen))
    near = np.abs(np.arange(41)[:, None] - np.arange(41)) < 5
    close(resolvent.attend(q, k, v, window=5), softmax(q, k, v, near))
    slopes = resolvent.attend_backward(q, k, v, dout, window=5, causal=True)
    np.testing.assert_allclose(slopes.v, resolvent.attend_backward(q, k, v, dout, bias=near & np.tri(41, dtype=bool)).v, atol=1e-5)
    for change, named in [
        ({"bias": np.zeros((41, 40))}, "bias"),
        ({"bias": np.zeros((41, 41), np.complex64)}, "bias"),
        ({"bias": bias, "parameters": {"bias": bias[None]}}, "bias"),
        *(({"mechanism": name, "window": 5}, "window") for name in ("linear", "ssa", "soft", "laplacian", "linear-infsa", "nystromformer")),
        ({"mechanism": Mechanism.local(window=4), "window": 5}, "window"),
    ]:
        with pytest.raises(resolvent.Error) as caught:
            resolvent.attend(q, k, v, **change)
        assert named in (caught.value.tensor, caught.value.field) and caught.value.remedy


class Exporter:
    """A tensor of a library of which only DLPack is known."""

    def __init__(self, array, versioned=True):
        self.array, self.versioned = array, versioned

    @property
    def shape(self):
        return self.array.shape

    def __dlpack__(self, *, stream=None, **versioned):
        if versioned and not self.versioned:
            raise TypeError("unexpected keyword argument")
        return self.array.__dlpack__(**versioned)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OnAnotherDevice(Exporter):
    """One that says so in its capsule: the struct behind it is changed, as no other device may be there."""

    def __dlpack__(self, **_):
        import ctypes

        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        device_type = ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p))
        device_type.value = 2
        return capsule

    def __dlpack_device__(self):
        return (2, 0)


def test_other_devices_are_refused():
    q, k, v, _ = problem()
    with pytest.raises(resolvent.DeviceError) as caught:
        resolvent.attend(q, OnAnotherDevice(k), v)
    assert (caught.value.tensor, caught.value.remedy) == ("k", "move it there first")


@pytest.mark.parametrize("versioned", [True, False])
def test_any_library_that_speaks_dlpack(versioned):
    q, k, v, dout = problem()
    wrapped = [Exporter(x, versioned) for x in (q, k, v)]
    out, state = resolvent.attend(*wrapped, return_state=True)
    close(out, softmax(q, k, v))
    gradients = resolvent.attend_backward(*wrapped, Exporter(dout, versioned), state=state)
    np.testing.assert_array_equal(gradients.k, resolvent.attend_backward(q, k, v, dout).k)


def test_arrays_are_given_back():
    """Neither the call nor what it keeps holds an input; a result lives on without them."""
    arrays = [x.copy() for x in problem()[:3]]
    expected = softmax(*arrays)
    watched = [weakref.ref(x) for x in arrays]
    wrapped = [Exporter(x) for x in arrays]
    out = resolvent.attend(*arrays)
    resolvent.attend(*wrapped)
    del arrays, wrapped
    gc.collect()
    assert not any(reference() is not None for reference in watched)
    junk = [np.full((2, 3, 41, 16), np.nan, np.float32) for _ in range(16)]
    close(out, expected)
    assert len(junk) == 16
    close(resolvent.attend(*(x.copy() for x in problem()[:3])), expected)


def test_clusters_are_found_once_and_used_again():
    q, k, v, dout = problem((1, 2, 64, 16))
    plan = resolvent.clusters(q, k, v, "ssa")
    assert all(1 <= count <= 64 for pair in plan.counts for count in pair) and plan.edges > 0
    np.testing.assert_array_equal(resolvent.attend(q, k, v, "ssa", clusters=plan), resolvent.attend(q, k, v, "ssa"))
    moved = resolvent.attend(q + 1, k, v, "ssa", clusters=plan)
    assert moved.shape == q.shape
    with pytest.raises(resolvent.UnsupportedError):
        resolvent.clusters(q, k, v, "softmax")


def test_fork():
    """A forked process has pools of its own."""
    import multiprocessing

    q, k, v, _ = problem((1, 1, 300, 32))
    expected = resolvent.attend(q, k, v, threads=2)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        result = pool.apply_async(resolvent.attend, (q, k, v), {"threads": 2}).get(timeout=60)
    np.testing.assert_array_equal(result, expected)
