"""Attention of libraries that only infer: onnxruntime's and OpenVINO's, on tensors of PyTorch.

Each function makes what it needs once and returns a function without arguments: it attends, and its result is a tensor
`[batch, heads, tokens, channels]`. A library that is not installed is an ImportError.
"""

import numpy as np
import torch


def onnxruntime(q, k, v, threads, causal=False, scale=None):
    """MultiHeadAttention, which takes `[batch, tokens, channels of all heads]`, in f32."""
    import onnxruntime
    from onnx import TensorProto, helper

    batch, heads, tokens, channels = q.shape
    shape = [batch, tokens, heads * channels]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("q", "k", "v", "out")]
    fields = {"num_heads": heads, "unidirectional": int(causal), **({} if scale is None else {"scale": scale})}
    node = helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["out"], domain="com.microsoft", **fields)
    graph = helper.make_graph([node], "attention", values[:3], values[3:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    inputs = {name: x.transpose(1, 2).reshape(shape).numpy() for name, x in zip("qkv", (q, k, v))}

    def run():
        return torch.from_numpy(session.run(None, inputs)[0]).view(batch, tokens, heads, channels).transpose(1, 2)

    return run


def openvino(q, k, v, threads, causal=False, products="f32"):
    """The operation of the same name as PyTorch's, on tensors of f32 or bf16; `products` is OpenVINO's hint of precision."""
    import openvino as ov
    from openvino import opset13

    rounded = q.dtype == torch.bfloat16
    dtype = ov.Type.bf16 if rounded else ov.Type.f32
    inputs = [opset13.parameter(list(x.shape), dtype) for x in (q, k, v)]
    model = ov.Model([opset13.scaled_dot_product_attention(*inputs, causal=causal)], inputs)
    options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": products}
    request = ov.compile_model(model, "CPU", options).create_infer_request()
    for at, x in enumerate((q, k, v)):
        tensor, x = ov.Tensor(dtype, ov.Shape(list(x.shape))), x.contiguous()
        # NumPy has no bf16: the bits are copied.
        bits = np.int16 if rounded else np.float32
        tensor.data.view(bits)[:] = (x.view(torch.int16) if rounded else x).numpy()
        request.set_input_tensor(at, tensor)

    def run():
        request.infer()
        data = request.get_output_tensor(0).data
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16) if rounded else torch.from_numpy(data)

    return run
