"""The gradient by position, against autograd on the Hugging Face model by itself."""

import pytest
import torch

from sink_lens import wrap
from sink_lens.data.tokens import from_tensor
from sink_lens.engine.gradients import position_gradients
from sink_lens.models.tiny import tiny


def expected(model, tokens):
    """Gradient norms at the output of each layer, with Hugging Face's own loss; one sequence."""
    states = []
    layers = model.base_model.get_submodule("h" if hasattr(model.base_model, "h") else "layers")

    def keep(module, args, output):
        states.append(output[0] if isinstance(output, tuple) else output)
        states[-1].retain_grad()

    handles = [layer.register_forward_hook(keep) for layer in layers]
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    for handle in handles:
        handle.remove()
    model.zero_grad(set_to_none=True)
    return torch.stack([state.grad[0].norm(dim=-1) for state in states])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma2", "qwen3"])
def test_gradients_are_those_of_the_model_by_itself(family):
    model = tiny(family)
    tokens = torch.randint(5, 200, (2, 24), generator=torch.Generator().manual_seed(0))
    right = torch.stack([expected(model, tokens[row : row + 1]) for row in range(2)], dim=1)
    found = position_gradients(wrap(model), from_tensor(tokens))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-7)


def test_parameters_and_modes_stay_as_they_were_and_padding_is_nan():
    model = tiny("llama").train()
    model.requires_grad_(requires_grad=False)
    tokens = torch.randint(5, 200, (3, 300), generator=torch.Generator().manual_seed(0))
    lens = wrap(model)
    lens.plain.train()
    batch = from_tensor(tokens[:, :40], lengths=torch.tensor([40, 25, 1]))
    found = position_gradients(lens, batch)
    assert lens.plain.training
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in lens.plain.parameters())
    assert found[:, 1, 25:].isnan().all()
    assert found[:, 2].isnan().all()
    alone = position_gradients(lens, from_tensor(tokens[1:2, :25]))
    torch.testing.assert_close(found[:, 1:2, :25], alone)


def test_the_last_token_predicts_nothing():
    # After the last layer nothing reads a token but its own prediction, and the last token has none.
    found = position_gradients(wrap(tiny("llama")), from_tensor(torch.arange(5, 25)[None]))
    assert found[-1, 0, -1] == 0
    assert (found[-1, 0, :-1] > 0).all()
