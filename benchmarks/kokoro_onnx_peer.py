"""Runs in an interpreter with onnx and onnxruntime: `python kokoro_onnx_peer.py model.onnx FOLDER < requests`.

Writes to FOLDER the weights of Kokoro's int8 export under the published names, and for each request what onnxruntime computes
with the graph as it is (0.npz, ...), and with its weights dequantised and its inputs in float32 (0_float.npz, ...).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

GATES = np.r_[0:1, 2:4, 1:2]  # input, output, forget, cell -> input, forget, cell, output
INTEGER = {"ConvInteger": "Conv", "MatMulInteger": "MatMul"}
PREDICTOR = ("F0", "N", "shared", "F0_proj", "N_proj")
Arrays = dict[str, Any]


def path(node: Any) -> str:
    """Return the published path of the module that a node was exported from."""
    parts = node.name.strip("/").split("/")[:-1]
    kept = [a for a, b in zip(parts, [*parts[1:], ""], strict=True) if not b.startswith(a + ".")]
    kept = kept[1:] if kept[:2] == ["decoder", "decoder"] or kept[0] == "encoder" else kept
    return ".".join((["predictor"] if kept[0].split(".")[0] in PREDICTOR else []) + kept)


def dequantised(initializers: Arrays, name: str, zero: str = "", scale: str = "") -> Any:
    base = name.removesuffix("_quantized")
    offset = initializers.get(zero or base + "_zero_point", 0)
    return (initializers[name].astype(np.float32) - np.float32(offset)) * initializers[scale or base + "_scale"]


def lstm(initializers: Arrays, node: Any) -> tuple[Any, Any]:
    """Return the weights of inputs and of hidden states, `[directions, 4 * hidden, inner]`, in the order of the graph."""
    pairs = []
    for at, scales in ((1, 8), (2, 10)):
        name, scale, zero = (node.input[place] for place in (at, scales, scales + 1))
        factor, offset = (initializers[key].reshape(-1, 1, 1).astype(np.float32) for key in (scale, zero))
        pairs.append(((initializers[name].astype(np.float32) - offset) * factor).transpose(0, 2, 1))
    return pairs[0], pairs[1]


def lstm_weights(initializers: Arrays, node: Any) -> Arrays:
    """Return the weights of a layer as torch has them."""
    weights, bias = {}, initializers[node.input[3]].reshape(2, 2, 4, -1)  # directions, inputs and hidden states, gates
    for number, (kind, both) in enumerate(zip(("ih", "hh"), lstm(initializers, node), strict=True)):
        for direction, end in enumerate(("", "_reverse")):
            part = both[direction]
            gates = part.reshape(4, -1, part.shape[1])[GATES]
            weights[f"{path(node)}.weight_{kind}_l0{end}"] = gates.reshape(part.shape)
            weights[f"{path(node)}.bias_{kind}_l0{end}"] = bias[direction, number][GATES].reshape(-1)
    return weights


def published(initializers: Arrays, graph: Any) -> Arrays:
    """Return the weights by their published names."""
    weights = {
        name.removeprefix("encoder.") if name.startswith("encoder.") else name.replace("decoder.decoder.", "decoder.", 1): value
        for name, value in initializers.items()
        if name.startswith(("encoder.", "decoder.")) and value.dtype == np.float32
        if not name.endswith(("_scale", "_point", "_basis", "_sum"))
    }
    for node in graph.node:
        inputs = list(node.input)
        if node.op_type == "DynamicQuantizeLSTM":
            weights |= lstm_weights(initializers, node)
        elif node.op_type == "Gather" and inputs[0].endswith("weight_quantized"):
            weights[inputs[0].removesuffix("_quantized").removeprefix("encoder.")] = dequantised(initializers, inputs[0])
        elif node.op_type in (*INTEGER, "Conv", "ConvTranspose", "MatMul", "Gemm") and inputs[1] in initializers:
            is_repeated = "albert_layers" in node.name and path(node).rpartition("_")[2].isdigit()  # a layer applied often
            if "/" in node.name and "stft" not in node.name and not is_repeated:
                value = dequantised(initializers, inputs[1], inputs[3]) if node.op_type in INTEGER else initializers[inputs[1]]
                weights[path(node) + ".weight"] = value.T if "MatMul" in node.op_type else value
    return weights


def in_float(model: Any, initializers: Arrays) -> Any:
    """Return the model with products in float32 of dequantised weights."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    sources = {name: node for node in graph.node for name in node.output}
    readers = {name: node for node in graph.node for name in node.input}
    dropped, nodes = set[str](), list[Any]()

    def stored(name: str, value: Any) -> str:
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    for node in graph.node:
        if node.op_type in INTEGER and node.input[1] in initializers:
            after = readers[node.output[0]]  # a quantised bias, or the cast of the result
            biases = [after.name.removesuffix("_quantizedbias_add")] if after.op_type == "Add" else []
            cast = readers[after.output[0]] if biases else after
            scaled = readers[cast.output[0]]
            dropped |= {after.name, cast.name, scaled.name}
            weight = stored(f"{node.name}_weight", dequantised(initializers, node.input[1], node.input[3]))
            inputs = [sources[node.input[0]].input[0], weight, *biases]
            nodes.append(helper.make_node(INTEGER[node.op_type], inputs, [scaled.output[0]], name=f"{node.name}_float"))
            nodes[-1].attribute.extend(node.attribute)
        elif node.op_type == "DynamicQuantizeLSTM":
            names = [stored(f"{node.name}_{kind}", value) for kind, value in zip("wr", lstm(initializers, node), strict=True)]
            inputs = [node.input[0], *names, *node.input[3:7]]
            nodes.append(helper.make_node("LSTM", inputs, list(node.output), name=f"{node.name}_float"))
            nodes[-1].attribute.extend(node.attribute)
        elif node.name not in dropped:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    return changed


def curves(graph: Any) -> dict[str, str]:
    """Return the names of the graph's values that are compared."""
    names = {"duration": next(node for node in graph.node if node.op_type == "Clip").output[0]}
    for key, part in {"pitch": "F0_proj", "energy": "N_proj"}.items():
        names[key] = [node for node in graph.node if f"/{part}/" in node.name][-1].output[0]
    return names


def quiet() -> Any:
    """Return options of a session that writes errors only."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return options


def main() -> None:
    model, folder, requests = onnx.load(sys.argv[1]), sys.argv[2], json.load(sys.stdin)
    initializers = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    np.savez(f"{folder}/weights.npz", **published(initializers, model.graph))
    outputs = curves(model.graph)
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs.values())
    for end, graph in (("", model), ("_float", in_float(model, initializers))):
        session = onnxruntime.InferenceSession(graph.SerializeToString(), quiet(), providers=["CPUExecutionProvider"])
        for number, request in enumerate(requests):
            feeds = {
                "tokens": np.array([request["ids"]], np.int64),
                "style": np.array([request["style"]], np.float32),
                "speed": np.ones(1, np.float32),
            }
            values = session.run(["audio", *outputs.values()], feeds)
            np.savez(f"{folder}/{number}{end}.npz", **dict(zip(["audio", *outputs], values, strict=True)))


if __name__ == "__main__":
    main()
