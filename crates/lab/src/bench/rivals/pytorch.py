"""PyTorch beside our own operators, and onnxruntime and OpenVINO where they are installed: `resolvent bench --peers PYTHON` starts this
and talks to it, one JSON document per line.

Each mechanism is written as a PyTorch user would write it, from the equations of its paper, and runs in up to three ways: `eager`,
`compiled` (torch.compile), and for softmax `sdpa` (scaled_dot_product_attention), which is there in bf16 too. Of softmax there also are
the ways of `inference.py`, forward alone. Requests come on standard input:

    {"op": "hello", "threads": 2}          -> {"versions": {framework: version}, "missing": {framework: why},
                                               "ways": {mechanism: [{"way", "label", "dtype", "trains"}, ...]}}
    {"op": "check", CALL, "q": ..., "k": ..., "v": ..., "dout": ...}
                                           -> {"out": ..., "dq": ..., "dk": ..., "dv": ...}, gradients where the way trains
    {"op": "open", CALL}                   -> {"id": 0, "peak_bytes": [forward, training]}, null where they are not counted
    {"op": "run", "id": 0}                 -> {"seconds": [forward, training]}, null for what does not train
    {"op": "clear"}                        -> {}

CALL is "mechanism": {...}, "way": ..., "shape": [batch, heads, tokens, channels], "kv_heads": ..., "tied": false, "layout": "heads",
"tokens" or "packed", "sequences": [tokens of each], none for a batch. Tensors are base64 of little-endian f32, heads first; `mechanism` is
the configuration with all its fields. In the layouts `tokens` and `packed` attention runs on views of tensors that lie so, and so do the
gradients of timed runs; sequences are attended to one by one. What cannot be done is answered with {"error": why}. The tensors of timed
runs are drawn here. Memory is what PyTorch's allocator counts, results and gradients included.
"""

import base64
import importlib.metadata
import json
import os
import sys
import time
import traceback

# Answers go where standard output went; whatever a library prints goes to standard error.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import inference  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
from formulas import FORMULAS, Refused, check_memory, formula  # noqa: E402


def way(name, label, dtype="float32", trains=True):
    return {"way": name, "label": label, "dtype": dtype, "trains": trains}


EVERYWHERE = [way("eager", "torch eager"), way("compiled", "torch compiled")]
SOFTMAX = [way("sdpa", "torch sdpa"), way("sdpa-bf16", "torch sdpa bf16", "bfloat16")]
# By framework.
INFERENCE = {
    "onnxruntime": [way("onnxruntime", "onnxruntime", trains=False)],
    "openvino": [
        way("openvino", "openvino", trains=False),
        way("openvino-products", "openvino bf16 products", "float32, products of bfloat16", trains=False),
        way("openvino-bf16", "openvino bf16", "bfloat16", trains=False),
    ],
}


def inferred(config, request, tensors, threads):
    """What attends without a backward pass."""
    name = request["way"]
    _, heads, _, _ = request["shape"]
    if request["kv_heads"] != heads:
        raise Refused("it is asked with as many heads of keys as of queries alone; leave --kv-heads out")
    if request["sequences"]:
        raise Refused("it is asked with sequences of one length alone; leave --sequences out")
    if request["layout"] == "packed" or (request["layout"] == "tokens" and name != "onnxruntime"):
        raise Refused(f"it does not take the layout {request['layout']}")
    if name == "onnxruntime":
        return inference.onnxruntime(*tensors, threads, config["causal"], config["scale"])
    if config["scale"] is not None:
        raise Refused("it is asked with the usual scale alone")
    return inference.openvino(*tensors, threads, config["causal"], "f32" if name == "openvino" else "bf16")


def laid_out(tensors, layout):
    """Tensors that are heads first as they lie in memory, which the call trains."""
    if layout == "heads":
        return [x.contiguous() for x in tensors]
    tensors = [x.transpose(1, 2).contiguous() for x in tensors]
    return tensors if layout == "tokens" else [torch.cat([x.flatten(2) for x in tensors], -1)]


def views_of(laid, request):
    """The tensors, heads first, without a copy."""
    _, heads, _, channels = request["shape"]
    if request["layout"] == "packed":
        of_each = [heads] + [request["kv_heads"]] * (1 if request["tied"] else 2)
        parts = laid[0].split([n * channels for n in of_each], -1)
        laid = [x.unflatten(-1, (n, channels)) for x, n in zip(parts, of_each)]
    return list(laid) if request["layout"] == "heads" else [x.transpose(1, 2) for x in laid]


