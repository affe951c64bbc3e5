"""A checkpoint in the formats of other engines. Runs before anything is timed.

Each conversion reads the same safetensors file, through our loader or transformers', and uses the
engine's own tools as far as these take a checkpoint without a tokeniser.
"""

import tempfile
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptile.bench.huggingface import load_reference
from gptile.bench.peers import GGUF_FILE, ONNX_FILE, OPENVINO_FILE, has_cpu_flag
from gptile.kernels.activations import ACTIVATIONS, REFERENCES
from gptile.model.errors import UserError
from gptile.model.gpt2 import GPT2, Block
from gptile.weights import open_checkpoint

_OPSET = 23  # the first with an Attention operator


def to_ctranslate2(source: Path, target: Path) -> None:
    """CTranslate2's converter for GPT-2, in fp32; it rounds to int8 as it loads. The words of its
    vocabulary are the ids, as it takes no ids for prompts."""
    reference = load_reference(source, torch.float32)  # imports transformers as it must be
    from ctranslate2.converters.transformers import GPT2Loader

    with torch.no_grad():
        spec = GPT2Loader().get_model_spec(reference)
    spec.register_vocabulary([str(id) for id in range(reference.config.vocab_size)])
    # Words that it insists on; none of them is used.
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
    spec.validate()
    spec.optimize(quantization="float32")
    target.mkdir()
    spec.save(str(target))


class _CachedStep(nn.Module):
    """Our parameters in plain PyTorch, the cache going in and out as its engines want it."""

    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.model = model
        self.activation = REFERENCES[ACTIVATIONS[model.config.activation_function]]

    def forward(self, ids: Tensor, keep: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        """Logits ``[B, n, V]`` of the positions ``keep [n]`` of ``ids [B, T]``, and K and V of each
        layer, ``[B, H, S, D]``, with ``ids`` appended to those of ``past``."""
        model = self.model
        n_rows, n_tokens = ids.shape
        start = past[0].shape[2]
        positions = torch.arange(start, start + n_tokens)
        mask = positions.unsqueeze(1) >= torch.arange(start + n_tokens)
        x = model.wte(ids) + model.wpe(positions)
        present = []
        for layer, module in enumerate(model.h):
            block = cast(Block, module)
            qkv = F.linear(block.ln_1(x), block.attn.c_attn.weight, block.attn.c_attn.bias)
            parts = qkv.view(n_rows, n_tokens, 3, model.config.n_head, -1).permute(2, 0, 3, 1, 4)
            q, k, v = parts.unbind(0)
            k = torch.cat([past[2 * layer], k], 2)
            v = torch.cat([past[2 * layer + 1], v], 2)
            present += [k, v]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=block.attn.scale)
            x = x + block.attn.c_proj(out.transpose(1, 2).reshape(n_rows, n_tokens, -1))
            x = x + block.mlp.c_proj(self.activation(block.mlp.c_fc(block.ln_2(x))))
        return F.linear(model.ln_f(x[:, keep]), model.head_weight), *present


def to_onnx(source: Path, target: Path) -> None:
    """PyTorch's exporter on one step with a cache: K and V of each layer go in and come out, as in
    the models that Optimum exports; logits of the positions asked for only."""
    model = open_checkpoint(source).load_model()
    config = model.config
    names = [f"{kind}.{layer}" for layer in range(config.n_layer) for kind in "kv"]
    past = [torch.zeros(2, config.n_head, 3, config.head_dim) for _ in names]
    any_size = torch.export.Dim.DYNAMIC
    shapes = ({0: any_size, 1: any_size}, {0: any_size}, [{0: any_size, 2: any_size}] * len(past))
    with torch.no_grad():
        program = torch.onnx.export(
            _CachedStep(model).eval(),
            (torch.zeros(2, 5, dtype=torch.int64), torch.tensor([3, 4]), past),
            dynamo=True,
            opset_version=_OPSET,
            dynamic_shapes=shapes,
            input_names=["ids", "keep", *(f"past.{name}" for name in names)],
            output_names=["logits", *(f"new.{name}" for name in names)],
            verbose=False,
        )
    assert program is not None
    target.mkdir()
    program.save(str(target / ONNX_FILE), external_data=True)


