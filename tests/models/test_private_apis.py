"""What is private in other libraries: each name is there as we take it to be, and no other module names any."""

import abc
import ast
import inspect
from pathlib import Path

import torch
from gguf import GGUFReader
from transformer_lens.model_bridge.generalized_components.attention import AttentionBridge
from transformer_lens.model_bridge.generalized_components.position_embeddings_attention import (
    PositionEmbeddingsAttentionBridge,
)
from transformer_lens.model_bridge.supported_architectures.falcon import FalconArchitectureAdapter
from transformer_lens.model_bridge.supported_architectures.llama import LlamaArchitectureAdapter
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.utils.hub import cached_files

from sink_lens.models import private_apis
from tests.tiny_families import tiny

PACKAGE = Path(private_apis.__file__).parents[1]
OF_MODULES = {"_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"}
OF_BASES = {
    "_attend": AttentionBridge,
    "_attention_bridge_cls": LlamaArchitectureAdapter,
    "_build_attention_bridge": LlamaArchitectureAdapter,
    "_get_field_parts": GGUFReader,
    "_masked_softmax": PositionEmbeddingsAttentionBridge,
    "_pre_output_projection": PositionEmbeddingsAttentionBridge,
    "_qkvo_attention_bridge": LlamaArchitectureAdapter,
    "_reshape": BloomAttention,
    "_split_falcon_qkv": FalconArchitectureAdapter,
    "_split_heads": FalconAttention,
}
"""What a subclass of ours overrides or calls -> the class that has it; of the Trainer there is none."""
OF_TENSORS_AND_FIGURES = {"_version", "_colorbar", "_left_title", "_ncols"}


def test_a_base_has_what_is_overridden_or_called():
    assert [name for name, base in OF_BASES.items() if name != "_attend" and not hasattr(base, name)] == []


def test_a_compiled_module_and_a_compiled_function_say_so():
    module = torch.nn.Linear(2, 2)
    assert getattr(module, private_apis.COMPILED) is None
    assert dict(torch.compile(module, backend="eager").named_children()) == {private_apis.UNCOMPILED: module}
    module.compile(backend="eager")
    assert callable(vars(module)[private_apis.COMPILED])

    def double(x):
        return 2 * x

    assert private_apis.uncompiled_function(torch.compile(double, backend="eager")) is double
    assert private_apis.uncompiled_function(double) is None


def test_classes_and_functions_of_others_have_what_is_used(tmp_path):
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
    from torch.distributed.fsdp import _common_utils

    wrapped = (_common_utils.FSDP_WRAPPED_MODULE, checkpoint_wrapper._CHECKPOINT_WRAPPED_MODULE)
    assert private_apis.WRAPPED[1:] == wrapped
    assert private_apis.OF_ABSTRACT_CLASSES in vars(type("A", (abc.ABC,), {}))
    assert private_apis.LENIENT in inspect.signature(cached_files).parameters
    assert not private_apis.was_loaded(torch.nn.Linear(1, 1))
    assert '"_is_hf_initialized"' in inspect.getsource(inspect.getmodule(PreTrainedModel))
    assert list(inspect.signature(MixtralExperts._apply_gate).parameters) == ["self", "gate_up_out"]


def test_the_fused_kernels_are_there_and_that_of_the_cpu_gives_the_sums_of_rows():
    query, key, value = torch.randn(3, 1, 2, 5, 8)
    output, lse = private_apis.fused_attention_on_cpu(query, key, value, mask=None, scale=0.5)
    scores = (query @ key.mT * 0.5).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(output, scores.softmax(-1) @ value)
    names = [one.name for one in torch.ops.aten._scaled_dot_product_efficient_attention.default._schema.arguments]
    assert names == ["query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "scale"]


def test_a_model_with_an_adapter_says_so():
    model = tiny("llama")
    assert model._hf_peft_config_loaded is False
    model._hf_peft_config_loaded = True
    private_apis.forget_adapter(model)
    assert model._hf_peft_config_loaded is False


def of_others(trees):
    """Every private attribute that the package itself does not define, by file."""
    own = {"_fields", "_replace"}  # of named tuples, public
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
    for path, tree in trees.items():
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            if name.startswith("_") and not name.startswith("__") and name not in own:
                yield path, name


def test_no_other_module_names_what_is_private_elsewhere():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    found = {(path.name, name) for path, name in of_others(trees) if path.name != "private_apis.py"}
    allowed = OF_MODULES | set(OF_BASES) | OF_TENSORS_AND_FIGURES
    assert torch.ones(1).add_(1)._version == 1
    assert {one for one in found if one[1] not in allowed} == set()
    tree = ast.parse("def f(model):\n    return model.config._attn_implementation\n")
    assert list(of_others({Path("x.py"): tree})) == [(Path("x.py"), "_attn_implementation")]