class Attention:
    """A formula on tensors as a call has them."""

    def __init__(self, config, request, tensors, dout):
        self.request, self.dout = request, laid_out([dout], "heads" if request["layout"] == "heads" else "tokens")[0]
        if request["layout"] != "heads":
            self.dout = self.dout.transpose(1, 2)
        self.laid, self.function = laid_out(tensors, request["layout"]), formula(config, request["way"])

    def attend(self, laid):
        *qk, v = views_of(laid, self.request)
        q, k = qk[0], qk[-1]
        lengths = self.request["sequences"]
        if not lengths:
            return self.function(q, k, v)
        return torch.cat([self.function(*part) for part in zip(*(x.split(lengths, -2) for x in (q, k, v)))], -2)

    def forward(self):
        with torch.no_grad():
            return self.attend(self.laid)

    def training(self):
        """A forward and a backward pass: the output, and the gradients of the tensors as they lie."""
        leaves = [x.detach().requires_grad_() for x in self.laid]
        out = self.attend(leaves)
        out.backward(self.dout[..., : out.shape[-2], :])
        return out.detach(), [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


class Inferred:
    """What attends without a backward pass."""

    training = None

    def __init__(self, forward):
        self.forward = forward


def seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peak_bytes(work):
    """The most that PyTorch's allocator holds beyond what it held before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        result = work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del result
    return peak


def to_tensor(text, shape):
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32).reshape(shape)


def to_text(tensor):
    return base64.b64encode(tensor.float().contiguous().numpy().tobytes()).decode()


class Peer:
    """What is open."""

    threads = 1

    def __init__(self):
        self.cases, self.drawn = [], {}

    def hello(self, request):
        Peer.threads = request["threads"]
        torch.set_num_threads(self.threads)
        # Every formula shares its code with the others; past a limit the compiler would run them eagerly without a word.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1 << 20
        versions, missing = {"torch": torch.__version__}, {}
        ways = {name: EVERYWHERE for name in FORMULAS}
        ways["softmax"] = SOFTMAX + EVERYWHERE
        for framework, modules in (("onnxruntime", ["onnxruntime", "onnx"]), ("openvino", ["openvino"])):
            try:
                for module in modules:
                    importlib.import_module(module)
            except ImportError as error:
                missing[framework] = str(error)
            else:
                versions[framework] = importlib.metadata.version(framework)
                ways["softmax"] = ways["softmax"] + INFERENCE[framework]
        return {"versions": versions, "missing": missing, "ways": ways}

    def case(self, request, tensors, dout):
        config, name = {"scale": None, "causal": False, "kappa": None, **request["mechanism"]}, request["way"]
        dtype = torch.bfloat16 if name.endswith("-bf16") else torch.float32
        *qk, v = [x.to(dtype) for x in tensors]
        if name.startswith(("onnxruntime", "openvino")):
            return Inferred(inferred(config, request, (qk[0], qk[-1], v), self.threads))
        if not name.startswith("sdpa"):
            check_memory(config, request["shape"])
        return Attention(config, request, [*qk, v], dout.to(dtype))

    def check(self, request):
        names = ["q", "v"] if request["tied"] else ["q", "k", "v"]
        batch, heads, tokens, channels = shape = request["shape"]
        shared = (batch, request["kv_heads"], tokens, channels)
        tensors = [to_tensor(request[name], shape if name == "q" else shared) for name in names]
        case = self.case(request, tensors, to_tensor(request["dout"], shape))
        if case.training is None:
            return {"out": to_text(case.forward())}
        out, gradients = case.training()
        gradients = dict(zip(names, views_of(gradients, request)))
        return {"out": to_text(out), **{"d" + name: to_text(x) for name, x in gradients.items()}}

    def open(self, request):
        batch, heads, tokens, channels = request["shape"]
        key = json.dumps([request["shape"], request["kv_heads"]])
        if key not in self.drawn:
            torch.manual_seed(0)
            heads_of = (heads, request["kv_heads"], request["kv_heads"], heads)
            self.drawn = {key: [torch.randn(batch, n, tokens, channels) for n in heads_of]}
        q, k, v, dout = self.drawn[key]
        case = self.case(request, [q, v] if request["tied"] else [q, k, v], dout)
        # The first of each compiles and touches memory. Only PyTorch's memory is counted.
        passes = [case.forward] + ([case.training] if case.training else [])
        for work in passes:
            work()
        peaks = [peak_bytes(work) for work in passes] if case.training else [None, None]
        self.cases.append(case)
        return {"id": len(self.cases) - 1, "peak_bytes": peaks}

    def run(self, request):
        case = self.cases[request["id"]]
        return {"seconds": [seconds(case.forward), seconds(case.training) if case.training else None]}

    def clear(self, _):
        self.__init__()
        return {}


def main():
    peer = Peer()
    for line in sys.stdin:
        try:
            request = json.loads(line)
            answer = getattr(peer, request["op"])(request)
        except Refused as refused:
            answer = {"error": str(refused)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
