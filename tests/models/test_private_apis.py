"""What is private in other libraries: each name is there as we take it to be, and no other module names any."""

import ast
import inspect
from importlib import import_module
from pathlib import Path

import torch
from gguf import GGUFReader
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
OF_MODULES = (
    "what a module holds, its hooks included, is read and put back without a call of its own"
)
OF_CLASS = "transformers asks a model's class"
PRIVATE = {
    # torch
    "_modules": OF_MODULES,
    "_parameters": OF_MODULES,
    "_buffers": OF_MODULES,
    "_forward_hooks": OF_MODULES,
    "_forward_pre_hooks": OF_MODULES,
    "_compiled_call_impl": "only this says that a module was compiled in place",
    "_orig_mod": "the module in a compiled one",
    "_fsdp_wrapped_module": "the module in one of FSDP",
    "_checkpoint_wrapped_module": "the module in one with activation checkpoints",
    "_version": "only this says that a tensor was changed in place",
    "_scaled_dot_product_flash_attention_for_cpu": "the public call returns no log-sum-exp",
    "_scaled_dot_product_efficient_attention": "the public call returns no log-sum-exp",
    "_get_default_store": "processes meet there before a reading: a barrier that fails ends the process group",
    # transformers
    "_name_or_path": "where a configuration was read from",
    "_attn_implementation": "the only switch of the attention function",
    "_attn_implementation_internal": "what the switch sets; it is compared",
    "_experts_implementation": "the only switch of the experts' kernel",
    "_can_set_attn_implementation": "a class that refuses a function is set through its configuration",
    "_is_hf_initialized": "a loaded weight must not be initialised again",
    "_hf_peft_config_loaded": "a merged model must not be saved as one with an adapter",
    "_apply_gate": "the experts' neurons have no module of their own",
    "_raise_exceptions_for_missing_entries": "a missing file is None",
    "_can_record_outputs": OF_CLASS,
    "_init_weights": OF_CLASS,
    "_no_split_modules": OF_CLASS,
    "_supports_flash_attn": OF_CLASS,
    "_supports_flex_attn": OF_CLASS,
    "_attn": "attention of GPT-J and GPT-Neo, which takes no function by its name",
    "_reshape": "heads of Bloom",
    "_split_heads": "heads of Falcon",
    # accelerate
    "_hf_hook": "the device on which an offloaded module runs",
    "_old_forward": "the forward that an offloaded module calls",
    # TransformerLens
    "_bridge_builder": "a bridge is built around a model in memory",
    "_weights_processed": "whether weights were folded",
    "_original_component": "a weight's name in the plain model",
    "_hook_registry": "a hook point of ours is found by its name",
    "_attention_bridge_cls": "the bridge of HeadNorm's attention",
    "_build_attention_bridge": "the bridge of HeadNorm's attention",
    "_qkvo_attention_bridge": "the bridge of HeadNorm's attention",
    "_masked_softmax": "HeadNorm's attention is not a softmax alone",
    "_pre_output_projection": "HeadNorm's norm of the heads",
    "_split_falcon_qkv": "Falcon's keys and values are shared by groups",
    # gguf
    "_get_field_parts": "a header is read without the file's weights",
}
"""Private names of other libraries that the package touches -> why."""
OF_BASES = {
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
"""What a subclass of ours overrides or calls -> the class that has it."""


def test_a_base_has_what_is_overridden_or_called():
    assert [name for name, base in OF_BASES.items() if not hasattr(base, name)] == []


def test_a_compiled_module_says_so():
    module = torch.nn.Linear(2, 2)
    assert getattr(module, private_apis.COMPILED) is None
    assert dict(torch.compile(module, backend="eager").named_children()) == {
        private_apis.UNCOMPILED: module
    }
    module.compile(backend="eager")
    assert callable(vars(module)[private_apis.COMPILED])


def test_classes_and_functions_of_others_have_what_is_used(tmp_path):
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
    from torch.distributed.fsdp import _common_utils

    wrapped = (_common_utils.FSDP_WRAPPED_MODULE, checkpoint_wrapper._CHECKPOINT_WRAPPED_MODULE)
    assert private_apis.WRAPPED[1:] == wrapped
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
    names = [
        one.name
        for one in torch.ops.aten._scaled_dot_product_efficient_attention.default._schema.arguments
    ]
    assert names == [
        "query",
        "key",
        "value",
        "attn_bias",
        "compute_log_sumexp",
        "dropout_p",
        "is_causal",
        "scale",
    ]


def test_a_model_with_an_adapter_says_so():
    model = tiny("llama")
    assert model._hf_peft_config_loaded is False
    model._hf_peft_config_loaded = True
    private_apis.forget_adapter(model)
    assert model._hf_peft_config_loaded is False


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def of_others(trees):
    """Every private name that the package itself does not define, by file: an attribute, an import, or a text."""
    own = {"_fields", "_replace"}  # of named tuples, public
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own |= (
                    {node.attr}
                    if isinstance(node.value, ast.Name) and node.value.id == "self"
                    else set()
                )
    for path, tree in trees.items():
        for node in ast.walk(tree):
            names = [node.attr] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = str(node.module).split(".")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value.strip(".")
                names = (
                    [text]
                    if text in PRIVATE or (path.name == "private_apis.py" and text.isidentifier())
                    else []
                )
            yield from ((path, name) for name in names if is_private(name) and name not in own)


def overridden(trees):
    """Every private name in the body of a class of the package that a base of another library has, by file."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef) or not node.bases:
                continue
            names = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            for one in node.body:
                names |= {
                    target.id
                    for target in getattr(one, "targets", ())
                    if isinstance(target, ast.Name)
                }
            module = import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
            bases = getattr(module, node.name).__mro__ if hasattr(module, node.name) else ()
            foreign = [one for one in bases if not one.__module__.startswith("sink_lens")]
            yield from (
                (path, name)
                for name in names
                if is_private(name) and any(hasattr(one, name) for one in foreign)
            )


def test_each_private_name_of_another_library_is_listed_with_its_reason():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    named, own = {*of_others(trees)}, {*overridden(trees)}
    assert {name for _, name in named | own} == PRIVATE.keys()
    elsewhere = (
        {name for name, why in PRIVATE.items() if why == OF_MODULES}
        | OF_BASES.keys()
        | {"_version"}
    )
    assert {name for path, name in named if path.name != "private_apis.py"} <= elsewhere
    assert torch.ones(1).add_(1)._version == 1
    tree = ast.parse("def f(model):\n    return model.config._attn_implementation\n")
    assert list(of_others({Path("x.py"): tree})) == [(Path("x.py"), "_attn_implementation")]