def to_onnx_int8(source: Path, target: Path) -> None:
    """ONNX Runtime's dynamic quantisation of the matrix products: weights in int8 by channel,
    activations by tensor as they come. Without VNNI instructions its 16-bit sums saturate, and its
    documentation asks for 7-bit weights."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    target.mkdir()
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        plain = Path(work, "onnx")
        to_onnx(source, plain)
        quantize_dynamic(
            plain / ONNX_FILE,
            target / ONNX_FILE,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            reduce_range=not has_cpu_flag("vnni"),
            weight_type=QuantType.QInt8,
            use_external_data_format=True,
        )


def to_openvino(source: Path, target: Path, precision: str) -> None:
    """The ONNX model with K and V made state, empty at first, which is OpenVINO's own form for a
    cache; for int8, NNCF's compression of the weights, symmetric and by channel."""
    import openvino

    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        plain = Path(work, "onnx")
        to_onnx(source, plain)
        model = openvino.Core().read_model(plain / ONNX_FILE)
        _make_stateful(model)
        if precision == "int8":
            import nncf

            model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
        target.mkdir()
        openvino.save_model(model, target / OPENVINO_FILE, compress_to_fp16=False)


def _make_stateful(model: Any) -> None:
    """Turn the inputs ``past.*`` and outputs ``new.*`` into state of no tokens for as many rows as
    ``ids`` has."""
    import numpy as np
    from openvino import opset15 as operators
    from openvino.passes import MakeStateful, Manager

    names = [name for port in model.inputs for name in port.get_names()]
    past = [name for name in names if name.startswith("past.")]
    manager = Manager()
    manager.register_pass(MakeStateful({name: name.replace("past", "new", 1) for name in past}))
    manager.run_passes(model)
    sizes = operators.shape_of(model.input("ids"), output_type="i64")
    n_rows = operators.gather(sizes, operators.constant([0]), operators.constant(0))
    for operator in model.get_ops():
        if operator.get_type_name() == "ReadValue":
            _, *rest = (size.min_length for size in operator.get_output_partial_shape(0))
            shape = operators.concat([n_rows, operators.constant(np.array(rest))], 0)
            zero = operators.constant(0.0, dtype=np.float32)
            operator.set_arguments([operators.broadcast(zero, shape)])
    model.validate_nodes_and_infer_types()


def to_gguf(source: Path, target: Path, precision: str) -> None:
    """llama.cpp's file, by its own writer: matrices in fp32, fp16 or Q8_0 (int8 in blocks of 32
    with an fp16 scale each), the rest in fp32, as its converter does; no tokeniser.

    Raises:
        UserError: for an architecture that llama.cpp does not compute.
    """
    checkpoint = open_checkpoint(source)
    config = checkpoint.config
    plain = config.scale_attn_weights and not config.scale_attn_by_inverse_layer_idx
    if ACTIVATIONS[config.activation_function] != "tanh" or not plain:
        raise UserError("llama.cpp's GPT-2 has the tanh GELU and scores divided by sqrt(head_dim)")
    import gguf

    model = checkpoint.load_model()
    kind = {
        "float32": gguf.GGMLQuantizationType.F32,
        "float16": gguf.GGMLQuantizationType.F16,
        "int8": gguf.GGMLQuantizationType.Q8_0,
    }[precision]
    target.mkdir()
    writer = gguf.GGUFWriter(target / GGUF_FILE, "gpt2")
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(config.inner_dim)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for name, tensor in _gguf_tensors(model):
        values = tensor.detach().numpy()
        # Positions are looked up and added, not multiplied: they stay in fp32.
        exact = values.ndim == 1 or name == "position_embd.weight"
        stored = gguf.GGMLQuantizationType.F32 if exact else kind
        writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_GGUF_LAYERS = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_GGUF_OUTER = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "lm_head": "output",
}


def _gguf_tensors(model: GPT2) -> list[tuple[str, Any]]:
    """By llama.cpp's names. A matrix is ``[out, in]`` in both; a tied head is not stored."""
    found = []
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        if module.startswith("h."):
            _, layer, inner = module.split(".", 2)
            found.append((f"blk.{layer}.{_GGUF_LAYERS[inner]}.{kind}", parameter))
        else:
            found.append((f"{_GGUF_OUTER[module]}.{kind}", parameter))
    return found
